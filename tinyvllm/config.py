"""What is known before anything is loaded: the model's shape, from its own files, and the user's options, checked."""
import dataclasses, json, logging, pathlib, types
from typing import Annotated, Any

logger = logging.getLogger("tinyvllm")
ARCHITECTURES = {"LlamaForCausalLM": {}, "MistralForCausalLM": {}, "Qwen2ForCausalLM": {"qkv_bias": True},
                 "Qwen3ForCausalLM": {"qk_norm": True}}
KNOWN = {"architecture": ARCHITECTURES, "hidden_act": ["silu"], "rope_type": ["default", "llama3", "linear", "factors"]}
# What a config.json must have, and what the rest is where it is not there
NEEDED = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"]
DEFAULTS: dict[str, Any] = {
  "architectures": [], "hidden_act": "silu", "max_position_embeddings": 2048, "rope_theta": 10000.0, "rope_scaling": {},
  "eos_token_id": [], "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "qk_norm": False}


def check(ok: Any, message: str) -> None:
  """Raise ValueError with the message unless ok: how every mistake of a user's is refused."""
  if not ok: raise ValueError(message)


def read_json(path: pathlib.Path) -> dict[str, Any]: return json.loads(path.read_text()) if path.exists() else {}


def kind_of(f: Any) -> tuple[Any, tuple]:
  """An option's type, and its limits if it has any: inclusive bounds, all the strings that will do, or what a list is
  of."""
  return (f.type.__origin__, f.type.__metadata__) if hasattr(f.type, "__metadata__") else (f.type, ())


class Options:
  """A frozen dataclass that refuses unknown names, wrong types and values outside an Annotated field's limits with a
  ValueError that says what would do."""
  def __new__(cls, *args: Any, **kwargs: Any) -> Any:
    names = [f.name for f in dataclasses.fields(cls)]   # type: ignore[arg-type]
    for name in kwargs: check(name in names, f"{cls.__name__} has no field {name!r}; its fields are {', '.join(names)}")
    return super().__new__(cls)

  def __post_init__(self) -> None:
    for f in dataclasses.fields(self):   # type: ignore[arg-type]
      value, (kind, limits) = getattr(self, f.name), kind_of(f)
      typed = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
      check(typed, f"{f.name}={value!r} must be of type {getattr(kind, '__name__', kind)}")
      if isinstance(value, list): check(all(type(x) is limits[0] and x != "" for x in value),
                                        f"{f.name}={value!r} must list {limits[0].__name__}s, none empty")
      elif kind is str and limits: check(value in limits, f"{f.name}={value!r} must be one of {', '.join(limits)}")
      elif limits and value is not None:
        given = value if isinstance(value, dict) else {0: value}   # by token id
        ok = [type(i) is int and type(x) in (int, float) and limits[0] <= x <= limits[1] for i, x in given.items()]
        check(all(ok), f"{f.name}={value!r} must be from {limits[0]} to {limits[1]}")


@dataclasses.dataclass(frozen=True)
class EngineConfig(Options):
  """The engine's limits, with vLLM's names."""
  dtype: Annotated[str, "auto", "float32", "float16", "bfloat16"] = "auto"   # auto: float32 on CPU, else float16
  max_model_len: Annotated[int | None, 2, 2**24] = None   # of prompt and output together; None: the model's limit
  max_num_seqs: Annotated[int, 1, 1024] = 64              # sequences that run at once
  max_num_batched_tokens: Annotated[int, 1, 16384] = 512   # of one step: a longer prompt is computed in chunks
  block_size: Annotated[int, 1, 256] = 16                 # tokens in one block of the KV cache
  gpu_memory_utilization: Annotated[float | int, 0.01, 1.0] = 0.9   # share of free memory for the KV cache
  num_gpu_blocks_override: Annotated[int | None, 2, 2**24] = None   # blocks, scratch block 0 included
  enable_prefix_caching: bool = True                      # find what has been computed before, prompts and answers
  enforce_eager: bool = False                             # never capture a step as a graph: slow, for debugging
  seed: Annotated[int, -2**63, 2**63 - 1] = 0             # of the requests that bring none
  scheduling_policy: Annotated[str, "fcfs", "priority"] = "fcfs"   # priority: lower numbers first


class ModelConfig(types.SimpleNamespace):
  """A LLaMA-like model's shape, under Hugging Face's names: all those NEEDED, all the DEFAULTS, num_key_value_heads,
  head_dim, qkv_bias, o_bias; eos_token_ids, a tuple; rope_scaling, a dict whose rope_type is one of those KNOWN."""
  @classmethod
  def from_hf(cls, hf: dict[str, Any], source: pathlib.Path) -> "ModelConfig":
    """From config.json's content; its eos_token_id may be a list. Raises ValueError for what this engine lacks."""
    hf = DEFAULTS | {k: v for k, v in hf.items() if v is not None}
    check(not (missing := [n for n in NEEDED if n not in hf]), f"{source} is incomplete: add {', '.join(missing)}")
    # transformers 5 keeps rope_theta in rope_parameters
    rope = {"rope_type": (given := hf.get("rope_parameters") or hf["rope_scaling"]).get("type", "default"), **given}
    heads, bias, eos = hf["num_attention_heads"], hf["attention_bias"], hf["eos_token_id"]
    values = {"architecture": [*hf["architectures"], None][0], "qkv_bias": bias, "o_bias": bias,
              "num_key_value_heads": heads, "head_dim": hf["hidden_size"] // heads, **hf, **rope, "rope_scaling": rope,
              "eos_token_ids": tuple(eos if isinstance(eos, list) else [eos])}
    for name, known in KNOWN.items():
      check(values[name] in known, f"{source}: {name} {values[name]!r} is not supported; supported: {', '.join(known)}")
    if (window := hf.get("sliding_window")) and hf.get("use_sliding_window", True):   # within it, the model is plain
      values["max_position_embeddings"] = min(values["max_position_embeddings"], window)
    return cls(**values | ARCHITECTURES[values["architecture"]])
