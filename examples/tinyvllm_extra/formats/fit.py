"""Estimates the memory that a model uses on a device: from its config.json, or from the tensors in its files."""
import collections, math, pathlib, re, typing

from tinygrad import Context, Device, dtypes, nn

from tinyvllm.backend import Devices, Module
from tinyvllm.config import JsonObject, ModelConfig, check, logger
from tinyvllm.llama import Llama
from tinyvllm_extra import kernels, models, programs
from tinyvllm_extra.kernels import drivers
from tinyvllm_extra.models.recurrent import state_shapes
from tinyvllm_extra.options import LLMConfig

if typing.TYPE_CHECKING: from .weights import FastCheckpoint

GIB = 2**30
DTYPES = ["float32", "float16", "bfloat16"]
# Bits per weight of the layers' matrices, including scale and offset of each group of 32 weights
QUANTIZED = {"int8": 8 + 16 / 32, "int4": 4 + 32 / 32}


def open_device() -> JsonObject:
  """Open the default device. Return its dtype of activations, its support of DTYPES, its free memory, and why it is the
  default ("" if tinygrad chose it)."""
  why = programs.prepare_device()
  backend = kernels.make_backend()
  supported = Device.default.renderer.supported_dtypes()
  return {"dtype": backend.pick_dtype("auto"), **{name: getattr(dtypes, name) in supported for name in DTYPES},
          "free_gib": backend.memory.free((Device.DEFAULT,)) / GIB, "why": why}


def prequantized(hf: JsonObject) -> str | None:
  """Return "int8" (also for e4m3) or "int4" if a model is pre-quantized, else None. hf: the content of config.json."""
  quantization = hf.get("quantization_config") or {}
  weights = [group.get("weights") or {} for group in quantization.get("config_groups", {}).values()]
  bits = {x.get("num_bits") for x in weights} | {quantization.get("bits"), quantization.get("w_bit")}
  bits.add({"fp8": 8, "mxfp4": 4}.get(quantization.get("quant_method", "")))   # mxfp4: of most matrices
  return next((name for name in QUANTIZED if int(name[3:]) in bits), None)


def estimate_fit(name: str, hf: JsonObject, row: JsonObject, config: LLMConfig = LLMConfig()) -> JsonObject:
  """Return a model's memory use on a backend, in all alone and on each device beside others, and the number of KV cache
  tokens that fit. hf: the content of config.json. row: the facts of a device of the backend. Raises InputError for an
  unsupported model."""
  shape, model_class = models.choose_model(hf, pathlib.Path(name))
  quantization = prequantized(hf) or config.quantization
  sizes = {dtype: getattr(dtypes, dtype).itemsize for dtype in DTYPES if row[dtype]}
  # Weights keep the checkpoint's dtype if it is narrower
  stored = min(row["dtype"], hf.get("dtype") or hf.get("torch_dtype"), key=lambda dtype: sizes.get(dtype, 4))
  with Context(DEV="NULL"):   # NULL supports every dtype; empty tensors use no memory
    options = LLMConfig(kv_cache_dtype=config.kv_cache_dtype, block_size=1)
    cache = kernels.FastBackend().kv_layout(shape, options, getattr(dtypes, row["dtype"]))
  weights = weight_bytes(plain_weights(shape, model_class), quantization, sizes[stored])
  # A step reads few rows of the embeddings, but the whole output head
  read = weights - (0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size * sizes[stored])
  per_token = state_shapes(shape).count(()) * sum(math.prod(part) * dtype.itemsize for part, dtype in cache)   # bytes
  states = 4 * sum(math.prod(x) for x in state_shapes(shape) if x) * (config.max_num_seqs + 1)
  # Devices with memory of their own, and an equal share of the model
  size = 1 if "CPU" in row.get("renderer", "") else config.tensor_parallel_size * config.pipeline_parallel_size
  left = int(row["free_gib"] * GIB * config.gpu_memory_utilization) * size - weights - states
  sequence = (config.max_model_len or shape.max_position_embeddings) * per_token
  most = max(drivers.CPU_CACHE, sequence)   # bytes for a KV cache, on a CPU or beside other models
  return {"model": name, "dtype": row["dtype"], "stored": quantization or stored, "weights_gib": weights / GIB,
          "shared_gib": (drivers.RESERVE + (weights + states + min(most, config.max_num_seqs * sequence)) / size) / GIB,
          "fits": left >= per_token,
          "kv_tokens": max(0, min(left, most) if row.get("backend") == "CPU" else left) // per_token,
          "tokens_per_s_at_most": row.get("gb_per_s", 0) * 1e9 / read}


def is_in_layer(name: str) -> bool: return bool(re.search(r"\b(layers|h)\.\d", name))   # h: GPT-2's layers


