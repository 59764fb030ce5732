"""The source of a module's weights: the extension's Checkpoint, or one with only the core's methods."""
from collections.abc import Sequence

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinyvllm.backend import Linear, Module
from tinyvllm.llama import Checkpoint

from .quantized import Matrix


class StoredWeights:
  """The weights that a module's `load` reads from a checkpoint. This class reads a Checkpoint with only the core's
  methods, not quantized, for one device; FastCheckpoint overrides it.

  Each list has one array, or Quantized, per device. vectors: a norm's weight or a bias, (out,). matrices: W, (out, in).
  place: copy the arrays to their devices, in `dtype`, or in their own dtype if it is None. activations: LLMConfig's
  activation_quantization; "fp8" only for matrices in e4m3 with one scale per output and a multiple of 128 inputs."""
  activations = "none"

  def __init__(self, checkpoint: Checkpoint): self.checkpoint = checkpoint

  def vectors(self, module: Module, suffix: str) -> list[np.ndarray]: return self.rows(module, suffix)

  def matrices(self, module: Linear) -> Sequence[Matrix]:
    return self.rows(module, "weight", module.weight.max_numel() // module.out_features)

  def rows(self, module: Module, suffix: str, *columns: int) -> list[np.ndarray]:
    parts = [self.checkpoint.read(f"{name}.{suffix}", n, *columns) for name, n in module.sources.items()]
    return [np.concatenate([part.to(None).cast(dtypes.float32).numpy() for part in parts])]

  def place(self, module: Module, arrays: Sequence[np.ndarray], dtype: DType | None = None) -> Tensor:
    tensor = Tensor(np.ascontiguousarray(arrays[0]))
    return tensor.cast(dtype or tensor.dtype).contiguous().realize()


def stored_weights(checkpoint: Checkpoint) -> StoredWeights:
  """Return the checkpoint itself, unless it has only the core's methods."""
  return checkpoint if isinstance(checkpoint, StoredWeights) else StoredWeights(checkpoint)
