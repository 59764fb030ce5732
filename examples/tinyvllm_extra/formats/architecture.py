"""The model that a folder describes: the text part of config.json, and whether the model computes embeddings, in the
format of sentence-transformers. An embedding is the hidden state of the last token instead of logits."""
import dataclasses, pathlib
from typing import Any

from tinygrad.dtype import DType

from tinyvllm.backend import Backend, Devices
from tinyvllm.config import JsonObject, ModelConfig, check, read_json
from tinyvllm.llama import Llama
from tinyvllm_extra.models import find_model
from tinyvllm_extra.options import check_one_device

MODULES = {"Transformer", "Pooling", "Normalize"}   # sentence-transformers' modules that tinyvllm computes


def text_config(hf: JsonObject) -> JsonObject:
  """Return the config of a model or of its part for text, without null fields."""
  own = {x: hf.get(x) for x in ("architectures", "eos_token_id", "tie_word_embeddings")}
  return {x: value for part in (hf, hf.get("text_config") or {}, own) for x, value in part.items() if value is not None}


class Embedder(Llama):
  """A model without lm_head: returns float32 hidden states, (S, hidden), after the final norm, in place of logits."""
  def __init__(self, config: ModelConfig, dtype: DType, backend: Backend, devices: Devices):
    check_one_device(len(devices.names), " for an embedding model")
    super().__init__(dataclasses.replace(config, tie_word_embeddings=True), dtype, backend, devices)
    self.lm_head = lambda h, dtype: h.cast(dtype).contiguous()   # type: ignore[assignment]

  __call__ = Llama.__call__   # hidden states are not scaled as LlamaVariant's logits


def is_embedder(path: pathlib.Path, runner: str) -> bool:
  """Return whether to compute embeddings with a model: as LLM's option `runner` says, or if it is auto, for a folder
  with modules.json of sentence-transformers, as in vLLM. Raises InputError for pooling other than of the last token."""
  folder = path if path.is_dir() else path.parent
  modules: Any = read_json(path / "modules.json") if path.is_dir() else {}
  if runner == "generate" or runner == "auto" and not modules: return False
  unsupported = [x["type"] for x in modules if x["type"].rpartition(".")[2] not in MODULES]
  check(not unsupported, f"model: {folder}: modules.json has {unsupported}; supported: {', '.join(sorted(MODULES))}: "
        "choose another model")
  pooling = read_json(folder / "1_Pooling" / "config.json") or {"pooling_mode_lasttoken": True}
  check(pooling.get("pooling_mode_lasttoken"), f"model: {folder}: 1_Pooling/config.json: pooling_mode_lasttoken must "
        "be true, because only the last token has seen the whole text: choose another model")
  return True


def choose_model(hf_config: JsonObject, path: pathlib.Path, runner: str = "auto") -> tuple[ModelConfig, type[Llama]]:
  """Like find_model, for any config.json. Return the class of an Embedder to compute embeddings. runner: see
  is_embedder."""
  config, model_class = find_model(text_config(hf_config), path)
  return config, type("Embedder", (Embedder, model_class), {}) if is_embedder(path, runner) else model_class
