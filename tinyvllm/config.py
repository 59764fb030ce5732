"""What is known before anything is loaded: the model's shape, from its own files, and the user's options. Both are checked here."""
import difflib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

# architecture -> (attention biases on q, k, v; on o; q and k normed per head). None: as config.json's attention_bias says.
ARCHITECTURES = {"LlamaForCausalLM": (None, None, False), "MistralForCausalLM": (False, False, False),
                 "Qwen2ForCausalLM": (True, False, False), "Qwen3ForCausalLM": (None, None, True)}


def option(default: Any, kind: type, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = (), help: str = "") -> Any:
  """A dataclass field of `Options`: its default, its type, its inclusive limits, and one line of help for the command line."""
  return field(default=default, metadata={"kind": kind, "low": low, "high": high, "choices": choices, "help": help})


class Options:
  """A frozen dataclass of `option`s that refuses unknown names, wrong types and values out of range with a ValueError that says what would do.
  None is valid where it is the default."""
  def __new__(cls, *args: Any, **kwargs: Any) -> Any:
    names = [f.name for f in fields(cls)]   # type: ignore[arg-type]
    for name in kwargs:
      if name not in names:
        hint = difflib.get_close_matches(name, names, 1) or names
        raise ValueError(f"{cls.__name__} has no field {name!r}; did you mean {' or '.join(hint)}?")
    return super().__new__(cls)

  def __post_init__(self) -> None:
    for f in fields(self):   # type: ignore[arg-type]
      value, kind, low, high, choices = getattr(self, f.name), *(f.metadata[k] for k in ("kind", "low", "high", "choices"))
      if value is None and f.default is None: continue
      numeric = (int, float) if kind is float else kind
      if not isinstance(value, numeric) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{f.name}={value!r} must be {kind.__name__}, not {type(value).__name__}")
      if choices and value not in choices: raise ValueError(f"{f.name}={value!r} must be one of {', '.join(choices)}")
      if (low is not None and not value >= low) or (high is not None and not value <= high):   # NaN fails both
        raise ValueError(f"{f.name}={value!r} must be " + " and ".join([f"at least {low}"] * (low is not None) + [f"at most {high}"] * (high is not None)))


@dataclass(frozen=True)
class EngineConfig(Options):
  """The engine's limits, with vLLM's names."""
  dtype: str = option("auto", str, choices=("auto", "float32", "float16", "bfloat16"), help="of weights and KV cache; auto: float32 on CPU, else float16")
  max_model_len: int | None = option(None, int, 2, help="tokens of prompt and output together; default: the model's own limit")
  max_num_seqs: int = option(64, int, 1, 1024, help="sequences that run at once")
  max_num_batched_tokens: int = option(512, int, 1, 16384, help="tokens of one step: a longer prompt is computed in chunks")
  block_size: int = option(16, int, 1, 256, help="tokens in one block of the KV cache")
  gpu_memory_utilization: float = option(0.9, float, 0.01, 1.0, help="share of the device's free memory for the KV cache")
  num_gpu_blocks_override: int | None = option(None, int, 2, help="blocks of the KV cache, block 0 (scratch) included")
  enforce_eager: bool = option(False, bool, help="never capture a step as a graph: slow, for debugging")
  seed: int = option(0, int, 0, 2**63 - 1, help="of the requests that bring none")
  scheduling_policy: str = option("fcfs", str, choices=("fcfs", "priority"), help="fcfs, or lower priority numbers first")

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.max_num_batched_tokens < self.max_num_seqs:
      raise ValueError(f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least max_num_seqs={self.max_num_seqs}: "
                       "each running sequence decodes one token a step")


