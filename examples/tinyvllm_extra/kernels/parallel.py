"""The devices of one machine that share a model. Tensor parallelism (Shoeybi et al. 2019): each has a shard of the
heads, the MLP and the vocabulary, and reads the partial sums of the others in place. Pipeline parallelism (Huang et al.
2019): each has some of the layers, and gets copies of the activations; no device reads another one's memory."""
import contextvars, dataclasses, functools, itertools
from collections.abc import Callable
from typing import Any, cast

from tinygrad import Context, Device, Tensor, UOp, nn
from tinygrad.engine.jit import _TinyJit

from tinyvllm import backend
from tinyvllm.backend import Module
from tinyvllm.config import ModelConfig, check
from tinyvllm.llama import Layer, Llama
from tinyvllm_extra.options import LLMConfig, check_one_device

from .drivers import can_access_peer

MICRO_BATCH = 512   # tokens: with fewer, reading the weights again would take longer than the products
ROWS = 16   # vocabulary rows per device are a multiple of it, for the matrix kernels' tiles
# In a slot (pipeline.py): stage, x and delta of the stage before -> x, delta and tokens of another group
exchange = contextvars.ContextVar[Callable[..., list[Tensor]] | None]("exchange", default=None)


def device_names(count: int) -> tuple[str, ...]:
  """Return the names of the default device and the next ones of its type."""
  return tuple(Device.canonicalize(f"{Device.DEFAULT}:{i}") for i in range(count))


def open_devices(config: LLMConfig) -> backend.Devices:
  """Open the devices that share a model. Raises InputError if there are fewer, or if they cannot share it that way."""
  tensor, pipeline = config.tensor_parallel_size, config.pipeline_parallel_size
  check(1 in (tensor, pipeline), f"pipeline_parallel_size={pipeline} must be 1 with tensor_parallel_size={tensor}")
  if tensor == pipeline: return backend.Devices()
  devices = (ShardedDevices if tensor > 1 else Stages)(device_names(max(tensor, pipeline)))
  if config.enforce_eager: check_one_device(devices, " with enforce_eager=True: only graphs sync devices")
  if Device.DEFAULT != "CPU": check_devices(devices)
  return devices


def check_devices(devices: "ShardedDevices | Stages") -> None:
  """Raise InputError if there are fewer devices, or if devices with shards cannot read each other's memory."""
  count, available = len(devices.names), Device.default.count()
  if devices.shards == devices.names and Device.DEFAULT != "CUDA":
    check_one_device(devices, f" on {Device.DEFAULT}; only CUDA and CPU support more")
  check(count <= available, f"{devices.option}={count} must be at most {available}, the number of {Device.DEFAULT} "
        "devices")
  for reader, owner in itertools.permutations(devices.shards, 2):
    why = f": {reader} cannot read {owner}'s memory (nvidia-smi topo -p2p r)"
    if not can_access_peer(reader, owner): check_one_device(devices, why)


class Graph(_TinyJit):
  """A captured step on several devices. step: a partial of Runner._compute, whose last argument is the GraphKey, or a
  small one."""
  def __init__(self, devices: tuple[str, ...], step: Any):
    super().__init__(step)
    self.devices = devices
    # Devices wait before they reuse memory that others read. Small steps need so little that none is reused
    self.no_reuse = int(not isinstance(step, functools.partial) or step.args[-1].num_tokens <= 64)

  def __call__(self, *args: object, **kwargs: object) -> object:
    if self.cnt != 1: return super().__call__(*args, **kwargs)   # no Context, which all threads would share
    with Context(NO_MEMORY_PLANNER=self.no_reuse): results = super().__call__(*args, **kwargs)
    # A capture changes CUDA's current device, in whose stream steps run: synchronize the engine's, the first, last
    for name in reversed(self.devices[1:]): Device[name].synchronize()
    return results


