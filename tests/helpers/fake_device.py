"""A fake device: it reads the same words, block tables and last tokens as a captured graph, and computes the step in
numpy, without tinygrad's kernels. Tests of the host's logic run on it 10 times faster; it cannot see faults in kernels
and graphs. A wrong block, position, token or seed changes the output, and reading an unwritten position is an error."""
import functools
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tinyvllm import backend
from tinyvllm.runner import UNKNOWN, GraphKey, Runner
from tinyvllm_extra.kernels import FastBackend, drivers, kernel_cache
from tinyvllm_extra.sampling.logits import ADJUSTMENTS, NUM_BEST, HiddenStatesPlan, LogitsPlan

from .models import load
from .reference import gumbel_noise, head, head_sizes, hidden_states, log_softmax, reference_sampling_mask


RACE = -9   # a token id that no step may read


def array_of(tensor: Tensor, dtype: Any = np.int32) -> np.ndarray:
  """Return a realized tensor's memory as an array of 32-bit numbers that writes through."""
  buffer: Any = tensor.uop.buffer
  is_new = not buffer.is_allocated()
  if is_new: buffer.allocate()
  array = np.frombuffer(buffer.allocator._as_buffer(buffer._buf), dtype)[:tensor.numel()].reshape(tensor.shape)
  if is_new: array[:] = 0
  return array


def read_names(module: Any, checkpoint: Any) -> None:
  """Read a module's tensors without loading them. Remember the checkpoint's folder."""
  for name, tensor in vars(module).items():
    if name not in ("weight", "bias") or tensor is None: continue
    for source, rows in module.sources.items(): checkpoint.read(f"{source}.{name}", rows, *tensor.shape[1:])
  module.folder = checkpoint.path


class Linear(backend.Linear): load = read_names
class GateUp(Linear, backend.GateUp): pass
class Norm(backend.Norm): load = read_names