@dataclass(frozen=True)
class ModelConfig:
  """A LLaMA-like model's shape, under Hugging Face's names. `rope_scaling`: None, or its `llama3` or `linear` entry, or
  `factors`, one for each frequency."""
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int
  max_position_embeddings: int
  rms_norm_eps: float
  rope_theta: float = 10000.0
  rope_scaling: dict[str, Any] | None = None
  tie_word_embeddings: bool = False
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  bos_token_id: int | None = None
  eos_token_ids: tuple[int, ...] = ()

  @classmethod
  def from_folder(cls, folder: Path) -> "ModelConfig":
    """Read config.json and, for the end tokens, generation_config.json. Raises ValueError for what the model needs and this engine lacks."""
    hf = json.loads((folder / "config.json").read_text())
    name = (hf.get("architectures") or ["none named"])[0]
    if name not in ARCHITECTURES:
      raise ValueError(f"{folder / 'config.json'}: architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}")
    if hf.get("hidden_act", "silu") != "silu": raise ValueError(f"{folder / 'config.json'}: hidden_act {hf['hidden_act']}: only silu is supported")
    qkv_bias, o_bias, qk_norm = ARCHITECTURES[name]
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}   # transformers 5 keeps rope_theta in rope_parameters
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3", "linear"):
      raise ValueError(f"{folder / 'config.json'}: rope scaling {kind!r} is not supported; supported: llama3, linear")
    generation = folder / "generation_config.json"
    eos = (json.loads(generation.read_text()) if generation.exists() else {}).get("eos_token_id", hf.get("eos_token_id"))
    window = hf.get("sliding_window") if hf.get("use_sliding_window", True) else None   # inside its window, such a model is a plain one
    heads, bias = hf["num_attention_heads"], hf.get("attention_bias", False)
    return cls(
      **{k: hf[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")},
      num_key_value_heads=hf.get("num_key_value_heads") or heads, head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
      max_position_embeddings=min(hf.get("max_position_embeddings", 2048), window or 1 << 30),
      rope_theta=rope.get("rope_theta", hf.get("rope_theta", 10000.0)), rope_scaling={**rope, "rope_type": kind} if kind != "default" else None,
      tie_word_embeddings=hf.get("tie_word_embeddings", False), mlp_bias=hf.get("mlp_bias", False), qk_norm=qk_norm,
      qkv_bias=bias if qkv_bias is None else qkv_bias, o_bias=bias if o_bias is None else o_bias,
      bos_token_id=hf.get("bos_token_id"), eos_token_ids=tuple(eos if isinstance(eos, list) else [] if eos is None else [eos]))

  @classmethod
  def from_gguf(cls, kv: dict[str, Any], tensors: dict[str, Any]) -> "ModelConfig":
    """Read the metadata of a GGUF file of the llama architecture."""
    if (name := kv["general.architecture"]) != "llama": raise ValueError(f"GGUF architecture {name} is not supported; supported: llama")
    meta = {k.removeprefix("llama."): v for k, v in kv.items() if k.startswith("llama.")}
    if (kind := meta.get("rope.scaling.type", "none")) not in ("none", "linear"): raise ValueError(f"GGUF rope scaling {kind!r} is not supported")
    scaling = {"rope_type": "linear", "factor": meta["rope.scaling.factor"]} if kind == "linear" else None
    if "rope_freqs.weight" in tensors: scaling = {"rope_type": "factors", "factors": tensors["rope_freqs.weight"].tolist()}   # llama3's, worked out
    heads, hidden = meta["attention.head_count"], meta["embedding_length"]
    return cls(
      vocab_size=tensors["token_embd.weight"].shape[0], hidden_size=hidden, intermediate_size=meta["feed_forward_length"],
      num_hidden_layers=meta["block_count"], num_attention_heads=heads, num_key_value_heads=meta.get("attention.head_count_kv", heads),
      head_dim=meta.get("attention.key_length", hidden // heads), max_position_embeddings=meta["context_length"],
      rms_norm_eps=meta["attention.layer_norm_rms_epsilon"], rope_theta=meta.get("rope.freq_base", 10000.0), rope_scaling=scaling,
      tie_word_embeddings="output.weight" not in tensors, bos_token_id=kv.get("tokenizer.ggml.bos_token_id"),
      eos_token_ids=tuple(kv[k] for k in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if k in kv))
