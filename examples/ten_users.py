"""Ten users stream from one engine at the same time; each step serves all of them. AsyncLLM runs the engine in its own
thread and accepts any number of users.

python examples/ten_users.py [MODEL]"""
import asyncio, sys

from tinyvllm import AsyncLLM, SamplingParams

PROMPTS = ["Hello", "The cat", "The sun", "I like", "My friend", "A computer", "Once upon a time", "What is", "We",
           "The rain"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=40)


async def user(llm: AsyncLLM, prompt: str) -> str:
  outputs = [output async for output in llm.generate(prompt, PARAMS)]
  text = "".join(output.outputs[0].text for output in outputs)
  return f"{prompt}{text}   ({len(outputs)} pieces, first token after {1000 * outputs[-1].metrics.ttft:.0f} ms)"


async def serve(model: str | None) -> None:
  llm = AsyncLLM(model, max_num_seqs=10)
  await asyncio.gather(*(user(llm, prompt) for prompt in PROMPTS))   # warm up: compiles kernels, not counted below
  before = llm.llm.get_metrics()
  for line in await asyncio.gather(*(user(llm, prompt) for prompt in PROMPTS)): print(line)
  tokens, steps = (llm.llm.get_metrics()[name] - before[name] for name in ("generation_tokens", "steps"))
  print(f"{tokens:.0f} tokens in {steps:.0f} steps, {tokens / steps:.1f} tokens a step")


def main() -> None: asyncio.run(serve(sys.argv[1] if len(sys.argv) > 1 else None))


if __name__ == "__main__": main()
