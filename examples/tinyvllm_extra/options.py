"""Options of `tinyvllm.LLM` that only the extension understands, under vLLM's names; logging; imports of packages that
only an extra of tinyvllm installs, when a feature first needs them."""
import dataclasses, functools, importlib, inspect, logging, types, warnings
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from tinyvllm.config import EngineConfig, InputError, JsonObject, Options, logger, option
from tinyvllm.request import SAMPLING_FIELDS

FORMATS = ("int8", "int4", "awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes", "gguf", "mxfp4")
SAMPLING_DEFAULTS = (*SAMPLING_FIELDS, "repetition_penalty")   # fields that generation_config.json sets
P = ParamSpec("P")


def document(options: Callable[..., Options]) -> None:
  """Add the type, default and help text of each field to the docstring of a class of options."""
  parameters = inspect.signature(options).parameters.values()
  lines = [f"{x.replace(annotation=getattr(x.annotation, 'type', x.annotation))}\n"   # an InitVar: its type
           f"    {vars(options)['__dataclass_fields__'][x.name].metadata.get('help', '')}".rstrip() for x in parameters]
  options.__doc__ = "\n".join([inspect.cleandoc(options.__doc__ or ""), "", *lines])


def takes(options: Callable[P, Options]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
  """Give an __init__ the parameters and the documentation of a class of options, for type checkers and help()."""
  document(options)
  vars(options)["__init__"].__doc__ = options.__doc__
  return functools.wraps(vars(options)["__init__"], assigned=("__doc__",), updated=())


@dataclasses.dataclass(frozen=True, kw_only=True)
class LLMConfig(EngineConfig):
  """The options of LLM: the core's and the extension's."""
  quantization: str | None = option(None, "int8, int4: quantize; others: verify (default: none)", choices=FORMATS)
  activation_quantization: str = option("auto", "int8: multiply in int8 (CPU); fp8: in e4m3 (Hopper); none: float; "
                                        "auto: int8 for int weights", choices=("auto", "int8", "fp8", "none"))
  merge_lora: str | None = option(None, "Folder of a LoRA adapter that is added to the weights (default: none)")
  enable_lora: bool = option(False, "Allow a LoRA adapter for each request")
  max_loras: int = option(1, "Maximum adapters in a step", min=1, max=64)
  max_lora_rank: int = option(16, "Maximum rank of adapters", min=1, max=64)
  kv_cache_dtype: str = option("auto", "KV cache dtype; auto: as dtype", choices=("auto", "fp8", "int8"))
  tensor_parallel_size: int = option(1, "Number of devices per layer", min=1, max=8)
  pipeline_parallel_size: int = option(1, "Number of devices for different layers", min=1, max=8)
  cudagraph_capture_sizes: list[int] | None = option(None, "Step sizes in tokens to capture at startup (default: none)")
  speculative_config: JsonObject | None = option(None, 'Draft method, as in {"method": "ngram"} (default: none)')
  generation_config: str = option("auto", "Sampling defaults; auto: the model's, vllm: none", choices=("auto", "vllm"))
  max_pause: float = option(0.1, "Maximum seconds of a step of over 128 tokens while others decode", min=0, max=3600)
  scheduling_policy: str = option("fcfs", "Request order; priority: lowest number first", choices=("fcfs", "priority"))
  runner: str = option("auto", "pooling: embeddings; generate: text; auto: by modules.json",
                       choices=("auto", "generate", "pooling"))
  chat_template: str | None = option(None, "Jinja file or text (default: the model's)")
  default_chat_template_kwargs: JsonObject | None = option(None, "Variables of the chat template (default: none)")
  override_generation_config: JsonObject | None = option(
    None, 'Sampling defaults, as in {"temperature": 0.5} (default: none)')
  revision: str | None = option(None, "Branch, tag or commit on the hub (default: main)")
  download_dir: str | None = option(None, "Folder for downloads (default: the hub's cache)")
  trace: str | None = option(None, "File for a line of JSON per step (default: none)")
  max_logprobs: int = option(20, "Maximum log probabilities per token; -1: no limit", min=-1, max=2**31 - 1)


@dataclasses.dataclass(frozen=True)
class LoRARequest(Options):
  """The adapter of a request. lora_path: a folder that PEFT wrote. lora_int_id: each adapter has another one."""
  lora_name: str
  lora_int_id: int = dataclasses.field(metadata={"min": 1, "max": 2**31 - 1})
  lora_path: str


def add_fields(prompt: str | JsonObject, **fields: object) -> str | JsonObject:
  """Return a prompt for make_request with further fields, each unless it is None."""
  fields = {name: x for name, x in fields.items() if x is not None}
  return {**(prompt if isinstance(prompt, dict) else {"prompt": prompt}), **fields} if fields else prompt


def check_one_device(devices: Any, why: str) -> None:
  """Raise InputError if several devices share a model. why: the end of the message."""
  if (count := len(devices.names)) > 1: raise InputError(f"{devices.option}={count} must be 1{why}")


def setup_logging(is_server: bool = False) -> None:
  """Log to stderr from level INFO on, unless the program has configured logging. is_server: each line has time and
  level, also lines of other packages from level WARNING on."""
  if logger.hasHandlers(): return
  logging.captureWarnings(is_server)
  if is_server: warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {message}"
  if is_server: logging.basicConfig(format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
  else: logger.addHandler(logging.StreamHandler())
  logger.setLevel(logger.level or logging.INFO)


class MissingPackage(ImportError):
  """A package of an extra is not installed. Reported as HTTP 501, or as one line and exit code 1."""


def optional(module: str, extra: str, feature: str) -> types.ModuleType:
  """Import and return a module for `feature`. Raises MissingPackage naming the extra to install."""
  try: return importlib.import_module(module)
  except ModuleNotFoundError as error:
    package = (error.name or module).partition(".")[0]
    raise MissingPackage(f"{feature} needs {package}: pip install 'tinyvllm[{extra}]'") from error
