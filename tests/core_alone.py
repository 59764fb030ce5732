"""The core in a process that can import nothing but its dependencies. Prints one JSON object: the milestones by name,
each with its traceback or "", and the features of the extension, each with the type and the text of its error.

python tests/core_alone.py FOLDER-OF-A-MODEL FOLDER-OF-A-MODEL-WITH-tokenizer.json NAME-OF-A-MILESTONE..."""
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ALLOWED = {*sys.stdlib_module_names, "tinygrad", "numpy", "safetensors", "sentencepiece",
           "tinyvllm", "milestones", "reference"}


def is_allowed(name: str) -> bool: return name.partition(".")[0] in ALLOWED or name.startswith("_sysconfigdata_")


class Blocker:
  """An import hook that finds nothing, and fails for packages that are not allowed."""
  @staticmethod
  def find_spec(name: str, path: Any = None, target: Any = None) -> None:
    if is_allowed(name): return
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


for name in [name for name in sys.modules if not is_allowed(name) and name != "__main__"]:
  del sys.modules[name]   # a virtual environment may load some at startup
sys.modules["tinyvllm_extra"] = None   # type: ignore[assignment]   # as if not installed
sys.meta_path.insert(0, Blocker)       # type: ignore[arg-type]

import milestones   # noqa: E402
import tinyvllm     # noqa: E402
from tinyvllm import LLM, SamplingParams, engine, request   # noqa: E402


class CountingScheduler(engine.Scheduler):
  """Counts preemptions and generated tokens, as the extension's metrics do."""
  num_preemptions = num_generated = 0

  def preempt(self, seq: request.Sequence) -> None:
    self.num_preemptions += 1
    super().preempt(seq)

  def update(self, computed: dict[request.Sequence, range], sampled: dict[request.Sequence, int]) -> None:
    self.num_generated += len(sampled)
    super().update(computed, sampled)


def get_metrics(llm: LLM) -> dict[str, Any]:
  scheduler: Any = llm.scheduler
  return {"num_preemptions": scheduler.num_preemptions, "generation_tokens": scheduler.num_generated,
          "blocks_used": llm.blocks.num_used(), "num_requests_running": len(scheduler.running)}


def run_milestones(folder: Path, names: list[str]) -> dict[str, str]:
  runs: dict[str, Callable[[], None]] = {
    "hello": milestones.hello,
    "paged_attention": lambda: milestones.paged_attention(tinyvllm.Backend()),
    "ten_requests": lambda: milestones.ten_requests(folder, get_metrics),
    "continuous_batching": lambda: milestones.continuous_batching(folder),
    "paging": lambda: milestones.paging(folder, get_metrics),
    "streaming": lambda: milestones.streaming(folder, get_metrics)}
  found = {}
  for name in names:
    found[name] = ""
    try: runs[name]()
    except Exception: found[name] = traceback.format_exc()
  return found


def errors_of_features(folder: Path, json_folder: Path) -> dict[str, tuple[str, str]]:
  llm: Any = LLM(folder, **milestones.ONE)   # type: ignore[arg-type]
  cat: Any = {"messages": [{"role": "user", "content": "the cat"}]}
  speculation = {"method": "ngram", "num_speculative_tokens": 2}
  def load(path: Path = folder, **options: Any) -> LLM: return LLM(path, **milestones.ONE, **options)
  uses: dict[str, Callable[[], Any]] = {
    "logprobs": lambda: SamplingParams(**{"logprobs": 1}),   # type: ignore[arg-type]
    "messages": lambda: llm.generate(cat),
    "speculative_config": lambda: load(speculative_config=speculation),
    "tensor_parallel_size": lambda: load(tensor_parallel_size=2),
    "quantization": lambda: load(quantization="int8"),
    "kv_cache_dtype": lambda: load(kv_cache_dtype="int8"),
    "cudagraph_capture_sizes": lambda: load(cudagraph_capture_sizes=[8]),
    "gguf": lambda: load(folder / "model.gguf"),
    "tokenizer.json": lambda: load(json_folder),
    "skip_special_tokens": lambda: llm.generate("the cat", SamplingParams(skip_special_tokens=False, max_tokens=2)),
    "AsyncLLM": lambda: tinyvllm.AsyncLLM,
    "chat": lambda: llm.chat(cat["messages"]),
    "step": lambda: llm.step(),
    "get_metrics": lambda: llm.get_metrics()}
  found = {}
  for name, use in uses.items():
    found[name] = ("", "")
    try: use()
    except Exception as e: found[name] = (type(e).__name__, str(e))
  return found


if __name__ == "__main__":
  assert SamplingParams is request.SamplingParams and importlib.util.find_spec("tinyvllm_extra") is None
  llm_class: Any = LLM
  llm_class.scheduler_class = CountingScheduler
  folder, json_folder = map(Path, sys.argv[1:3])
  found = {"milestones": run_milestones(folder, sys.argv[3:]), "errors": errors_of_features(folder, json_folder)}
  names = {name.partition(".")[0] for name, module in sys.modules.items() if module}
  print(json.dumps(found | {"packages": sorted(names - sys.stdlib_module_names)}))