# The facts that determine the memory of a weight. One that is not float keeps its size
Weight = typing.NamedTuple("Weight", [("name", str), ("shape", tuple), ("nbytes", int), ("is_float", bool)])


def model_weights(model: Llama) -> list[Weight]:
  """Return the weights of a model on its devices, each under the name of its first source."""
  return [Weight(f"{next(iter(module.sources))}.{name}", x.shape, x.nbytes(), True)
          for module in model.modules() for name, x in nn.state.get_state_dict(module).items()]


def plain_weights(config: ModelConfig, model_class: type[Llama]) -> list[Weight]:
  """Return the weights of a model that is not quantized, in float32."""
  with Context(DEV="NULL"): return model_weights(model_class(config, dtypes.float32, kernels.FastBackend(), Devices()))


def weight_bytes(weights: list[Weight], quantization: str | None = None, itemsize: int = 4) -> int:
  """Return the bytes of weights on a device: floats take at most `itemsize` each, and matrices of layers fewer with the
  quantization "int8" or "int4". Another value changes nothing."""
  def size(x: Weight) -> float:
    bits = QUANTIZED.get(quantization or "") if is_in_layer(x.name) and len(x.shape) > 1 else None
    return min(x.nbytes, math.prod(x.shape) * (bits or 8 * itemsize) / 8) if x.is_float else x.nbytes
  return int(sum(map(size, weights)))


def checkpoint_bytes(source: "FastCheckpoint", quantization: str | None, modules: list[Module] | None = None) -> int:
  """Return the bytes that a checkpoint's model, or some of its modules, take on each of its devices, at least: padding
  and tensors that are dequantized while loading take more."""
  sources = {name for module in modules or source.model.modules() for name in module.sources}
  weights = [Weight(name, x.shape, x.nbytes, x.dtype.kind in "fu")   # u: bfloat16
             for name, x in source.tensors.items() if name.rpartition(".")[0] in sources]
  total = weight_bytes(weights, None if source.method else quantization, source.model.dtype.itemsize)
  return total // len(source.model.devices.names)


def loading_bytes(source: "FastCheckpoint", quantization: str | None) -> int:
  """Return the memory that loading takes on a CPU. Outside of layers, the largest matrix loads early and is in memory
  three times: mapped, reordered, and as the weight. In layers, quantization takes up to five times a matrix."""
  sizes = collections.Counter[str]()   # a matrix of all experts is one
  for name, x in source.tensors.items(): sizes[re.sub(r"experts\.\d+", "experts", name)] += x.nbytes
  layers, others = ([n for name, n in sizes.items() if is_in_layer(name) is in_layers] for in_layers in (True, False))
  return max(checkpoint_bytes(source, quantization) + 5 * max(layers, default=0), 4 * max(others, default=0))


def remedy(source: "FastCheckpoint", free: int) -> str:
  """Return what to do about a model that does not fit: the widest quantization that does, or the memory needed."""
  def needed(quantization: str | None) -> float:
    room = checkpoint_bytes(source, quantization) / LLMConfig().gpu_memory_utilization   # for a KV cache
    return max(room, loading_bytes(source, quantization))
  sizes = {} if source.method else {name: needed(name) for name in QUANTIZED}
  for name, num_bytes in sizes.items():
    weights = checkpoint_bytes(source, name) / GIB
    if num_bytes <= free: return f"use quantization={name!r} (--quantization {name}), which takes {weights:.2f} GiB"
  reason = "no quantization fits" if sizes else "it cannot be quantized further"
  least = min(sizes.values(), default=needed(None)) / GIB
  return f"{reason}: choose a smaller model, or provide {least:.2f} GiB of free memory"


def check_memory(source: "FastCheckpoint", quantization: str | None) -> None:
  """Raise InputError if the weights alone exceed the free memory of a device, with the quantization that fits. Log a
  warning if loading may exceed it. Backends and devices whose memory is a guess are not checked."""
  names, memory = source.model.devices.names, source.model.backend.memory
  if not isinstance(memory, drivers.DriverMemory) or not all(drivers.device_memory(x).is_known for x in names): return
  size = checkpoint_bytes(source, quantization)
  if size > memory.free(names): drivers.free_unused_buffers(names)
  free = memory.free(names)
  text = f"{names[0]} has {free / GIB:.2f} GiB of free memory"
  check(size <= free, f"model: {source.path} needs {size / GIB:.2f} GiB for its weights, but {text}: "
        f"{remedy(source, free)}")
  peak = loading_bytes(source, quantization)
  if peak > free: logger.warning(f"loading may take {peak / GIB:.2f} GiB, and {text}")
