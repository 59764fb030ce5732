"""Generate text with one line, then with an engine and several prompts.   python examples/quickstart.py [MODEL]"""
import sys

import tinyvllm
from tinyvllm import LLM, SamplingParams


def main() -> None:
  print("Hello" + tinyvllm.generate("Hello"))
  llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
  prompts = ["The cat", "Once upon a time", "The sun", "A computer"]
  for output in llm.generate(prompts, SamplingParams(temperature=0.7, seed=1, max_tokens=40)):
    print(output.prompt + output.outputs[0].text, f"[{output.outputs[0].finish_reason}]")
  print({name: round(value, 1) for name, value in llm.get_metrics().items()})


if __name__ == "__main__": main()
