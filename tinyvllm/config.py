"""What is known before anything is loaded: the user's options, checked, and the model's shape, from its own files."""
import dataclasses, json, logging, pathlib, re
from typing import Annotated, Any

logger = logging.getLogger("tinyvllm")
# What this engine takes
KNOWN = {"architecture": ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"],
         "hidden_act": ["silu"], "rope_type": ["default", "llama3", "linear", "factors"]}


class InputError(ValueError):
  """A user's mistake: HTTP 400. `parameter` is the field that the message begins with, if any."""
  def __init__(self, message: str):
    super().__init__(message)
    match = re.match(r"(\w+)(?:=|:)", message)
    self.parameter = match[1] if match else None


def check(ok: Any, message: str) -> None:
  """Raise InputError with the message unless ok: how every mistake of a user's is refused."""
  if not ok: raise InputError(message)


def read_json(path: pathlib.Path) -> dict[str, Any]: return json.loads(path.read_text()) if path.exists() else {}


def kind_of(field: Any) -> tuple[Any, tuple]:
  """An option's type, and its limits if it has any: inclusive bounds, all the strings that will do, or what a list is
  of."""
  return getattr(field.type, "__origin__", field.type), getattr(field.type, "__metadata__", ())


class Options:
  """A frozen dataclass that refuses unknown names, wrong types and values outside an Annotated field's limits with a
  ValueError that says what would do."""
  def __new__(cls, *args: Any, **kwargs: Any) -> Any:
    names = cls.__match_args__   # type: ignore[attr-defined]   # the fields'
    for name in kwargs: check(name in names, f"{cls.__name__} has no field {name!r}; its fields are {', '.join(names)}")
    return super().__new__(cls)

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):   # type: ignore[arg-type]
      value = getattr(self, field.name)
      kind, limits = kind_of(field)
      said = f"{field.name}={value!r} must"
      typed = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
      check(typed, f"{said} be of type {getattr(kind, '__name__', kind)}")
      if isinstance(value, list):
        check(all(type(x) is limits[0] and x != "" for x in value), f"{said} list {limits[0].__name__}s, none empty")
      elif isinstance(value, str): check(not limits or value in limits, f"{said} be one of {', '.join(limits)}")
      elif limits and value is not None:
        pairs = value.items() if isinstance(value, dict) else [(0, value)]   # by token id
        inside = all(type(i) is int and type(x) in (int, float) and limits[0] <= x <= limits[1] for i, x in pairs)
        check(inside, f"{said} be from {limits[0]} to {limits[1]}")


# vLLM's options that change nothing here, by the values at which that is so
NO_EFFECT: dict[str, list] = {name: values for names, values in {   # type: ignore[misc]   # lists of anything
  "pipeline_parallel_size data_parallel_size": [1], "cpu_offload_gb": [0], "enable_chunked_prefill": [True, None],
  "tokenizer revision tokenizer_revision hf_token hf_overrides distributed_executor_backend": [None],
  "tokenizer_mode load_format config_format device": ["auto"], "task runner": ["auto", "generate"],
  "trust_remote_code disable_log_stats disable_custom_all_reduce": [True, False],
  "enable_lora skip_tokenizer_init disable_sliding_window": [False],
  "swap_space download_dir max_seq_len_to_capture": [...]}.items() for name in names.split()}   # ...: at any


def effective(options: dict[str, Any]) -> dict[str, Any]:
  """Options without those of vLLM's that change nothing. Raises ValueError for such a name at another value."""
  for name in options.keys() & NO_EFFECT.keys():
    taken = options[name] in NO_EFFECT[name] or ... in NO_EFFECT[name]
    check(taken, f"{name}={options[name]!r} is not supported, only {' or '.join(map(repr, NO_EFFECT[name]))}")
  return {name: value for name, value in options.items() if name not in NO_EFFECT}


