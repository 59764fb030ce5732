"""Layers, attention and sampling. Declares two seams: Backend, which works on every tinygrad device and is the
reference for faster backends, and Devices, the one or more devices that share a model."""
import math, os, threading
from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes, helpers, nn
from tinygrad.dtype import DType
from tinygrad.uop.ops import KernelInfo

from .config import ModelConfig, logger
from .request import SAMPLING_FIELDS, SamplerMode


# Lock for loading, capture and eager steps, because tinygrad's capture and scheduler are not thread-safe. Captured
# steps need no lock, so several engines can step at the same time
exclusive = threading.RLock()


def renderer() -> Any:
  """Return the default device's renderer. Also works during capture, when tinygrad forbids device access."""
  with helpers.Context(ALLOW_DEVICE_USAGE=1): return Device.default.renderer


# Number of cores that share a kernel on a CPU (at most 8, because a few saturate the memory), else 0
def cpu_cores() -> int: return 0 if renderer().has_local else min(8, renderer().global_max[0])


class Table:
  """A table of named 32-bit columns, a row per token or per row of logits. The host writes it, the graph reads it.
  formats: dtypes of the columns, int32, uint32 or float32. unused: words of a row after its columns."""
  def __init__(self, unused: int = 0, **formats: str):
    self.formats = formats
    self.num_words = len(formats) + unused
    self.dtype = np.dtype({"names": [*formats], "formats": [*formats.values()], "itemsize": 4 * self.num_words})

  def write(self, rows: list[tuple] | np.ndarray, size: int, **padding: int) -> np.ndarray:
    """Return (num_words * size,) int32, column by column. Rows after the last of `rows` hold `padding`, or 0."""
    array = np.zeros(size, self.dtype)
    for name, value in padding.items(): array[name] = value
    array[:len(rows)] = rows
    return array.view(np.int32).reshape(size, self.num_words).T.ravel()

  def read(self, words: Tensor) -> dict[str, Tensor]:
    """Return the columns by name, (size,) each. words: (at least num_words, size)."""
    return {name: words[i].bitcast(dtype) for i, (name, dtype) in enumerate(self.formats.items())}


# id: runner.UNKNOWN means the slot's last token. slot: index into the block tables, max_num_seqs for padding. block:
# the block of the token's position
TOKENS = Table(id="int32", position="int32", slot="int32", block="int32")
# token: batch index of the previous token. slot: where to store the sampled token, max_num_seqs to store none. The
# words after both tables begin at a multiple of 64 bytes, as CPUs load that many at a time
LOGITS = Table(3, token="int32", position="int32", slot="int32", temperature="float32", top_k="int32", top_p="float32",
               min_p="float32", seed_low="uint32", seed_high="uint32")
NUM_WORDS = TOKENS.num_words + LOGITS.num_words


class Module:
  """A layer with weights. sources: names of the checkpoint tensors that are concatenated in `weight` -> their rows."""
  sources: dict[str, int]
  weight: Tensor

  def load(self, checkpoint: Any) -> None:
    """Read the weights from a Checkpoint, and cast them to this module's dtypes."""
    for name, tensor in nn.state.get_state_dict(self).items():   # weight, bias
      rows = [checkpoint.read(f"{source}.{name}", n, *tensor.shape[1:]) for source, n in self.sources.items()]
      whole = Tensor.cat(*[x.to(tensor.device).cast(tensor.dtype) for x in rows])
      tensor.replace(whole.contiguous().realize())


class Linear(Module):
  """x @ W.T + bias, accumulated in float32. axis: the axis of W, (out, in), that several devices split: 0, or 1 with
  partial sums as results."""
  def __init__(self, in_features: int, sources: dict[str, int], bias: bool, dtype: DType, axis: int = 0):
    self.out_features = sum(sources.values())
    self.sources, self.axis = sources, axis
    self.weight = Tensor.empty(self.out_features, in_features, dtype=dtype)
    self.bias = Tensor.empty(self.out_features, dtype=dtype) if bias else None

  def __call__(self, x: Tensor, dtype: DType | None = None) -> Tensor:
    """x: (T, in). Return (T, out) in `dtype` (default: the dtype of x)."""
    return x.float().linear(self.weight.float().T, self.bias).cast(dtype or x.dtype).contiguous()

  # Rows `ids`, (T,), of W: (T, in). Each of several devices returns zeros for the rows of the others
  def rows(self, ids: Tensor, dtype: DType) -> Tensor: return self.weight[ids].cast(dtype).contiguous()


