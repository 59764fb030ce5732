"""Engine options with their checks, and the model's shape from config.json. Raises InputError for a user's mistake."""
import dataclasses, json, logging, pathlib, re, types, typing
from typing import Any

JsonObject = dict[str, Any]   # a decoded JSON object
logger = logging.getLogger("tinyvllm")
DTYPES = ("auto", "float32", "float16", "bfloat16", "float", "half")
# The values of config.json that the core computes with
SUPPORTED = {"architecture": ["LlamaForCausalLM"], "hidden_act": ["silu"],
             "rope_type": ["default", "llama3", "linear", "factors"]}


class InputError(ValueError):
  """A user's mistake (HTTP 400). Every other exception is a bug in tinyvllm (HTTP 500).
  `parameter` is the field that the message begins with, as in "top_p=2 must be ...", or None; `value` is its value."""
  def __init__(self, message: str, value: object = None):
    super().__init__(message)
    self.parameter = next(iter(re.findall(r"^(\w+)[=:]", message)), None)
    self.value = value


def check(ok: object, message: str, value: object = None) -> None:
  """Raise InputError unless `ok`. The message names the field, its value, the limit and the remedy."""
  if not ok: raise InputError(message, value)


def check_ids(size: int, **lists: list[int] | dict[int, float] | None) -> None:
  for name, i in [(x, i) for x, ids in lists.items() for i in ids or () if type(i) is not int or not 0 <= i < size]:
    raise InputError(f"{name}: id {i!r} must be an int from 0 to {size - 1}")


def read_json(path: pathlib.Path) -> JsonObject:
  """Return the content of a JSON file, {} if it does not exist. Raises InputError with the name of a damaged file."""
  try: return json.loads(path.read_text()) if path.exists() else {}
  except ValueError as e: raise InputError(f"{path} must be JSON: {e}") from e


def option(default: object, help: str, *, min: float | None = None, max: float | None = None,
           choices: tuple[str, ...] = ()) -> Any:
  """Return a dataclass field with a help text and its limits: inclusive bounds, or the strings to choose from."""
  return dataclasses.field(default=default, metadata={"help": help, "min": min, "max": max, "choices": choices})


def has_type(value: object, kind: Any) -> bool:
  """Return whether `value` has an annotated type (class, list[X], dict[K, V], union). An int is a float, not a bool."""
  args = typing.get_args(kind)
  if isinstance(kind, types.UnionType): return any(has_type(value, arg) for arg in args)
  if typing.get_origin(kind) is list: return isinstance(value, list) and all(has_type(x, args[0]) for x in value)
  if typing.get_origin(kind) is dict:
    return isinstance(value, dict) and all(has_type(k, args[0]) and has_type(v, args[1]) for k, v in value.items())
  if kind is Any or kind is float: return kind is Any or type(value) in (int, float)
  return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


@dataclasses.dataclass(frozen=True)
class Options:
  """A frozen dataclass that refuses unknown names, wrong types and values beyond an option's limits with InputError."""
  def __new__(cls, *args: object, **kwargs: object) -> typing.Self:
    names = cls.__dataclass_fields__   # also of those for initialization only
    more = "; tinyvllm_extra has more" if cls.__module__.startswith("tinyvllm.") else ""
    for x in kwargs: check(x in names, f"{cls.__name__} has no field {x!r}; it has {', '.join(names)}{more}")
    return super().__new__(cls)

  def __post_init__(self) -> None:
    changed = [(x, getattr(self, x.name)) for x in dataclasses.fields(self) if getattr(self, x.name) is not x.default]
    for field, value in changed:
      text = f"{field.name}={value!r} must"
      check(has_type(value, field.type), f"{text} be of type {getattr(field.type, '__name__', field.type)}", value)
      check(not isinstance(value, list) or "" not in value, f"{text} not hold an empty string", value)
      choices, low, high = (field.metadata.get(limit) for limit in ("choices", "min", "max"))
      check(not choices or value in (*choices, None), f"{text} be one of {', '.join(choices or ())}", value)
      numbers = [*value.values()] if isinstance(value, dict) else [value] * isinstance(value, int | float)
      check(low is None or all(low <= x <= high for x in numbers), f"{text} be between {low} and {high}", value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(Options):
  """Engine options, under vLLM's names."""
  dtype: str = option("auto", "Activations (CPU: weights, cache); auto: float32 on a CPU, else float16", choices=DTYPES)
  max_model_len: int | None = option(None, "Context length in tokens (default: model's)", min=2, max=2**24)
  max_num_seqs: int = option(64, "Maximum running sequences", min=1, max=1024)
  max_num_batched_tokens: int | None = option(None, "Token budget per step (default: 128 to 2048)", min=1, max=16384)
  block_size: int = option(16, "Tokens per KV cache block", min=1, max=256)
  gpu_memory_utilization: float = option(0.9, "Fraction of free memory to use", min=0.01, max=1.0)
  num_gpu_blocks_override: int | None = option(None, "KV cache size in blocks (default: what fits)", min=2, max=2**24)
  enable_prefix_caching: bool = option(True, "Reuse KV cache of equal prefixes")
  enforce_eager: bool = option(False, "Run without graph capture (slow, for debugging)")
  seed: int | None = option(0, "Seed of requests without one", min=-2**63, max=2**63 - 1)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a LLaMA-like model, under Hugging Face's names. Fields without a default must be in config.json."""
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  rms_norm_eps: float
  num_key_value_heads: int
  head_dim: int
  rope_scaling: JsonObject           # with its rope_type
  eos_token_ids: tuple[int, ...]
  max_position_embeddings: int = 2048
  rope_theta: float = 10000.0
  tie_word_embeddings: bool = False
  attention_bias: bool = False       # biases of q_proj, k_proj, v_proj and o_proj
  mlp_bias: bool = False

  @classmethod
  def from_hf(cls, hf: JsonObject, source: pathlib.Path) -> "ModelConfig":
    """Read config.json's content. Raises InputError for a missing field or an unsupported value."""
    hf = {**vars(cls), "architectures": [None], "hidden_act": "silu", "eos_token_id": [],   # vars: the fields' defaults
          **{name: value for name, value in hf.items() if value is not None}}
    missing = ", ".join(name for name in cls.__match_args__[:6] if name not in hf)
    check(not missing, f"model={str(source)!r} has no config.json with {missing}: choose a model's folder")
    rope = hf.get("rope_parameters") or hf.get("rope_scaling", {})   # transformers 5 keeps rope_theta in the first
    rope = {"rope_type": rope.get("type", "default"), **rope}
    eos = hf["eos_token_id"]
    values = {"head_dim": hf["hidden_size"] // hf["num_attention_heads"],
              "num_key_value_heads": hf["num_attention_heads"], **hf, **rope, "rope_scaling": rope,
              "architecture": hf["architectures"][0], "eos_token_ids": tuple(eos if isinstance(eos, list) else [eos])}
    for name, names in SUPPORTED.items():
      check(values[name] in names, f"{source}: {name} {values[name]!r} is not supported; supported: {', '.join(names)}")
    return cls(**{name: values[name] for name in cls.__match_args__})
