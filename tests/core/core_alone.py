"""Run the core in a process that can import only its dependencies. Prints one JSON object: the traceback of each
milestone ("" if it passes), and the error type and message of each feature that needs the extension.

python tests/core/core_alone.py MODEL_DIR MODEL_DIR_WITH_TOKENIZER_JSON MILESTONE..."""
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ALLOWED = {*sys.stdlib_module_names, "tinygrad", "numpy", "safetensors", "sentencepiece",
           "tinyvllm", "milestones", "helpers"}


def is_allowed(name: str) -> bool: return name.partition(".")[0] in ALLOWED or name.startswith("_sysconfigdata_")


def find_spec(name: str, path: Any = None, target: Any = None) -> None:
  """An import hook that raises ModuleNotFoundError for packages outside ALLOWED."""
  if not is_allowed(name): raise ModuleNotFoundError(f"No module named {name!r}", name=name)


for name in [name for name in sys.modules if not is_allowed(name) and name != "__main__"]:
  del sys.modules[name]   # a virtual environment may import some at startup
sys.modules["tinyvllm_extra"] = None   # type: ignore[assignment]   # its import fails
sys.meta_path.insert(0, SimpleNamespace(find_spec=find_spec))   # type: ignore[arg-type]

import milestones   # noqa: E402
import tinyvllm     # noqa: E402
from tinyvllm import LLM, SamplingParams, request   # noqa: E402


def error_of(call: Callable[..., Any], *arguments: Any) -> Exception | None:
  try: call(*arguments)
  except Exception as e: return e
  return None


def run_milestones(folder: Path, names: list[str]) -> dict[str, str]:
  arguments: dict[str, list[Any]] = {"hello": [], "paged_attention": [tinyvllm.Backend()]}   # others: the folder
  errors = {name: error_of(getattr(milestones, name), *arguments.get(name, [folder])) for name in names}
  return {name: "".join(traceback.format_exception(e)) if e else "" for name, e in errors.items()}


def get_feature_errors(folder: Path, json_folder: Path) -> dict[str, tuple[str, str]]:
  llm: Any = LLM(folder, **milestones.ONE)   # type: ignore[arg-type]
  def load(path: Path = folder, **options: Any) -> LLM: return LLM(path, **milestones.ONE, **options)
  uses: dict[str, Callable[[], Any]] = {
    "logprobs": lambda: SamplingParams(**{"logprobs": 1}),   # type: ignore[arg-type]
    "messages": lambda: llm.generate({"messages": [{"role": "user", "content": "the cat"}]}),
    "speculative_config": lambda: load(speculative_config={"method": "ngram", "num_speculative_tokens": 2}),
    "quantization": lambda: load(quantization="int8"),
    "gguf": lambda: load(folder / "model.gguf"),
    "tokenizer.json": lambda: load(json_folder),
    "skip_special_tokens": lambda: llm.generate("the cat", SamplingParams(skip_special_tokens=False, max_tokens=2)),
    "AsyncLLM": lambda: tinyvllm.AsyncLLM}
  errors = {name: error_of(use) for name, use in uses.items()}
  return {name: (type(e).__name__, str(e)) if e else ("", "") for name, e in errors.items()}


if __name__ == "__main__":
  assert SamplingParams is request.SamplingParams and importlib.util.find_spec("tinyvllm_extra") is None
  folder, json_folder = map(Path, sys.argv[1:3])
  (folder / "generation_config.json").write_text('{"temperature": 0.5, "repetition_penalty": 1.1}')   # ignored
  loaded = LLM(folder, **milestones.ONE)   # type: ignore[arg-type]
  assert loaded.generate("the cat")
  report = {"defaults": vars(loaded.make_request("x", "the cat").sequences[0].params)["temperature"],
            "missing": [name for name in ("chat", "get_metrics", "step") if not hasattr(loaded, name)],
            "milestones": run_milestones(folder, sys.argv[3:]), "errors": get_feature_errors(folder, json_folder)}
  names = {name.partition(".")[0] for name, module in sys.modules.items() if module}
  print(json.dumps(report | {"packages": sorted(names - sys.stdlib_module_names)}))
