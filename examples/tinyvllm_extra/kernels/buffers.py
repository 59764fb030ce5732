"""A tensor's buffers on its devices, and copies of KV cache blocks between tensors."""
import math
from typing import Any

import numpy as np
from tinygrad import Tensor, UOp

from .schedule import kernel_of


def buffers_of(tensor: Tensor) -> list[Any]:
  """Return the tensor's buffer on each device."""
  buffer: Any = tensor.uop.buffer
  return [x.ensure_allocated() for x in getattr(buffer, "bufs", [buffer])]


def copy_kernel(out: UOp, targets: UOp, source: UOp, blocks: UOp) -> UOp:
  """out[targets[i]] = source[blocks[i]], in place."""
  size = math.prod(out.shape[1:])
  i = UOp.range(targets.shape[0], 0)
  j = UOp.range(size, 1)
  value = source.base.index(blocks[i].load() * size + j)
  return kernel_of("copy_blocks", out.base.index(targets[i].load() * size + j).store(value))


def copy_blocks(out: list[Tensor], targets: dict[Any, Tensor], source: list[Tensor], blocks: dict[Any, Tensor]) -> None:
  """Copy blocks on the device. targets, blocks: block numbers by device."""
  copies = [x.custom_kernel(targets[x.device], y, blocks[x.device], fxn=copy_kernel)[0]
            for x, y in zip(out, source, strict=True)]
  Tensor.realize(*copies)


def write(buffer: Any, array: np.ndarray) -> None: buffer.allocator._copyin(buffer._buf, array.data.cast("B"))


def copy_to_devices(tensor: Tensor, array: np.ndarray) -> None:
  """Copy the whole array to each device."""
  for buffer in buffers_of(tensor): write(buffer, array)
