"""The backend that is faster than the core's: attention and matrix kernels with a fixed schedule for CPUs, GPUs and
NVIDIA tensor cores; layers traced once; lowered kernels cached on disk."""
import functools
from collections.abc import Callable
from typing import Any

from tinygrad import Device, Tensor, UOp, dtypes, helpers
from tinygrad.dtype import DType

from tinyvllm.backend import Sampler, cpu_cores, renderer
from tinyvllm.config import ModelConfig
from tinyvllm_extra.models.experts import MixtureBackend
from tinyvllm_extra.models.layers import VariantConfig
from tinyvllm_extra.options import LLMConfig

from . import cuda_source, drivers, kernel_cache, layer_calls, matmul, products, tensor_cores


class FastSampler(Sampler):
  def reduce(self, function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Return a sum or maximum over V of (S, V), (S, 1), in two steps to keep a GPU busy with few rows. In the first
    step, a thread of a GPU has 32 numbers, whose loads overlap."""
    padding = 0 if function is Tensor.sum else x.dtype.min
    columns = 4 if cpu_cores() else helpers.round_up(int(x.shape[1]), 2**12) // 32
    padded = x.pad((None, (0, -x.shape[1] % columns)), value=padding)
    partial = function(padded.unflatten(1, (-1, columns)), 1).contiguous()   # (S, columns)
    return function(partial, 1, keepdim=True).contiguous()

  def keep_top(self, p: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Like Sampler's, with sampler.cu in CUDA, and in C on a CPU. weights: p or ones."""
    if not (cuda_source.speaks_cuda() or cuda_source.speaks_c()): return super().keep_top(p, weights, target)
    launch = functools.partial(launch_sampler, counts=weights is not p)
    return cuda_source.run(launch, out=p.empty_like(), x=p, goals=target.contiguous())[0]


def launch_sampler(operands: dict[str, UOp], counts: bool) -> cuda_source.Launch:
  """Return the launch of sampler.cu."""
  (S, V), is_c = operands["x"].max_shape, not cuda_source.speaks_cuda()
  parts, threads = (cpu_cores(), 1) if is_c else (8, 512) if cuda_source.has_wgmma() else (1, 1024)
  definitions = {"S": S, "V": V, "IS_C": int(is_c), "PARTS": parts, "THREADS": threads, "ALL": parts * threads,
                 "COUNT": -(-V // (parts * threads)), "CLUSTER": f"__cluster_dims__({parts})" if parts > 1 else "",
                 "FIRST": "core_id" if is_c else "blockIdx.y", "STEP": parts if is_c else S, "COUNTS": int(counts),
                 "TYPE": '"f16"'}
  return cuda_source.Launch(f"keep_top_{S}_{V}", "sampler.cu", definitions, (parts, 1 if is_c else S, 1), threads,
                            3 * 4 * (threads // 32 + 2 * parts))


class FastBackend(MixtureBackend):
  """The backend for all devices except CUDA."""
  Linear = matmul.FastLinear
  GateUp = matmul.FastGateUp
  Norm = matmul.FastNorm
  Experts = matmul.FastExperts
  sampler = FastSampler()
  memory = drivers.DriverMemory()
  stored_dtype = ""   # dtype of weights and KV cache, if activations have another one
  attend = staticmethod(tensor_cores.attend)

  # Tensor cores need many rows; MeteredScheduler takes fewer while sequences decode
  budget = property(lambda self: 2048 if cuda_source.speaks_cuda() and renderer().tensor_cores else super().budget)

  def __init__(self) -> None: self.graphs = kernel_cache.FewGraphs()

  def run_layers(self, layers: list, x: Tensor, delta: Tensor, caches: list[list[Tensor]], *inputs: Any) -> tuple:
    ropes, tokens, block_tables = inputs
    if x.shape[0] > tensor_cores.MAX_DECODE and cuda_source.speaks_cuda():
      tokens = tensor_cores.add_query_tiles(tokens, block_tables)
    reset = products.current.set(tokens)
    try: return layer_calls.run_layers(layers, x, delta, caches, ropes, tokens, block_tables)
    finally: products.current.reset(reset)

  def kv_layout(self, model: ModelConfig, config: LLMConfig, dtype: DType) -> list[tuple[tuple[int, ...], DType]]:
    return tensor_cores.kv_layout(model, config, getattr(dtypes, self.stored_dtype, dtype))

  def pick_dtype(self, name: str, model: ModelConfig | None = None) -> str:
    """Like the core's. A model that overflows float16 gets bfloat16 or, if the device lacks it, float32. A CPU stores
    weights and KV cache in float16 or bfloat16, and computes in float32, which is faster."""
    if isinstance(model, VariantConfig) and model.overflows_float16:
      has_bfloat16 = dtypes.bfloat16 in renderer().supported_dtypes()
      if name == "auto" and Device.DEFAULT != "CPU": name = "bfloat16"
      if name == "bfloat16" and not has_bfloat16: name = "float32"
      if name in ("float16", "half"): return name   # the model refuses it
    picked = super().pick_dtype(name, model)
    self.stored_dtype = picked if cpu_cores() and getattr(dtypes, picked) != dtypes.float32 else ""
    return "float32" if self.stored_dtype else picked