class GateUp(Linear):
  """activation(gate) * up (Shazeer 2020). W holds the gate rows, then the up rows. activation: a method of Tensor."""
  activation = "silu"

  def __call__(self, x: Tensor, dtype: DType | None = None) -> Tensor:
    gate, up = super().__call__(x, dtype).chunk(2, 1)                   # (T, out / 2) each
    return (getattr(gate, self.activation)() * up).contiguous()


class Norm(nn.RMSNorm, Module):
  """x / rms(x), computed in float32, times weight (Zhang and Sennrich 2019), over the last axis."""
  weight: Tensor

  def __init__(self, name: str, size: int, eps: float, dtype: DType):
    super().__init__(size, eps)
    self.sources = {name: size}
    self.weight = Tensor.empty(size, dtype=dtype)

  def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return x + delta, (T, size), and its norm. With several devices, delta holds partial sums."""
    total = (x + delta).contiguous()
    return total, self(total).contiguous()


def mix_bits(x: Tensor) -> Tensor:
  """Hash uint32 (lowbias32 of Wellons' hash-prospector)."""
  for shift, factor in ((16, 0x7feb352d), (15, 0x846ca68b)): x = (x ^ x.rshift(shift)) * factor
  return x ^ x.rshift(16)


def gumbel_noise(seed_low: Tensor, seed_high: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
  """Return Gumbel noise, (S, V), a function of seed, position and token id only. seed_low, seed_high: (S,) uint32."""
  key = mix_bits(seed_low ^ mix_bits(seed_high ^ mix_bits(positions.cast(dtypes.uint32)))).unsqueeze(1)   # (S, 1)
  bits = mix_bits(mix_bits(Tensor.arange(vocab_size, dtype=dtypes.uint32)) ^ key).rshift(9)   # (S, V), 23 bits each
  uniform = (bits.cast(dtypes.float32) + 0.5) * 2.0**-23                # in (0, 1), exact in float32
  return -(-uniform.log()).log()


class Sampler:
  """Samples token ids from logits. Each row uses only its own logits, so the output does not depend on the batch."""
  def reduce(self, function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Return the sum or maximum, (S, 1), of each row of x, (S, V)."""
    return function(x, 1, keepdim=True).contiguous()

  def keep_top(self, p: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Zero every p, (S, V) in 0..1, below the largest threshold for which the kept weights, (S, V), still sum to
    target, (S, 1). Keep all if they do not reach it. Radix search on the float bits, which sort like the floats."""
    bits = p.bitcast(dtypes.int32)
    threshold = target.const_like(1 << 29).cast(dtypes.int32).contiguous()   # higher bits are 0 up to 1.0
    for _ in range(30):
      bit = threshold & -threshold                                      # the lowest one, so that kernels are the same
      is_reached = self.reduce(Tensor.sum, (bits >= threshold).where(weights, 0.0)) >= target
      threshold = (threshold - is_reached.where(0, bit) + bit // 2).contiguous()
    return (bits >= threshold).where(p, 0.0)

  def argmax(self, x: Tensor) -> Tensor:
    """Return the first index of each row's maximum, (S,) int32. x: (S, V)."""
    is_best = x == self.reduce(Tensor.max, x)
    return -self.reduce(Tensor.max, is_best.where(-Tensor.arange(x.shape[1]), 1 - x.shape[1])).squeeze(1)

  def sample(self, logits: Tensor, rows: dict[str, Tensor], mode: SamplerMode) -> Tensor:
    """Return token ids, (S,), for float32 logits, (S, V): apply temperature, min_p, top_k and top_p (which keeps the
    token that crosses p), then take the argmax of logits plus Gumbel noise. rows: columns of LOGITS."""
    if mode == SamplerMode.GREEDY: return self.argmax(logits)
    temperature, top_k, top_p, min_p = [rows[name].unsqueeze(1) for name in SAMPLING_FIELDS]   # (S, 1) each
    is_random = temperature >= 1e-5
    x = (logits / is_random.where(temperature, 1.0)).contiguous()       # (S, V)
    p = (x - self.reduce(Tensor.max, x)).exp()                          # unnormalized: 1 for the best token
    p = (p >= min_p).where(p, 0.0).contiguous()
    if mode == SamplerMode.FILTERED:
      p = self.keep_top(p, p.const_like(1.0), (top_k > 0).where(top_k.float(), math.inf)).contiguous()
      p = self.keep_top(p, p, (top_p < 1.0).where(top_p * self.reduce(Tensor.sum, p), math.inf))
    noise = gumbel_noise(rows["seed_low"], rows["seed_high"], rows["position"], int(p.shape[1]))
    return self.argmax((p > 0.0).where(x + is_random.where(noise, 0.0), -math.inf).contiguous())


def scatter_kernel(out: UOp, index: UOp, values: UOp) -> UOp:
  """Write row i of values to row index[i] of out, in place. Rows have values.numel() / index.numel() elements."""
  size = values.numel() // index.numel()
  i = UOp.range(index.shape[0], 0)
  j = UOp.range(size, 1)
  store = out.base.index(index[i].load().cast(dtypes.weakint) * size + j).store(values.base.index(i * size + j))
  return store.end(i, j).sink(arg=KernelInfo(name="scatter"))


def write_and_gather(qkv: Tensor, cache: list[Tensor], rope: Tensor, columns: dict[str, Tensor], block_tables: Tensor,
                     num_heads: int) -> list[Tensor]:
  """Apply RoPE (Su et al. 2021), and write K and V to their blocks; see Backend.attend. columns: of `tokens`. Return q,
  (T, 1, KV, G, D), and K and V of each token's sequence, (T, length, KV, 1, D) each."""
  block_size, KV, D = [int(n) for n in cache[0].shape[1:]]
  q, k, v = qkv.unflatten(1, (-1, D)).split([num_heads, KV, KV], 1)     # (T, heads, D) each
  cos, sin = rope[columns["position"]].chunk(2, 1)                      # (T, 1, D / 2) each

  def rotate(x: Tensor) -> Tensor:   # rotates the first half of each head with the second
    a, b = x.float().chunk(2, 2)                                        # (T, heads, D / 2) each
    return Tensor.cat(a * cos - b * sin, b * cos + a * sin, dim=2).cast(x.dtype)

  slot_mapping = (columns["block"] * block_size + columns["position"] % block_size).contiguous()
  updated = [x.custom_kernel(slot_mapping, new.cast(x.dtype).contiguous(), fxn=scatter_kernel)[0]
             for x, new in zip(cache, (rotate(k), v), strict=True)]
  contexts = [x[block_tables[columns["slot"]]].flatten(1, 2).unsqueeze(3) for x in updated]
  return [rotate(q).unflatten(1, (KV, -1)).unsqueeze(1), *contexts]


class Memory:
  """A backend's memory policy (seam). free: free bytes of each of a model's devices; this class returns the host's,
  exact on a CPU, a guess elsewhere. largest_tensor: maximum bytes per tensor; 128 MiB is the limit on WebGPU and the
  minimum that OpenCL guarantees. max_blocks: number of KV cache blocks that fit in num_bytes; min_blocks always fit."""
  def largest_tensor(self) -> int: return 2**27 if Device.DEFAULT in ("CL", "WEBGPU") else 2**63
  def max_blocks(self, num_bytes: int, block_bytes: int, min_blocks: int) -> int: return num_bytes // block_bytes
  def free(self, devices: tuple[str, ...]) -> int:
    return os.sysconf(os.sysconf_names.get("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")


class Graphs:
  """A backend's graph policy (seam). choose: the GraphKey to run a step with: `key`, or a larger captured one. run: run
  a step; the first call captures it."""
  def choose(self, runner: Any, key: Any) -> Any: return key
  def run(self, runner: Any, graph: Callable[[], Any], key: Any) -> Any: return graph()


class Backend:
  """Computes a model's steps on a device (seam). Override what your device does better, and pass an instance as
  `LLM(backend=MyBackend())`; examples/custom_backend.py replaces attention. Members without a docstring:

  Linear, GateUp, Norm, sampler: layers and sampler of a model. memory, graphs: policies. reads_early: True if a step's
  results can be read while the next one runs. is_async: True if the host can build a step while the device runs one.
  budget: default of max_num_batched_tokens; 512 tokens would take a second on a CPU and stall running sequences."""
  Linear: type[Linear] = Linear
  GateUp: type[GateUp] = GateUp
  Norm: type[Norm] = Norm
  sampler: Sampler = Sampler()
  memory: Memory = Memory()
  graphs: Graphs = Graphs()
  reads_early = False
  is_async = property(lambda self: not cpu_cores())
  budget = property(lambda self: 128 if cpu_cores() else 512)

  def pick_dtype(self, name: str, model: ModelConfig | None = None) -> str:
    """Return the dtype to compute a model in: `name`, or one that the device supports, with a warning."""
    if name == "auto": name = "float32" if Device.DEFAULT == "CPU" else "float16"
    supported = next(x for x in (name, "float16", "float32") if getattr(dtypes, x) in renderer().supported_dtypes())
    if supported != name: logger.warning(f"{Device.DEFAULT} does not support {name}: computing in {supported}")
    return supported

  def kv_layout(self, model: ModelConfig, config: Any, dtype: DType) -> list[tuple[tuple[int, ...], DType]]:
    """Return shape and dtype of a block in each cache tensor of a layer: here K and V, (block_size, KV, D) each.
    config: the engine's EngineConfig."""
    return [((config.block_size, model.num_key_value_heads, model.head_dim), dtype)] * 2

  def attend(self, qkv: Tensor, cache: list[Tensor], rope: Tensor, tokens: Tensor, block_tables: Tensor, num_heads: int,
             scale: float = 0, window: int = 0, cap: float = 0, sinks: Tensor | None = None) -> Tensor:
    """Apply RoPE, write K and V to their blocks, and compute causal attention of each token over its sequence through
    the block table (Kwon et al. 2023). qkv: (T, (H + 2 KV) * D). cache: (num_blocks, *block), see kv_layout. rope:
    (length, 2, D / 2), cosines and sines. tokens: (columns of TOKENS, then others, T) int32. block_tables: (slots,
    max_blocks) int32. Return (T, H * D). This version copies max_blocks blocks of K and V for each token.

    scale: factor of the scores, 0 for 1 / sqrt(D). window: attend to the last `window` positions only, the token's own
    included, 0 for all. cap: replace scores by cap * tanh(score / cap), 0 for none (Gemma 2, arXiv:2408.00118).
    sinks: (H,), a score per head that takes weight from the positions, but has no value (gpt-oss, arXiv:2508.10925)."""
    columns = TOKENS.read(tokens)                                       # (T,) each
    q, keys, values = write_and_gather(qkv, cache, rope, columns, block_tables, num_heads)
    length = int(keys.shape[1])
    distance = columns["position"].reshape(-1, 1, 1, 1) - Tensor.arange(length).reshape(-1, 1, 1)
    mask = (distance >= 0) & (distance < (window or length))
    scores = (q.float() * keys).sum(4) * (scale or int(q.shape[4])**-0.5)   # (T, length, KV, G)
    scores = mask.where((scores / cap).tanh() * cap if cap else scores, -math.inf)
    if sinks is not None: scores = scores.cat(sinks.float().reshape(q.shape[1:4]).expand(q.shape[:4]), dim=1)
    weights = scores.softmax(1)[:, :length].unsqueeze(4)                # (T, length, KV, G, 1)
    values = mask.unsqueeze(4).where(values, 0)                         # masked values may be NaN
    return (weights * values).sum(1).cast(qkv.dtype).flatten(1).contiguous()

  def run_layers(self, layers: list, x: Tensor, delta: Tensor, caches: list[list[Tensor]], *inputs: Any) -> tuple:
    """Call each layer with its cache tensors; see llama.Layer."""
    for layer, cache in zip(layers, caches, strict=True): x, delta = layer(x, delta, cache, *inputs)
    return x, delta

  def start_reading(self, tensor: Tensor) -> Callable[[], Any]:
    """Return a function that waits for the device and returns the tensor as nested lists. It uses no Tensor operations,
    because they are not thread-safe."""
    def read() -> list:
      array = np.empty(tensor.shape, np.int32 if tensor.dtype == dtypes.int32 else np.float32)
      tensor.uop.buffer.allocator._copyout(array.data.cast("B"), tensor.uop.buffer._buf)   # type: ignore[union-attr]
      return array.tolist()
    return read


class Devices:
  """The devices that share a model (seam; parallel.py), here one. names: all, which also have RoPE's tables. shards:
  those with a part of each tensor, as the backend's Linear and Norm handle them; a layer's KV cache is where its
  weights are. shard: a config with one device's share of heads, MLP and vocabulary. jit: a step as a graph, captured
  when it is called with `cnt` 1. gather: the logits of the whole vocabulary, (S, V), on the first device."""
  def __init__(self, names: tuple[str, ...] = ()): self.names = self.shards = names or (Device.DEFAULT,)
  def shard(self, model: ModelConfig) -> ModelConfig: return model
  def jit(self, step: Callable[[], Any]) -> Any: return TinyJit(step)
  def gather(self, logits: Tensor) -> Tensor: return logits