class Step:
  """The content of a step's words, by column. tables, last: views of the runner's tensors."""
  def __init__(self, runner: Runner, key: GraphKey):
    words = array_of(runner.graphs[key][0])
    T, S = key.num_tokens, key.num_rows
    columns, self.rest = np.split(words, [(backend.TOKENS.num_words + backend.LOGITS.num_words) * T])
    tokens, rows = np.split(columns.reshape(-1, T), [backend.TOKENS.num_words])
    self.tokens = dict(zip(backend.TOKENS.formats, tokens, strict=True))
    self.rows = {name: rows[i, :S].copy().view(form) for i, (name, form) in enumerate(backend.LOGITS.formats.items())}
    self.plan = key.plan or LogitsPlan(runner.model.config.vocab_size, False, 0, False)
    self.tables, self.last = array_of(runner.block_tables), array_of(runner.last_tokens)
    self.padding = runner.config.max_num_seqs   # the slot of padding
    self.tables[self.tokens["slot"], self.tokens["position"] // runner.config.block_size] = self.tokens["block"]
    self.ids = np.where(self.tokens["id"] == UNKNOWN, self.last[self.tokens["slot"]], self.tokens["id"])
    self.sequences = {}   # slot -> indices of its tokens
    for slot in {*self.tokens["slot"].tolist()} - {self.padding}:
      index = self.sequences[slot] = np.flatnonzero(self.tokens["slot"] == slot)
      assert (np.diff(self.tokens["position"][index]) == 1).all(), "a sequence's tokens must be consecutive"
      blocks = self.tables[slot, self.tokens["position"][index] // runner.config.block_size]
      assert (self.tokens["block"][index] == blocks).all() and blocks.all(), "a token's block is not in its table"
    assert (self.ids >= 0).all() and (self.ids < self.plan.vocab_size).all(), "a token id out of range"

  def adjustments(self) -> np.ndarray:
    """Return the rows of ADJUSTMENTS without padding."""
    words = self.rest[:ADJUSTMENTS.num_words * self.plan.num_adjustments].reshape(ADJUSTMENTS.num_words, -1)
    table = np.ascontiguousarray(words.T).view(ADJUSTMENTS.dtype)[:, 0]
    return table[table["row"] >= 0]

  def bitmasks(self) -> np.ndarray | None:
    """Return whether each token is allowed, (S, V), or None if all are."""
    if not self.plan.has_bitmask: return None
    start, S = ADJUSTMENTS.num_words * self.plan.num_adjustments, len(self.rows["token"])
    words = self.rest[start:start + S * -(-self.plan.vocab_size // 32)].reshape(S, -1)
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :self.plan.vocab_size].astype(bool)

  def targets(self) -> np.ndarray:
    """Return the tokens to score, (S,), UNKNOWN for the sampled one."""
    return self.rest[len(self.rest) - len(self.rows["token"]):]

  def write_last(self, sampled: np.ndarray) -> None:
    """Store the sampled tokens by slot. Two rows with one slot would race on a GPU: their token must not be read."""
    slots = self.rows["slot"]
    self.last[slots] = np.where((slots[:, None] == slots).sum(1) > 1, RACE, sampled)


class LlamaDevice:
  """Computes the LLaMA in a runner's folder. cache: its K and V of each layer, (blocks * block_size, KV, D)."""
  def __init__(self, runner: Runner):
    self.config, weights = load(runner.model.embed_tokens.folder)
    self.weights = {x if x.startswith(("model.", "lm_head.")) else f"model.{x}": array for x, array in weights.items()}
    shape, self.size = head_sizes(self.config), runner.config.block_size
    self.cache = [[array_of(x, np.float32).reshape(-1, *shape) for x in layer] for layer in runner.kv_caches]

  def attend(self, step: Step, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Write k and v, (T, KV, D), to the cache, and return the attention of q, (T, H, D), over it: (T, H * D)."""
    keys, values = self.cache[layer]
    out = np.zeros_like(q)
    for slot, index in step.sequences.items():
      positions = step.tokens["position"][index]
      length = int(positions[-1]) + 1
      at = (step.tables[slot, :-(-length // self.size), None] * self.size + np.arange(self.size)).ravel()[:length]
      keys[at[positions]], values[at[positions]] = k[index], v[index]
      assert keys[at].any((1, 2)).all(), "a position of the cache is read before it is written"
      group = q.shape[1] // k.shape[1]
      k_all, v_all = (np.repeat(x[at].swapaxes(0, 1), group, 0) for x in (keys, values))   # (H, L, D)
      scores = q[index].swapaxes(0, 1) @ k_all.swapaxes(1, 2) / np.sqrt(q.shape[2])       # (H, t, L)
      p = np.exp(np.where(positions[:, None] < np.arange(length), -np.inf, scores - scores.max(-1, keepdims=True)))
      out[index] = (p / p.sum(-1, keepdims=True) @ v_all).swapaxes(0, 1)
    return out.reshape(len(q), -1)

  def run(self, step: Step) -> list[np.ndarray]:
    """Return the sampled tokens, (S,), and the log probabilities of top_logprobs if the plan has them."""
    attend = functools.partial(self.attend, step)
    hidden = hidden_states(self.config, self.weights, step.ids, step.tokens["position"], attend)[step.rows["token"]]
    if isinstance(step.plan, HiddenStatesPlan): return [np.zeros(len(hidden), np.int32), hidden.astype(np.float32)]
    raw = head(self.weights, hidden)   # (S, V)
    allowed = step.bitmasks()
    logits = raw.copy() if allowed is None else np.where(allowed, raw, -np.inf)
    for row, token, bias, factor, penalty in step.adjustments().tolist():
      x = logits[row, token] + bias
      logits[row, token] = (x / factor if x > 0 else x * factor) - penalty
    sampled = np.array([self.sample(x, {name: column[i] for name, column in step.rows.items()})
                        for i, x in enumerate(logits)], np.int32)
    step.write_last(sampled)
    if not step.plan.has_logprobs: return [sampled]
    return [sampled, self.logprobs(raw, np.where(step.targets() == UNKNOWN, sampled, step.targets()), step.plan)]

  def sample(self, logits: np.ndarray, row: dict[str, Any]) -> int:
    """Sample a token: the best one, or with the noise that the device adds to the tokens that may be sampled."""
    temperature = float(row["temperature"])
    if temperature < 1e-5: return int(logits.argmax())
    mask = reference_sampling_mask(logits, temperature, int(row["top_k"]), float(row["top_p"]), float(row["min_p"]))
    noise = gumbel_noise(*[int(row[name]) for name in ("seed_low", "seed_high", "position")], len(logits))
    return int(np.where(mask, logits / temperature + noise, -np.inf).argmax())

  def logprobs(self, logits: np.ndarray, ids: np.ndarray, plan: LogitsPlan) -> np.ndarray:
    """Return what logits.top_logprobs returns."""
    x = log_softmax(logits)
    own = np.take_along_axis(x, ids[:, None], 1)
    columns = [own, 1 + (x > own).sum(1, keepdims=True)]
    if plan.has_all_logprobs: return np.concatenate([*columns, x], 1).astype(np.float32)
    best = np.argsort(-x, 1, "stable")[:, :NUM_BEST]
    pairs = np.stack([best, np.take_along_axis(x, best, 1)], 2).reshape(len(x), -1)
    return np.concatenate([*columns, pairs], 1).astype(np.float32)


class Graph:
  """A step's graph as PaddedGraphs.run calls it. The first call captures it."""
  cnt = property(lambda self: self.graph.cnt)

  def __init__(self, backend: "FakeBackend", runner: Runner, graph: Any, key: GraphKey):
    self.backend, self.runner, self.graph, self.key = backend, runner, graph, key

  def __call__(self) -> list[np.ndarray]:
    if not self.runner.config.enforce_eager: self.graph.cnt = 2
    return self.backend.device(self.runner).run(Step(self.runner, self.key))


class FakeMemory(drivers.DriverMemory):
  def max_blocks(self, num_bytes: int, block_bytes: int, min_blocks: int) -> int:
    return min(super().max_blocks(num_bytes, block_bytes, min_blocks), max(1024, min_blocks))


class FakeGraphs(kernel_cache.PaddedGraphs):
  def run(self, runner: Runner, graph: Any, key: GraphKey) -> Any:
    return super().run(runner, Graph(runner.backend, runner, graph, key), key)


class FakeBackend(FastBackend):
  """A backend whose steps run on a fake device; all else is the extension's. devices: a fake device for each runner,
  an object with `run`; by default its LLaMA."""
  Linear, GateUp, Norm = Linear, GateUp, Norm
  memory = FakeMemory()

  def kv_layout(self, model: Any, config: Any, dtype: Any) -> list[tuple[tuple[int, ...], Any]]:
    return backend.Backend.kv_layout(self, model, config, dtypes.float32)

  def __init__(self) -> None:
    self.graphs = FakeGraphs(kernel_cache.restore)
    self.devices: dict[Runner, Any] = {}

  def device(self, runner: Runner) -> Any:
    if runner not in self.devices: self.devices[runner] = LlamaDevice(runner)
    return self.devices[runner]

  def start_reading(self, tensor: Any) -> Any: return tensor.tolist


def realized_zeros(*shape: int) -> Tensor: return Tensor(np.zeros(shape, np.int32)).realize()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
  """Make LLM use a fake device unless a backend is given. Allocate the runner's tensors without a kernel."""
  monkeypatch.setattr("tinyvllm_extra.kernels.make_backend", FakeBackend)
  monkeypatch.setattr("tinyvllm.runner.zeros", realized_zeros)