class ShardedDevices(backend.Devices):
  """Several devices of the same type. Each has the same number of vocabulary rows: the last ones are padding, whose
  logits `gather` removes."""
  option = "tensor_parallel_size"

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

  def jit(self, step: Callable[[], object]) -> Graph: return Graph(self.names, step)
  def gather(self, logits: Tensor) -> Tensor: return Tensor(logits.uop.unshard(1)).to(None)[:, :self.vocab_size]


class Stages(backend.Devices):
  """Devices that run a model's layers one after the other. The first one has all other weights."""
  option = "pipeline_parallel_size"

  def __init__(self, names: tuple[str, ...]):
    super().__init__(names)
    self.shards = names[:1]

  def jit(self, step: Callable[[], object]) -> Graph: return Graph(self.names, step)

  def place(self, model: Llama, size: Callable[[list[Module]], int]) -> None:
    """Choose each layer's device, before its weights load: consecutive layers, and about as many bytes on each device.
    size: returns the bytes of modules."""
    layers = [[x for x in vars(layer).values() if isinstance(x, Module)] for layer in model.layers]
    total, sizes = size(model.modules()), [*map(size, layers)]
    start = total - sum(sizes)
    for modules, num_bytes in zip(layers, sizes, strict=True):
      device = self.names[(2 * start + num_bytes) * len(self.names) // (2 * total)]   # by the layer's middle
      for x in nn.state.get_parameters(modules): x.replace(Tensor.empty(*x.shape, dtype=x.dtype, device=device))
      start += num_bytes

  def cache_bytes(self, model: Llama, num_bytes: int) -> int:
    """Return the bytes for the KV cache of all layers, so that each device has room for its layers. num_bytes: of each
    device's memory, less all weights."""
    weights = nn.state.get_parameters(model.modules())
    devices = [device_of(layer) for layer in model.layers if layer.has_kv]
    others = {name: sum(x.nbytes() for x in weights if x.device != name) for name in devices}
    return min((num_bytes + others[name]) // devices.count(name) for name in others) * len(devices)


def device_of(layer: Layer) -> Any: return nn.state.get_parameters(layer)[0].device


def run_layers(run: Callable[..., tuple], layers: list[Layer], x: Tensor, delta: Tensor, caches: list[list[Tensor]],
               ropes: list[Tensor], tokens: Tensor, block_tables: Tensor) -> tuple:
  """Like Backend.run_layers: call `run` for the layers of each device. Many tokens are split into micro-batches, so
  that all devices work at the same time. ropes: on all devices; the other inputs: on the first."""
  devices = [device_of(layer) for layer in layers]
  if {*devices, *[t.device for t in ropes]} == {x.device}:
    return run(layers, x, delta, caches, ropes, tokens, block_tables)
  outputs, written = [], dict[str, list[UOp]]()   # written: by device, an output of the last micro-batch
  count = 1 if exchange.get() else max(1, int(x.shape[0]) // MICRO_BATCH)
  for part in zip(x.chunk(count), delta.chunk(count), tokens.chunk(count, 1), strict=True):
    inputs = [*part, block_tables]
    for stage, device in enumerate(dict.fromkeys(devices)):
      if stage and (swap := exchange.get()): inputs[:3] = swap(stage, *inputs[:2])
      inputs = [t.to(device) for t in inputs]
      own = slice(devices.index(device), devices.index(device) + devices.count(device))
      # Wait until the last micro-batch has written its keys and values
      own_caches = [[Tensor(t.uop.after(*written.get(device, []))) for t in cache] for cache in caches[own]]
      own_ropes = [Tensor(t.uop.mselect(cast(tuple, t.device).index(device))) for t in ropes]
      inputs[:2] = run(layers[own], *inputs[:2], own_caches, own_ropes, *inputs[2:])
      written[device] = [inputs[0].uop.base]
    outputs.append([t.to(x.device).reshape(-1, *part[0].shape) for t in inputs[:2]])   # delta may hold partial sums
  return tuple(Tensor.cat(*parts, dim=1).flatten(0, 1) for parts in zip(*outputs, strict=True))
