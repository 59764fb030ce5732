"""One engine computes prompts, another one generates from them: the blocks of the KV cache go through a prefix-cache
file, here in a temporary folder. On two machines, the folder is a shared one. Prints the time of each part, beside one
engine that does both.

python examples/disaggregated.py [MODEL]"""
import pathlib, sys, tempfile, time
from collections.abc import Callable
from typing import Any

from tinyvllm import LLM, SamplingParams

PROMPTS = [f"Story {i}. " + "The cat sleeps in the sun, and the dog runs to the river. " * 12 for i in range(4)]
OTHERS = [f"Letter {i}. " + prompt for i, prompt in enumerate(PROMPTS)]   # for the first run, which compiles kernels
FIRST = SamplingParams(temperature=0.0, max_tokens=1)
ALL = SamplingParams(temperature=0.0, max_tokens=32)


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
  started = time.perf_counter()
  result = call()
  return time.perf_counter() - started, result


def run(model: str | None, folder: str) -> None:
  file = str(pathlib.Path(folder) / "blocks")
  prefill, decode, both = [LLM(model, gpu_memory_utilization=0.2) for _ in range(3)]
  for llm, params in ((prefill, FIRST), (decode, ALL), (decode, ALL), (both, ALL)):   # the third: cached prompts
    llm.generate(OTHERS, params, use_tqdm=False)

  computed, outputs = seconds(lambda: prefill.generate(PROMPTS, FIRST, use_tqdm=False))
  saved, _ = seconds(lambda: prefill.save_prefix_cache(file))
  loaded, _ = seconds(lambda: decode.load_prefix_cache(file))
  generated, results = seconds(lambda: decode.generate(PROMPTS, ALL, use_tqdm=False))
  alone, expected = seconds(lambda: both.generate(PROMPTS, ALL, use_tqdm=False))

  assert [x.outputs[0].text for x in results] == [x.outputs[0].text for x in expected]
  tokens, cached = sum(len(x.prompt_token_ids) for x in outputs), sum(x.num_cached_tokens for x in results)
  print(f"prompts {computed:.2f} s, save {saved:.2f} s, load {loaded:.2f} s, generate {generated:.2f} s; "
        f"one engine {alone:.2f} s. The texts are equal.")
  size = pathlib.Path(file).stat().st_size / 1e6
  print(f"{cached} of {tokens} prompt tokens came from the file, {size:.1f} MB with the first run's.")
  print("Worth it if save and load take less time than the prompts, the engines have devices of their own, and pauses "
        "of running\nstreams matter. On one device, the engine's own mixed steps take less time, and limit pauses "
        "(--max-pause).")


def main() -> None:
  with tempfile.TemporaryDirectory() as folder: run(sys.argv[1] if len(sys.argv) > 1 else None, folder)


if __name__ == "__main__": main()
