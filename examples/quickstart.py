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
  print(f"{llm.get_metrics()['tokens_per_second']:.0f} tokens/s")


if __name__ == "__main__": main()