@dataclasses.dataclass(frozen=True)
class EngineConfig(Options):
  """The engine's limits, with vLLM's names."""
  dtype: Annotated[str, "auto", "float32", "float16", "bfloat16", "float", "half"] = "auto"   # auto: 32 bits on a CPU
  # int8, int4: what the layers' matrices are made while they are loaded; others: what the files have
  quantization: Annotated[str | None, "int8", "int4", "awq", "gptq", "compressed-tensors"] = None   # int8, int4: made
  max_model_len: Annotated[int | None, 2, 2**24] = None   # of prompt and output together; None: the model's limit
  max_num_seqs: Annotated[int, 1, 1024] = 64              # sequences that run at once
  max_num_batched_tokens: Annotated[int | None, 1, 16384] = None   # of one step, prompts' chunks; None: 512, CPU 128
  block_size: Annotated[int, 1, 256] = 16                 # tokens in one block of the KV cache
  gpu_memory_utilization: Annotated[float | int, 0.01, 1.0] = 0.9   # share of free memory for the KV cache
  kv_cache_dtype: Annotated[str, "auto", "fp8", "int8"] = "auto"   # auto: as what is computed; int8: scaled by token
  num_gpu_blocks_override: Annotated[int | None, 2, 2**24] = None   # blocks, scratch block 0 included
  tensor_parallel_size: Annotated[int, 1, 8] = 1   # devices of this machine that share every layer
  enable_prefix_caching: bool = True                      # find what has been computed before, prompts and answers
  enforce_eager: bool = False                             # never capture a step as a graph: slow, for debugging
  cudagraph_capture_sizes: Annotated[list | None, int] = None   # tokens of the steps captured at start; None: when met
  generation_config: Annotated[str, "auto", "vllm"] = "auto"   # auto: the model's own defaults of sampling; vllm: none
  speculative_config: dict | None = None                  # drafts: {"method": "ngram", "num_speculative_tokens": 5}
  seed: Annotated[int | None, -2**63, 2**63 - 1] = 0      # of the requests that bring none; None: another each time
  scheduling_policy: Annotated[str, "fcfs", "priority"] = "fcfs"   # priority: lower numbers first

  def __post_init__(self) -> None:
    super().__post_init__()
    sizes = self.cudagraph_capture_sizes or []
    check(all(x > 0 and x.bit_count() == 1 for x in sizes), f"cudagraph_capture_sizes={sizes} must be powers of two")
    check(not self.enforce_eager or self.tensor_parallel_size == 1, f"tensor_parallel_size={self.tensor_parallel_size} "
          "needs enforce_eager=False: devices wait for each other within a graph only")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A LLaMA-like model's shape, under Hugging Face's names. What has no default must be in config.json."""
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  rms_norm_eps: float
  num_key_value_heads: int
  head_dim: int
  rope_scaling: dict[str, Any]       # with its rope_type
  eos_token_ids: tuple[int, ...]
  max_position_embeddings: int = 2048
  rope_theta: float = 10000.0
  tie_word_embeddings: bool = False
  qkv_bias: bool = False
  attention_bias: bool = False       # of o; and of q, k and v, which may have one without it
  mlp_bias: bool = False
  qk_norm: bool = False              # norms of each head of q and k

  @classmethod
  def from_hf(cls, hf: dict[str, Any], source: pathlib.Path) -> "ModelConfig":
    """From config.json's content; its eos_token_id may be a list. Raises ValueError for what this engine lacks."""
    hf = {**vars(cls), "architectures": [], "hidden_act": "silu", "eos_token_id": [],   # vars: the fields' defaults
          **{name: value for name, value in hf.items() if value is not None}}
    missing = ", ".join(name for name in cls.__match_args__[:6] if name not in hf)
    check(not missing, f"model={str(source)!r} has no config.json with {missing}: choose a model's folder")
    architecture = next(iter(hf["architectures"]), None)
    rope = hf.get("rope_parameters") or hf.get("rope_scaling", {})   # transformers 5 keeps rope_theta in the first
    rope = {"rope_type": rope.get("type", "default"), **rope}
    eos = hf["eos_token_id"]
    values = {"head_dim": hf["hidden_size"] // hf["num_attention_heads"],
              "num_key_value_heads": hf["num_attention_heads"], **hf, **rope, "rope_scaling": rope,
              "architecture": architecture, "qk_norm": architecture == "Qwen3ForCausalLM",
              "qkv_bias": hf["attention_bias"] or architecture == "Qwen2ForCausalLM",
              "eos_token_ids": tuple(eos if isinstance(eos, list) else [eos])}
    for name, known in KNOWN.items():
      check(values[name] in known, f"{source}: {name} {values[name]!r} is not supported; supported: {', '.join(known)}")
    if hf.get("sliding_window") and hf.get("use_sliding_window", True):   # within it, the model is plain
      values["max_position_embeddings"] = min(hf["max_position_embeddings"], hf["sliding_window"])
    return cls(**{name: values[name] for name in cls.__match_args__})

  @classmethod
  def load(cls, folder: pathlib.Path) -> "ModelConfig":
    """From a folder's config.json, with the end tokens that generation_config.json knows."""
    said = f"model={str(folder)!r}"
    check(folder.suffix != ".gguf", f"{said}: tinyvllm convert {folder} FOLDER makes a folder of it")
    check(folder.is_dir(), f"{said} is no folder: hf download {folder} --local-dir FOLDER fetches one")
    return cls.from_hf(read_json(folder / "config.json") | read_json(folder / "generation_config.json"), folder)
