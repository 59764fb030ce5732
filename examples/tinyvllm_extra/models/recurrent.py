"""Layers with a state of fixed size instead of K and V, and models that have both kinds. The rows of a tensor, (rows,
...), hold a layer's states: one for each slot, then others, see StatePool. A step reads a sequence's row before the
sequence's first token and writes it after the last one."""
import collections, functools, math
from collections.abc import Callable

import numpy as np
from tinygrad import Tensor, UOp, dtypes, nn
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

from tinyvllm.backend import TOKENS, cpu_cores, exclusive
from tinyvllm.config import ModelConfig
from tinyvllm.llama import Layer
from tinyvllm.runner import Runner, upload, zeros

from .layers import MixtureLayer, VariantConfig, VariantLayer

SLOT, POSITION = [[*TOKENS.formats].index(name) for name in ("slot", "position")]
WIDTH, PARTS, GROUPS = 8, 8, 64   # on a GPU, see TokenLoop (measured on an H200)
COPIED = 2**16   # numbers of each layer that a copy moves together, at least one row


def state_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
  """Return the shape of each layer's state in float32: the convolution's last inputs, (kernel_size - 1, channels), then
  `matrices`, in one row; () for a layer with K and V."""
  if not isinstance(config, VariantConfig): return [()] * config.num_hidden_layers
  size = (config.kernel_size - 1) * config.channels + math.prod(config.matrices)
  return [() if layer.has_kv else (size,) for layer in config.layers]


def copy_kernel(state: UOp, pairs: UOp) -> UOp:
  """Copy row pairs[i, 0] to row pairs[i, 1], in place. pairs: (num_pairs, 2). No row is in two different pairs."""
  i, j = [UOp.range(n, axis) for axis, n in enumerate((pairs.max_shape[0], state.max_shape[1]))]
  source, target = [pairs[i, z].load().cast(dtypes.weakint) % state.max_shape[0] for z in range(2)]
  return state[target, j].store(state[source, j].load()).end(i, j).sink(arg=KernelInfo(name="copy_rows"))


