"""Ten users stream from one engine at once, each on a thread of its own: every step serves all of them.

python examples/ten_users.py [MODEL]"""
import sys
from concurrent.futures import ThreadPoolExecutor

from tinyvllm import LLM, SamplingParams

PROMPTS = ["Hello", "The cat", "The sun", "I like", "My friend", "A computer", "Once upon a time", "What is", "We",
           "The rain"]


def main() -> None:
  llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None, max_num_seqs=10)

  def user(prompt: str) -> str:
    outputs = list(llm.generate_stream(prompt, SamplingParams(temperature=0.0, max_tokens=40)))
    text = "".join(output.outputs[0].text for output in outputs)
    return f"{prompt}{text}   ({len(outputs)} pieces, first after {outputs[-1].metrics.ttft:.2f} s)"
  with ThreadPoolExecutor(len(PROMPTS)) as users:
    for line in users.map(user, PROMPTS): print(line)
  m = llm.get_metrics()
  print(f"{m['generation_tokens']:.0f} tokens in {m['steps']:.0f} steps, {m['mean_batch_size']:.1f} sequences a step")


if __name__ == "__main__": main()
