"""Generate text with one line, then with an engine and several prompts.   python examples/quickstart.py [MODEL]"""
import sys, time

import tinyvllm
from tinyvllm import LLM, SamplingParams


def main() -> None:
  print("Hello" + tinyvllm.generate("Hello"))
  llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
  prompts = ["The cat", "Once upon a time", "The sun", "A computer"]
  params = SamplingParams(temperature=0.7, seed=1, max_tokens=40)
  llm.generate(prompts, params, use_tqdm=False)   # warm up: compiles kernels, so that the rate below leaves it out
  started = time.perf_counter()
  outputs = llm.generate(prompts, params)
  seconds = time.perf_counter() - started
  for output in outputs: print(output.prompt + output.outputs[0].text, f"[{output.outputs[0].finish_reason}]")
  print(f"{sum(len(output.outputs[0].token_ids) for output in outputs) / seconds:.0f} tokens/s")


if __name__ == "__main__": main()
