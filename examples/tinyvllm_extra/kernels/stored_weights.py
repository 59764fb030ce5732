"""Where modules read their weights from: formats' Checkpoint, or a Checkpoint with only the core's methods."""
from collections.abc import Sequence
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType


class StoredWeights:
  """What the `load` of a module needs of a checkpoint: arrays as they are stored, a shard for each device."""
  def vectors(self, module: Any, suffix: str) -> list[Any]: raise NotImplementedError
  def matrices(self, module: Any) -> list[Any]: raise NotImplementedError
  def place(self, module: Any, arrays: Sequence[np.ndarray], dtype: DType | None = None) -> Tensor:
    raise NotImplementedError


class PlainWeights(StoredWeights):
  """The weights of a Checkpoint with exactly the core's methods, for one device."""
  def __init__(self, checkpoint: Any): self.checkpoint = checkpoint

  def read(self, module: Any, suffix: str, *columns: int) -> list[np.ndarray]:
    parts = [self.checkpoint.read(f"{name}.{suffix}", n, *columns) for name, n in module.sources.items()]
    return [np.concatenate([part.cast(dtypes.float32).numpy() for part in parts])]

  def vectors(self, module: Any, suffix: str) -> list[Any]: return self.read(module, suffix)
  def matrices(self, module: Any) -> list[Any]:
    return self.read(module, "weight", module.weight.numel() // module.out_features)

  def place(self, module: Any, arrays: Sequence[np.ndarray], dtype: DType | None = None) -> Tensor:
    array, = arrays
    return Tensor(np.ascontiguousarray(array)).cast(dtype or module.weight.dtype).contiguous().realize()


def stored_weights(checkpoint: Any) -> StoredWeights:
  return checkpoint if isinstance(checkpoint, StoredWeights) else PlainWeights(checkpoint)
