"""The backend that is faster than the core's: attention and matrix kernels with a fixed schedule for CPUs, GPUs and
NVIDIA tensor cores; layers traced once; lowered kernels cached on disk."""
from collections.abc import Callable
from typing import Any

from tinygrad import Device, Tensor, UOp, dtypes, function, helpers, nn
from tinygrad.dtype import DType
from tinygrad.uop.ops import Ops

from tinyvllm.backend import Sampler, cpu_cores, renderer
from tinyvllm.config import ModelConfig, check
from tinyvllm.llama import Layer
from tinyvllm_extra.graph_policy import PaddedGraphs
from tinyvllm_extra.models.layers import MixtureBackend, VariantConfig
from tinyvllm_extra.options import LLMConfig

from . import attention, cuda_source, drivers, kernel_cache, matmul, parallel


class FastSampler(Sampler):
  def reduce(self, function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Return a sum or maximum over V of (S, V), (S, 1), in two steps to keep a GPU busy with few rows. In the first
    step, a thread of a GPU has 32 numbers, whose loads overlap."""
    columns = 4 if cpu_cores() else helpers.round_up(int(x.shape[1]), 2**12) // 32
    padded = x.pad((None, (0, -x.shape[1] % columns)), value=0 if function is Tensor.sum else x.dtype.min)
    partial = function(padded.unflatten(1, (-1, columns)), 1).contiguous()   # (S, columns)
    return function(partial, 1, keepdim=True).contiguous()

  def keep_top(self, p: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Like Sampler's, with sampler.cu in CUDA, and in C on a CPU. weights: p or ones."""
    if not (cuda_source.speaks_cuda() or cuda_source.speaks_c()): return super().keep_top(p, weights, target)
    (S, V), is_c = p.max_shape, not cuda_source.speaks_cuda()
    parts, threads = (cpu_cores(), 1) if is_c else (8, 512) if cuda_source.has_wgmma() else (1, 1024)
    definitions = {"S": S, "V": V, "IS_C": int(is_c), "PARTS": parts, "THREADS": threads, "ALL": parts * threads,
                   "COUNT": -(-V // (parts * threads)), "CLUSTER": f"__cluster_dims__({parts})" if parts > 1 else "",
                   "ROW": "core_id" if is_c else "blockIdx.y", "COUNTS": int(weights is not p), "TYPE": '"f16"'}
    launch = cuda_source.Launch(f"keep_top_{S}_{V}", "sampler.cu", definitions, (parts, 1 if is_c else S, 1), threads,
                                3 * 4 * (threads // 32 + 2 * parts))
    return cuda_source.run(launch, out=p.empty_like(), x=p, goals=target.contiguous())[0]


def flatten(x: Tensor) -> Tensor:
  """Flatten x into its own buffer. A traced function can return a kernel's output without a copy."""
  if x.uop.op is not Ops.AFTER: return x.flatten().contiguous()
  return Tensor(x.uop.src[0].base.after(x.uop.src[1]))


@function(precompile=True, allow_implicit=True)
def call_layer(layer: Layer, x: Tensor, delta: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
  """Call a layer with flat inputs and outputs."""
  hidden = layer.config.hidden_size
  x, delta = layer(x.reshape(-1, hidden), delta.reshape(-1, hidden), *inputs)
  return flatten(x), flatten(delta)


def run_layers(layers: list[Layer], x: Tensor, delta: Tensor, caches: list[list[Tensor]], ropes: list[Tensor],
               tokens: Tensor, block_tables: Tensor) -> tuple:
  """Like Backend.run_layers, for layers on the same device. Tensor cores get query tiles and skip padding, see
  attention.add_query_tiles."""
  if x.shape[0] > attention.MAX_DECODE and cuda_source.speaks_cuda():
    tokens = attention.add_query_tiles(tokens, block_tables)
  reset = matmul.current.set(tokens)
  try: return trace_layers(layers, x, delta, caches, ropes, tokens, block_tables)
  finally: matmul.current.reset(reset)


def trace_layers(layers: list[Layer], x: Tensor, delta: Tensor, caches: list[list[Tensor]], *inputs: Any) -> tuple:
  """Call layers, tracing one for all equal ones, because tracing takes longer than compiling: reuse the traced call of
  the first equal layer, with this layer's tensors."""
  hidden = x.shape[1]
  x, delta = flatten(x), flatten(delta)
  calls: dict[tuple, UOp] = {}
  for layer, cache in zip(layers, caches, strict=True):
    arguments = layer, x, delta, cache, *inputs
    buffers = helpers.dedup([t.uop for t in nn.state.get_parameters(arguments)])   # in the order of the call's inputs
    key = type(layer), getattr(layer, "options", ()), *[(t.shape, t.dtype) for t in buffers]   # see VariantLayer
    if key not in calls:
      calls[key] = call_layer(*arguments)[0].uop.src[0]
      assert calls[key].src[1:len(buffers) + 1] == (*buffers,), "the inputs of a call are in another order"
    body, *sources = calls[key].src
    call = calls[key].replace(src=(body, *buffers, *sources[len(buffers):]))   # scratch buffers follow
    x, delta = [Tensor(call.gettuple(i)) for i in range(2)]
  return x.reshape(-1, hidden), delta.reshape(-1, hidden)


class FastBackend(MixtureBackend):
  """The backend for all devices except CUDA."""
  Linear = matmul.FastLinear
  GateUp = matmul.FastGateUp
  Norm = matmul.FastNorm
  Experts = matmul.FastExperts
  sampler = FastSampler()
  memory = drivers.DriverMemory()
  stored_dtype = ""   # dtype of weights and KV cache, if activations have another one
  attend = staticmethod(attention.attend)

  # Tensor cores need many rows; MeteredScheduler takes fewer while sequences decode
  budget = property(lambda self: 2048 if cuda_source.speaks_cuda() and renderer().tensor_cores else super().budget)

  def __init__(self) -> None: self.graphs = PaddedGraphs(kernel_cache.restore)

  def run_layers(self, layers: list, *inputs: Any) -> tuple: return parallel.run_layers(run_layers, layers, *inputs)

  def kv_layout(self, model: ModelConfig, config: LLMConfig, dtype: DType) -> list[tuple[tuple[int, ...], DType]]:
    """Return the shape and dtype of a block in each cache tensor of a layer: K, V and, for int8, the scales. The layout
    is for tensor cores if model and device support them, else for any device. Raises InputError if they do not support
    `config.kv_cache_dtype`."""
    dtype = getattr(dtypes, self.stored_dtype, dtype)
    cache_dtype, size, heads, D = config.kv_cache_dtype, config.block_size, model.num_key_value_heads, model.head_dim
    element = dtype if cache_dtype == "auto" else dtypes.uint8 if cpu_cores() else dtypes.uint32
    check(cache_dtype in ("auto", "int8") or dtypes.half in renderer().supported_dtypes(),
          f"kv_cache_dtype={cache_dtype!r} needs float16, which this device does not support; use 'int8'")
    n = attention.dimensions_in(element)
    check(cache_dtype == "auto" or D % (2 * n) == 0, f"kv_cache_dtype={cache_dtype!r} needs a head_dim that is a "
          f"multiple of {2 * n}, not {D}; use 'auto'")   # RoPE rotates neighbours of both halves of a head
    shapes: list[tuple[int, ...]] = [(heads, D // n, size), (heads, size, D // n)]
    fits_size = D in (32, 64, 96, 128) or D == 256 and cuda_source.has_wgmma()   # else too little shared memory
    fits_model = size == attention.BS and fits_size and model.num_attention_heads <= 16 * heads
    if fits_model and dtype == dtypes.half and cuda_source.has_mma(dtype):   # tinygrad does not combine bfloat16 loads
      shapes = [(heads, D // 32, size, 32 if cache_dtype == "auto" else 8)] * 2
    scales = [((heads, 2, size), dtypes.float32)] if cache_dtype == "int8" else []
    return [*[(shape, element) for shape in shapes], *scales]

  def pick_dtype(self, name: str, model: ModelConfig | None = None) -> str:
    """Like the core's. A model that overflows float16 gets bfloat16 or, if the device lacks it, float32. A CPU stores
    weights and KV cache in float16 or bfloat16, and computes in float32, which is faster."""
    if isinstance(model, VariantConfig) and model.overflows_float16:
      if name == "auto" and Device.DEFAULT != "CPU": name = "bfloat16"
      if name == "bfloat16" and dtypes.bfloat16 not in renderer().supported_dtypes(): name = "float32"
      if name in ("float16", "half"): return name   # the model refuses it
    picked = super().pick_dtype(name, model)
    self.stored_dtype = picked if cpu_cores() and getattr(dtypes, picked) != dtypes.float32 else ""
    return "float32" if self.stored_dtype else picked
