"""The block tensors: how many blocks fit, and their memory. Allocated once, one tensor per layer."""
import ctypes
import os

from tinygrad import Device, Tensor
from tinygrad.dtype import DType

from .config import EngineConfig, ModelConfig


def free_memory(device: str) -> int:
  """Free bytes of the device; of the host where the device shares or does not tell."""
  if device == "CUDA":
    from tinygrad.runtime.autogen import cuda
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    return free.value
  pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
  return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def bytes_per_block(model: ModelConfig, block_size: int, dtype: DType) -> int:
  return 2 * model.num_hidden_layers * block_size * model.num_key_value_heads * model.head_dim * dtype.itemsize


def num_blocks_that_fit(model: ModelConfig, config: EngineConfig, max_model_len: int, dtype: DType) -> int:
  """Blocks for the KV cache, block 0 included: the override, or the share of free memory that may be used, at most what max_num_seqs sequences of
  max_model_len tokens need. Raises ValueError where not even one such sequence fits."""
  per_sequence = -(-max_model_len // config.block_size)
  if config.num_gpu_blocks_override: return config.num_gpu_blocks_override
  size, free = bytes_per_block(model, config.block_size, dtype), free_memory(Device.DEFAULT)
  fit = int(free * config.gpu_memory_utilization) // size
  if fit < per_sequence + 1:
    raise ValueError(f"max_model_len={max_model_len} needs {per_sequence * size / 2**30:.2f} GiB of KV cache; {free / 2**30:.2f} GiB are free: "
                     f"lower max_model_len to {max(0, fit - 1) * config.block_size} or raise gpu_memory_utilization={config.gpu_memory_utilization}")
  return min(fit, config.max_num_seqs * per_sequence + 1)


def allocate_caches(model: ModelConfig, num_blocks: int, block_size: int, dtype: DType) -> list[Tensor]:
  """A tensor (2, num_blocks, block_size, n_kv_heads, head_dim) for each layer: K and V."""
  shape = (2, num_blocks, block_size, model.num_key_value_heads, model.head_dim)
  return [Tensor.empty(*shape, dtype=dtype).contiguous().realize() for _ in range(model.num_hidden_layers)]