class StatePool:
  """The rows of all states of a runner, which are in its KV caches: one per slot, one for padding, a backup per slot,
  which holds the state before draft tokens, if `has_drafts`, and the others for snapshots. The least recently used
  snapshot is replaced. shapes: see state_shapes."""
  def __init__(self, runner: Runner, shapes: list[tuple[int, ...]], num_rows: int, has_drafts: bool):
    self.padding = runner.config.max_num_seqs   # row
    def new(layer: Layer, shape: tuple[int, ...]) -> Tensor:   # on the device of the layer's weights
      return Tensor.empty(num_rows, *shape, dtype=dtypes.float32, device=nn.state.get_parameters(layer)[0].device)
    self.states = [new(*x).contiguous().realize() for x in zip(runner.model.layers, shapes, strict=True) if x[1]]
    for cache, state in zip([x for x in runner.kv_caches if not x], self.states, strict=True): cache.append(state)
    self.num_pairs = max(1, min(16, COPIED // max(map(math.prod, filter(None, shapes)))))   # per copy
    self.pairs = zeros(self.num_pairs, 2)   # from, to
    self.graph = runner.model.devices.jit(self.run)
    self.graph.cnt = 1   # capture at the first call
    self.free_rows = [*range((self.padding + 1) * (1 + has_drafts), num_rows)]
    self.snapshots = collections.OrderedDict[bytes, int]()   # by block hash
    self.num_hits = 0

  def run(self) -> None:
    Tensor.realize(*[x.custom_kernel(self.pairs.to(x.device), fxn=copy_kernel)[0] for x in self.states])

  def copy(self, pairs: list[tuple[int, int]]) -> None:
    """Copy rows in the order of the device's other work. pairs: from and to; no row is in two of them."""
    padded = [*pairs, *[(self.padding, self.padding)] * (-len(pairs) % self.num_pairs)]
    for rows in np.array(padded, np.int32).reshape(-1, self.num_pairs, 2):
      upload(self.pairs, rows)
      with exclusive: self.graph()

  def backup(self, slot: int) -> int: return self.padding + 1 + slot

  def take_row(self) -> int | None:
    """Return a free row, or the one of the least recently used snapshot, if there is any."""
    if self.free_rows: return self.free_rows.pop()
    return self.snapshots.popitem(last=False)[1] if self.snapshots else None

  def drop(self, key: bytes) -> None:
    if key in self.snapshots: self.free_rows.append(self.snapshots.pop(key))

  def metrics(self) -> dict[str, int]:
    return {"state_snapshots": len(self.snapshots), "state_snapshot_hits": self.num_hits}


def input_before(x: UOp, state: UOp, tokens: UOp, t: UOp, h: UOp, back: int, columns: int) -> UOp:
  """Return channel h of a convolution's input `back` tokens before token t of the same sequence: of x, (T, channels or
  more), or of a state, which begins with (columns, channels); 0 before the first token. tokens: (words, T)."""
  def is_same(n: int) -> UOp: return (t >= n) & tokens[SLOT, (t - n).maximum(0)].load().eq(tokens[SLOT, t].load())
  earlier = sum([is_same(n).cast(dtypes.weakint) for n in range(1, columns + 1)], UOp.const(0))   # in this step
  own = x.base.index(((t - back).maximum(0) * x.max_shape[1] + h).valid(is_same(back))).load().float()
  at = row_start(state, tokens, t) + (columns - back + earlier) % columns * (h.vmax + 1) + h
  stored = state.base.index(at.valid(earlier < back)).load()
  return (tokens[POSITION, t].load() >= back).where((earlier >= back).where(own, stored), 0.0)


def row_start(state: UOp, tokens: UOp, t: UOp) -> UOp:
  """Return the index of the first number of a token's state."""
  return tokens[SLOT, t].load().cast(dtypes.weakint) % state.max_shape[0] * state.max_shape[1]


def conv_kernel(out: UOp, x: UOp, state: UOp, weight: UOp, tokens: UOp) -> UOp:
  """Compute a causal convolution for each channel. out: (T, channels). weight: (channels, 1, kernel_size). Other
  arguments: see input_before."""
  t, h = [UOp.range(n, i) for i, n in enumerate(out.max_shape)]
  last = weight.max_shape[2] - 1
  terms = [input_before(x, state, tokens, t, h, last - j, last) * weight[h, 0, j].load().float()
           for j in range(last + 1)]
  return out[t, h].store(sum(terms, UOp.const(0.0)).cast(out.dtype)).end(t, h).sink(arg=KernelInfo(name="conv"))


def keep_kernel(out: UOp, x: UOp, state: UOp, tokens: UOp, columns: int) -> UOp:
  """Write the convolution's inputs to the state after each sequence's last token. out: conv_kernel's. It is read only
  to order the kernels, as tinygrad 0.14 confuses operands if a kernel does not use one."""
  t, h = [UOp.range(n, i) for i, n in enumerate(out.max_shape)]
  slot, next_slot = [tokens[SLOT, n].load() for n in (t, (t + 1).minimum(t.vmax))]
  is_last = ((t >= t.vmax) | slot.ne(next_slot)) & ((slot >= 0) | (out[t, h].load() > 0))   # slot >= 0 is always true
  store = UOp.const(0)
  for j in range(columns):   # in this order, as a column may come from a later one
    at = (row_start(state, tokens, t) + j * out.max_shape[1] + h).valid(is_last)
    store = state.base.after(store).index(at).store(input_before(x, state, tokens, t, h, columns - 1 - j, columns))
  return store.end(t, h).sink(arg=KernelInfo(name="keep_inputs"))


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
  """Return the convolution of each channel over a sequence's tokens, (T, channels), and update the states in place. x:
  (T, channels or more)."""
  out = Tensor.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
  out = out.custom_kernel(x, state, weight, tokens, fxn=conv_kernel)[0]
  return out.custom_kernel(x, state, tokens, fxn=functools.partial(keep_kernel, columns=weight.max_shape[2] - 1))[0]


class TokenLoop:
  """The lanes of a kernel that computes each sequence's tokens in turn. A row of `state`, (rows, ...), ends in `count`
  columns of `size` numbers, in tiles of columns. A CPU's lane has a column, and computes all sequences. On a GPU, PARTS
  lanes share a column, so that their numbers fit in registers, and a work group computes the sequences that begin in
  its part of the tokens. tokens: (words, T).

  now: the token. exists: whether the lane computes any. column: the lane's; it has the part-th `own` numbers."""
  def __init__(self, tokens: UOp, state: UOp, count: int, size: int):
    is_cpu, T = cpu_cores() > 0, tokens.max_shape[1]
    self.width, self.parts, groups = (16, 1, 1) if is_cpu else (WIDTH, math.gcd(size, PARTS), math.gcd(T, GROUPS))
    self.width, self.own, self.count = math.gcd(count, self.width), size // self.parts, count
    cores = math.gcd(count // self.width, cpu_cores())   # on a GPU as many as there are tiles
    axes = [UOp.range(n, i, AxisType.THREAD if is_cpu and i == 2 else AxisType.WEAK) for i, n in enumerate(
      (groups, count // self.width // cores, cores))]
    lanes = UOp.range(self.width * self.parts, 3, AxisType.UPCAST if is_cpu else AxisType.LOCAL)
    self.vector, self.axes = [lanes] * is_cpu, [lanes] * (not is_cpu) + axes
    # A quotient would split the axis of a CPU's lanes
    self.lane, self.part = (lanes, UOp.const(0)) if is_cpu else (lanes % self.width, lanes // self.width)
    self.column = (axes[2] * (count // self.width // cores) + axes[1]) * self.width + self.lane
    def is_new(t: UOp) -> UOp:   # whether a sequence begins at token t
      return (t < 1) | tokens[SLOT, (t - 1).maximum(0)].load().ne(tokens[SLOT, t.minimum(T - 1)].load())
    i, self.end = UOp.range(T // groups, 4, AxisType.REDUCE), (axes[0] + 1) * (T // groups)   # end of the part
    # Tokens from the part's first sequence on
    left = is_new(self.end - 1 - i).where(T - self.end + 1 + i, 0).cast(dtypes.int32).reduce(i, arg=Ops.MAX)
    # Loops around a sequence and around a token
    token, self.begin, self.loop = UOp.placeholder((1,), dtypes.int32, 100, AddrSpace.REG), UOp.loop(5), UOp.loop(6)
    self.token = token.after(token.after(*axes)[0].store(T - left), self.begin)
    first, self.now = [x[0].load().cast(dtypes.weakint) for x in (self.token, self.token.after(self.loop))]
    self.exists, first, self.now = first < self.end, first % T, self.now % T
    self.goes_on = self.exists & (self.now < T - 1) & is_new(self.now + 1).logical_not()
    tile = row_start(state, tokens, first) + state.max_shape[1] - count * size + (self.column - self.lane) * size
    self.state, self.at = state.base, tile + self.part * self.width + self.lane   # at: of the lane's first number
    i, shape = self.each(9, 1), (self.own, self.width if is_cpu else 1)
    memory = UOp.placeholder(shape, dtypes.float32, 101, AddrSpace.REG)
    stored = self.stored(i, self.exists & (tokens[POSITION, first].load() > 0)).load()   # 0 before the first token
    self.memory = memory.after(self.cell(memory.after(self.begin), i).store(stored).end(*self.vector, *i.ranges))

  def each(self, first: int, unroll: int, types: tuple = (AxisType.LOOP, AxisType.UPCAST)) -> UOp:
    """Return the index of one of the lane's numbers, with axes `first` and the next one: a loop with `unroll`
    numbers per iteration, or all of them on a GPU."""
    unroll = math.gcd(self.own, unroll) if self.vector else self.own
    around, unrolled = [UOp.range(n, first + i, types[i]) for i, n in enumerate((self.own // unroll, unroll))]
    return around * unroll + unrolled

  def stored(self, i: UOp, is_needed: UOp) -> UOp:
    return self.state.index((self.at + i * self.parts * self.width).valid(is_needed))

  # The lane's i-th number in registers, and as the token before left it
  def cell(self, memory: UOp, i: UOp) -> UOp: return memory[i, self.lane if self.vector else 0]
  def number(self, i: UOp) -> UOp: return self.cell(self.memory.after(self.loop), i).load()

  def totals(self, *products: Callable[[UOp], UOp]) -> list[UOp]:
    """Return sums over a column. products: of the lane's i-th number. All sums share a loop."""
    i = self.each(7, 4, (AxisType.REDUCE, AxisType.UNROLL))
    sums = [x(i).reduce(*i.ranges, arg=Ops.ADD) for x in products]
    if self.parts == 1: return sums
    shared = UOp.placeholder((len(sums), self.width, self.parts), dtypes.float32, 102, AddrSpace.LOCAL)
    shared = shared.after(UOp.group(*[shared[n, self.lane, self.part].store(x) for n, x in enumerate(sums)]))
    return [UOp.usum(*[shared[n, self.lane, part].load() for part in range(self.parts)]) for n in range(len(sums))]

  def kernel(self, name: str, change: Callable[[UOp], UOp], store: UOp) -> UOp:
    """Return the kernel. change: returns the lane's i-th number after a token. store: of the token's results."""
    i, j = self.each(11, 16), self.each(13, 1)   # with fewer than 16, clang vectorizes with gathers
    update = self.cell(self.memory.after(self.loop), i).store(change(i)).end(*self.vector, *i.ranges)
    count = self.token.after(self.loop)[0].store((self.now + 1).cast(dtypes.int32))
    end = UOp.group(update, store.end(*self.vector), count).end(self.loop, self.goes_on)
    last = self.cell(self.memory.after(end), j).load()
    result = self.stored(j, self.exists).store(last).end(*self.vector, *j.ranges)
    goes_on = self.exists & (self.token.after(result)[0].load() < self.end)
    return result.end(self.begin, goes_on).end(*self.axes).sink(arg=KernelInfo(name=name, opts_to_apply=()))


def delta_kernel(out: UOp, state: UOp, x: UOp, gates: UOp, tokens: UOp, K: int, groups: int) -> UOp:
  """Apply the gated delta rule (Yang et al. 2024, arXiv:2412.06464): S *= decay, S += k (v - k S) beta, out = q S. out:
  (T, heads, V). state: see TokenLoop, ends in S of each head, (heads, K, V). x: (T, ...), q and k of key heads, then v.
  gates: (4, T, heads), decay, beta, and factors that give q and k unit length. tokens: (words, T). groups: of heads.
  Each has the next key head, and after the last one the first."""
  loop = TokenLoop(tokens, state, math.prod(out.max_shape[1:]), K)
  h, size = loop.column // out.max_shape[2], x.max_shape[1] - loop.count   # size: of q and k
  def q(i: UOp, at: int = 0) -> UOp:
    return x[loop.now, at + h * groups // out.max_shape[1] * K % (size // 2) + loop.part * loop.own + i].load().float()
  def k(i: UOp) -> UOp: return q(i, size // 2)
  kS, qS, qk = loop.totals(lambda i: k(i) * loop.number(i), lambda i: q(i) * loop.number(i), lambda i: q(i) * k(i))
  decay, beta, *units = [gates[i, loop.now, h].load() for i in range(4)]
  delta = (x[loop.now, size + loop.column].load().float() - kS * decay * units[1]) * beta * units[1]
  store = out.base.index((loop.now * loop.count + loop.column).valid(loop.exists)).store(
    (qS * decay + qk * delta) * units[0] * K**-0.5)
  return loop.kernel("delta_rule", lambda i: loop.number(i) * decay + k(i) * delta, store)


class HybridLayer(VariantLayer):
  """A transformer block of LFM2 (Liquid AI 2025, arXiv:2511.23404) with a short convolution instead of attention."""
  has_kv = False
  rows = property(lambda self: {"mixer.in_proj": 3 * self.config.hidden_size})   # rows of in_proj, by name

  def make_attention(self) -> None:
    config = self.config
    self.in_proj = self.linear(self.backend.Linear, config.hidden_size, self.rows, False)
    self.conv = self.plain("mixer.conv1d", config.channels, 1, config.kernel_size)
    self.out_proj = self.linear(self.backend.Linear, config.matrices[1], {"mixer.out_proj": config.hidden_size}, False)

  def attention(self, h: Tensor, cache: list[Tensor], ropes: list[Tensor], tokens: Tensor,
                block_tables: Tensor) -> Tensor:
    return self.out_proj(self.mix(h, cache[0], tokens).cast(h.dtype).contiguous())

  def mix(self, h: Tensor, state: Tensor, tokens: Tensor) -> Tensor:
    """Return a short convolution with two gates, (T, hidden), C * conv(B * x), for normed h, (T, hidden)."""
    b, c, x = self.in_proj(h).chunk(3, 1)                               # (T, hidden) each
    return c * causal_conv((b.float() * x).contiguous(), state, self.conv.weight, tokens)


class DeltaRuleLayer(HybridLayer):
  """A transformer block of Qwen3.5 with the gated delta rule. Unlike Qwen3 this model has it instead of attention in
  most layers, gates for the outputs of attention, RoPE on a quarter of a head, and norms of 1 + w."""
  rows = property(lambda self: {"mixer.in_proj_qkv": self.config.channels, "mixer.in_proj_z": self.config.matrices[1]})

  def make_attention(self) -> None:
    super().make_attention()
    heads = self.config.heads[0]
    rows = {"mixer.in_proj_b": heads, "mixer.in_proj_a": heads}
    self.in_proj_ba = self.linear(self.backend.Linear, self.config.hidden_size, rows, False)
    self.dt_bias, self.a_log = [self.plain(f"mixer.{name}", heads) for name in ("dt_bias", "A_log")]
    self.gated_norm = self.norm("mixer.gated", self.config.matrices[1] // heads)

  def mix(self, h: Tensor, state: Tensor, tokens: Tensor) -> Tensor:
    """Return RMSNorm(S q) * silu(z), see delta_kernel."""
    (K, size), (heads, groups) = self.config.matrices, self.config.heads
    xz = self.in_proj(h)                                                # (T, channels + size)
    x = causal_conv(xz, state, self.conv.weight, tokens).silu().contiguous()   # (T, channels)
    b, a = self.in_proj_ba(h, dtype=dtypes.float32).chunk(2, 1)         # (T, heads) each
    decay = (-self.a_log.weight.exp() * (a + self.dt_bias.weight).softplus()).exp()
    qk = x[:, :-size].unflatten(1, (2, -1, K)).float()                  # (T, 2, key heads, K)
    units = (qk.square().sum(3) + 1e-6).rsqrt().contiguous().repeat(1, 1, groups // int(qk.shape[2]))
    units = units.repeat_interleave(heads // groups, 2).permute(1, 0, 2)   # (2, T, heads)
    gates = decay.stack(b.sigmoid()).cat(units).contiguous()
    out = Tensor.empty(h.shape[0], heads, size // heads, dtype=dtypes.float32, device=h.device).custom_kernel(
      state, x, gates, tokens, fxn=functools.partial(delta_kernel, K=K, groups=groups))[0]
    return self.gated_norm(out).flatten(1) * xz[:, -size:].float().silu()


class DeltaRuleMixtureLayer(DeltaRuleLayer, MixtureLayer):
  """A transformer block of Qwen3.5 with experts."""
