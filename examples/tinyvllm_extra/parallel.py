"""Several devices of this machine that share every layer (Shoeybi et al. 2019, arXiv:1909.08053): each has its part of
the heads, of the MLP and of the vocabulary, and reads from the others what is to be summed."""
import dataclasses, functools, itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad import Context, Device, Tensor, UOp, helpers
from tinygrad.dtype import DType
from tinygrad.engine.jit import _TinyJit
from tinygrad.uop.ops import AxisType

from tinyvllm import device, llama
from tinyvllm.config import EngineConfig, ModelConfig, check, kind_of
from tinyvllm.device import axes, kernel_of


def device_names(count: int) -> tuple[str, ...]:
  """The default device, and others of its kind."""
  return tuple(Device.canonicalize(f"{Device.DEFAULT}:{i}") for i in range(count))


def open_peers(count: int) -> tuple[int, Callable]:
  """Open devices that read each other's memory, the first of which is open. Returns the free bytes of each, and what
  makes a Llama on them. Raises ValueError where they cannot, or are not so many."""
  check_peers(count)
  names = device_names(count)
  free = min(map(device.free_memory, reversed(names)))   # the first one's context is to stay the current one
  # A CPU's is memory that all have in common
  return free // count if Device.DEFAULT == "CPU" else free, functools.partial(Llama, names)


def check_peers(count: int) -> None:
  said = f"tensor_parallel_size={count}"
  check(Device.DEFAULT in ("CUDA", "CPU"), f"{said}: {Device.DEFAULT} takes 1; CUDA and CPU take more")
  if Device.DEFAULT != "CUDA": return
  there = Device.default.count()
  check(count <= there, f"{said}: there are {there} {Device.DEFAULT} devices here: at most that would do")
  from tinyvllm_extra.kernels.cuda import can_access_peer
  devices: list[Any] = [Device[name] for name in device_names(count)]
  for reader, owner in itertools.permutations(devices, 2):
    check(can_access_peer(reader, owner),
          f"{said}: {reader.device} cannot read {owner.device}'s memory (nvidia-smi topo -p2p r); 1 will do")


def share(config: ModelConfig, n: int) -> ModelConfig:
  """What each of n devices has: its part of the heads, of the MLP and of the vocabulary."""
  _, (least, most) = kind_of(EngineConfig.__dataclass_fields__["tensor_parallel_size"])
  names = "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"
  sizes = {name: getattr(config, name) for name in names}
  fit = [str(x) for x in range(least, most + 1) if not any(size % x for size in sizes.values())]
  check(str(n) in fit, f"tensor_parallel_size={n} must divide each of {sizes}: {' or '.join(fit)} would do")
  return dataclasses.replace(config, **{name: size // n for name, size in sizes.items()})


def parts_of(x: Tensor) -> list[Tensor]:
  """What each device has of x, where it is, for all of them to read."""
  count = len(helpers.to_tuple(x.device))
  return [Tensor(UOp.mstack(*[x.uop.mselect(i)] * count)) for i in range(count)]


def own_rows(ids: Tensor, rows: int) -> Tensor:
  """Where each device has what ids, (T,), stand for: its rows follow those of the device before. What it has not is
  beyond them."""
  first = Tensor(UOp.range(len(helpers.to_tuple(ids.device)), -1, AxisType.DEVICE)).cast(ids.dtype) * rows
  own = ids - first
  return (own < 0).where(rows, own).contiguous()


class Graph(_TinyJit):
  """A step of several devices. step: a partial of Runner._compute."""
  def __init__(self, devices: tuple[str, ...], step: functools.partial):
    super().__init__(step)
    self.devices = devices
    # Where results take the place of others, devices that read them wait for each other. Few tokens need little memory
    self.apart = int(step.args[-1].tokens <= 64)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    captures = self.cnt == 1
    with Context(NO_MEMORY_PLANNER=self.apart): results = super().__call__(*args, **kwargs)
    # A capture may have left any device the current one, in whose stream it then runs: the engine waits for the first
    if captures:
      for name in reversed(self.devices[1:]): Device[name].synchronize()
    return results


class Llama(llama.Llama):
  """config: of the whole model."""
  def __init__(self, devices: tuple[str, ...], config: ModelConfig, dtype: DType):
    super().__init__(share(config, len(devices)), dtype)
    self.devices = devices
    self.jit = functools.partial(Graph, devices)
    for part in self.parts():
      if isinstance(part, llama.Norm): part.add = functools.partial(add, part)   # type: ignore[method-assign]

  def __call__(self, ids: Tensor, samples: Tensor, tokens: Tensor, table: Tensor, rope: Tensor,
               caches: list[list[Tensor]]) -> Tensor:
    ids, samples, tokens, table = [t.to(self.devices) for t in (ids, samples, tokens, table)]
    ids = own_rows(ids, self.embed_tokens.out_features)
    logits = super().__call__(ids, samples, tokens, table, rope, caches)   # of each device's part of the vocabulary
    return Tensor(logits.uop.unshard(1)).to(None)

  def fill(self, part: Any, kind: str, shapes: dict[str, tuple[int, ...]], quantized: Callable | None,
           maps: dict[str, Any], take: Callable, place: Callable) -> None:
    """A part's tensor on each device with that one's part. shapes: of the files' tensors, if there was one device.
    quantized: what fills matrices, if they are. The rest is load_weights'."""
    count = len(self.devices)

    def shares(w, axis):   # a device's each
      if axis is None: return [w] * count
      if axis == w.ndim: return [w] + [np.zeros_like(w)] * (count - 1)   # a bias, added once
      return np.split(w, count, axis)

    def place_all(part, arrays, *kind):   # one for each device
      tensors = [place(part, [x], *kind, device=name) for x, name in zip(arrays, self.devices, strict=True)]
      return Tensor(UOp.mstack(*[x.uop for x in tensors])).clone().realize()

    whole = {name: tuple(n * count if axis == part.axis else n for axis, n in enumerate(shape))
             for name, shape in shapes.items()}
    tensor = getattr(part, kind)
    if quantized and tensor.ndim > 1: return quantized(part, whole, maps, take, place_all)
    matrices = [shares(take(f"{name}.{kind}", *shape), part.axis) for name, shape in whole.items()]
    weights = [own[0] if len(own) == 1 else np.concatenate(own) for own in zip(*matrices, strict=True)]
    if tensor.ndim > 1: weights = [*map(part.stored, weights)]
    tensor.replace(place_all(part, weights))


def sum_kernel(out: UOp, *terms: UOp) -> UOp:
  """All of one shape, also where another device has them."""
  index = axes(0, *out.shape)
  return kernel_of("sum", out[*index].store(sum(x[*index].float() for x in terms).cast(out.dtype)))


def add(norm: llama.Norm, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
  """As Norm's, of what each device has of a sum."""
  if type(norm) is not llama.Norm: return type(norm).add(norm, x, *parts_of(delta))
  total = Tensor.empty_like(x).custom_kernel(x, *parts_of(delta), fxn=sum_kernel)[0]   # tinygrad's is of one device
  return total, norm(total)
