"""Tensor parallelism (Shoeybi et al. 2019) over the devices of one machine: each has a shard of the heads, the MLP and
the vocabulary, and reads the partial sums of the others in place."""
import dataclasses, itertools
from typing import Any

from tinygrad import Context, Device, Tensor
from tinygrad.engine.jit import _TinyJit

from tinyvllm import backend
from tinyvllm.config import ModelConfig, check
from tinyvllm_extra.options import LLMConfig, check_one_device

ROWS = 16   # vocabulary rows per device are a multiple of it, for the matrix kernels' tiles


def device_names(count: int) -> tuple[str, ...]:
  """Return the names of the default device and the next ones of its type."""
  return tuple(Device.canonicalize(f"{Device.DEFAULT}:{i}") for i in range(count))


def open_devices(config: LLMConfig) -> "ShardedDevices":
  """Open tensor_parallel_size devices. Raises InputError if there are fewer, or if they cannot read each other's
  memory."""
  count = config.tensor_parallel_size
  check(not config.enforce_eager, f"tensor_parallel_size={count} needs enforce_eager=False: only graphs sync devices")
  if Device.DEFAULT == "CUDA": check_peers(count)
  elif Device.DEFAULT != "CPU": check_one_device(count, f" on {Device.DEFAULT}; only CUDA and CPU support more")
  return ShardedDevices(device_names(count))


def check_peers(count: int) -> None:
  from .cuda import can_access_peer
  available = Device.default.count()
  check(count <= available, f"tensor_parallel_size={count} must be at most {available}, the number of CUDA devices")
  devices: list[Any] = [Device[name] for name in device_names(count)]
  for reader, owner in itertools.permutations(devices, 2):
    why = f": {reader.device} cannot read {owner.device}'s memory (nvidia-smi topo -p2p r)"
    if not can_access_peer(reader, owner): check_one_device(count, why)


class Graph(_TinyJit):
  """A captured step on several devices. step: a partial of Runner._compute whose last argument is the GraphKey."""
  def __init__(self, devices: tuple[str, ...], step: Any):
    super().__init__(step)
    self.devices = devices
    # Devices wait before they reuse memory that others read. Small steps need so little that none is reused
    self.no_reuse = int(step.args[-1].num_tokens <= 64)

  def __call__(self, *args: object, **kwargs: object) -> object:
    if self.cnt != 1: return super().__call__(*args, **kwargs)   # no Context, which all threads would share
    with Context(NO_MEMORY_PLANNER=self.no_reuse): results = super().__call__(*args, **kwargs)
    # A capture changes CUDA's current device, in whose stream steps run: synchronize the engine's, the first, last
    for name in reversed(self.devices[1:]): Device[name].synchronize()
    return results


class ShardedDevices(backend.Devices):
  """Several devices of the same type. Each has the same number of vocabulary rows: the last ones are padding, whose
  logits `gather` removes."""
  def shard(self, model: ModelConfig) -> ModelConfig:
    count = len(self.names)
    sizes = {name: getattr(model, name) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
    limits = LLMConfig.__dataclass_fields__["tensor_parallel_size"].metadata
    divisors = [n for n in range(limits["min"], limits["max"] + 1) if not any(size % n for size in sizes.values())]
    choices = " or ".join(map(str, divisors))
    check(count in divisors, f"tensor_parallel_size={count} must divide each of {sizes}: use {choices}")
    self.vocab_size = model.vocab_size
    shares = {name: size // count for name, size in sizes.items()}
    return dataclasses.replace(model, **shares, vocab_size=-(-model.vocab_size // (ROWS * count)) * ROWS)

  def jit(self, step: Any) -> Graph: return Graph(self.names, step)
  def gather(self, logits: Tensor) -> Tensor: return Tensor(logits.uop.unshard(1)).to(None)[:, :self.vocab_size]
