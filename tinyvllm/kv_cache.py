"""The block tensors: how many blocks fit, and their memory, allocated once, one tensor per layer."""
import ctypes
import logging
import math
import os

from tinygrad import Device, Tensor
from tinygrad.dtype import DType

from .config import EngineConfig, ModelConfig, check

logger = logging.getLogger("tinyvllm")


def free_memory(device: str) -> int:
  """Free bytes of the device; of the host where the device shares its memory or does not tell."""
  if device == "CUDA":
    from tinygrad.runtime.autogen import cuda
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    return free.value
  pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
  return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def allocate_caches(model: ModelConfig, config: EngineConfig, max_model_len: int, dtype: DType) -> list[Tensor]:
  """For each layer a tensor (2, num_blocks, block_size, n_kv_heads, head_dim), K and V. num_blocks, of which block 0
  takes padding's writes, is the override, or what fits the share of free memory, at most what max_num_seqs sequences of
  max_model_len can use. Raises ValueError where not one such sequence fits."""
  per_block = (config.block_size, model.num_key_value_heads, model.head_dim)
  size = 2 * model.num_hidden_layers * math.prod(per_block) * dtype.itemsize
  per_sequence, free = -(-max_model_len // config.block_size), free_memory(Device.DEFAULT)
  fit = int(free * config.gpu_memory_utilization) // size
  check(fit > per_sequence or config.num_gpu_blocks_override, f"max_model_len={max_model_len} needs "
        f"{per_sequence * size / 2**30:.2f} GiB of KV cache, of {free / 2**30:.2f} GiB free: lower it to "
        f"{max(0, fit - 1) * config.block_size} or raise gpu_memory_utilization={config.gpu_memory_utilization}")
  num_blocks = config.num_gpu_blocks_override or min(fit, config.max_num_seqs * per_sequence + 1)
  tokens = (num_blocks - 1) * config.block_size
  logger.info("KV cache: %d blocks of %d tokens = %d tokens, %.2f GiB: %.1f sequences of %d", num_blocks - 1,
              config.block_size, tokens, num_blocks * size / 2**30, tokens / max_model_len, max_model_len)
  layers = range(model.num_hidden_layers)
  return [Tensor.empty(2, num_blocks, *per_block, dtype=dtype).contiguous().realize() for _ in layers]
