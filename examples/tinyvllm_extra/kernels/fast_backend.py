"""The backend that is faster than the core's: attention and matrix kernels with a fixed schedule for CPUs, GPUs and
NVIDIA tensor cores; layers traced once; lowered kernels cached on disk."""
from typing import Any

from tinygrad import Device, Tensor, dtypes

from tinyvllm.backend import renderer
from tinyvllm.config import ModelConfig
from tinyvllm_extra.models.experts import MixtureBackend
from tinyvllm_extra.models.layers import VariantConfig

from . import cuda_source, drivers, expert_kernels, fast_sampler, graphs, layer_calls, many_rows, matmul, tensor_cores


class FastBackend(MixtureBackend):
  """The backend for all devices except CUDA."""
  Linear = matmul.FastLinear
  GateUp = matmul.FastGateUp
  Norm = matmul.FastNorm
  Experts = expert_kernels.FastExperts
  sampler = fast_sampler.FastSampler()
  memory = drivers.DriverMemory()
  kv_layout = staticmethod(tensor_cores.kv_layout)
  attend = staticmethod(tensor_cores.attend)

  # Tensor cores need many rows; PacedScheduler takes fewer while sequences decode
  budget = property(lambda self: 2048 if cuda_source.speaks_cuda() and renderer().tensor_cores else super().budget)

  def __init__(self) -> None: self.graphs = graphs.FewGraphs()

  def run_layers(self, layers: list, x: Tensor, delta: Tensor, caches: list[list[Tensor]], *inputs: Any) -> tuple:
    ropes, tokens, block_tables = inputs
    if x.shape[0] > tensor_cores.MAX_DECODE and cuda_source.speaks_cuda():
      tokens = tensor_cores.add_query_tiles(tokens, block_tables)
    reset = many_rows.current.set(tokens)
    try: return layer_calls.run_layers(layers, x, delta, caches, ropes, tokens, block_tables)
    finally: many_rows.current.reset(reset)

  def pick_dtype(self, name: str, model: ModelConfig | None = None) -> str:
    """Like the core's. A model that overflows float16 gets bfloat16 or, if the device lacks it, float32."""
    if isinstance(model, VariantConfig) and model.overflows_float16:
      has_bfloat16 = dtypes.bfloat16 in renderer().supported_dtypes()
      if name == "auto" and Device.DEFAULT != "CPU": name = "bfloat16"
      if name == "bfloat16" and not has_bfloat16: name = "float32"
    return super().pick_dtype(name, model)
