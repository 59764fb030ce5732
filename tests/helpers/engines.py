"""Engines: their options, prompts and parameters as most tests need them, checks of invariants, and runs to the end."""
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tinyvllm import LLM, RequestOutput, SamplingParams

from .reference import reference_greedy, reference_logits

BS, PROMPT_IDS = 4, [5, 17, 99, 250, 31]   # block size; a prompt for tests with one
# Options of the engine in most tests: graphs of 1, 2, 4, 8 and 16 tokens. Engines of equal shapes share kernels
ENGINE = {"dtype": "float32", "max_model_len": 128, "block_size": BS, "max_num_seqs": 6, "max_num_batched_tokens": 16}


def greedy(num_tokens: int, /, **fields: Any) -> SamplingParams:
  """Return parameters for exactly `num_tokens` greedy tokens."""
  return SamplingParams(**{"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, **fields})


def sampled(num_tokens: int, /, seed: int = 0, **fields: Any) -> SamplingParams:
  """Return parameters for exactly `num_tokens` sampled tokens."""
  return greedy(num_tokens, **{"temperature": 0.9, "seed": seed, **fields})


def tokens(ids: Iterable[int]) -> dict[str, list[int]]: return {"prompt_token_ids": list(ids)}
def ids_of(output: RequestOutput) -> list[int]: return output.outputs[0].token_ids


def ids_of_batch(engine: Any, prompts: Iterable[list[int]], params: Any) -> list[list[int]]:
  """Return the ids of the outputs of prompts of ids, in one batch."""
  return [*map(ids_of, engine.generate([tokens(ids) for ids in prompts], params, use_tqdm=False))]


def prompt(length: int, *salt: Any) -> list[int]:
  """Return random ids of words, different for each salt; none is 0."""
  rng = random.Random(str(salt or (0,)))
  return [rng.randrange(259, 320) for _ in range(length)]


def token_rows(positions: Any, slots: Any, blocks: Any) -> np.ndarray:
  """Return the tokens of a step, (columns of TOKENS, T) int32, from positions, slots and physical blocks, (T,) each."""
  from tinyvllm.backend import TOKENS
  positions, slots, blocks = (np.asarray(x) for x in (positions, slots, blocks))
  fields = {"id": 0 * positions, "position": positions, "slot": slots, "block": blocks}
  return np.stack([fields[name] for name in TOKENS.formats]).astype(np.int32)   # (columns, T)


class LogitsRecorder:
  """Replace the model of an engine that has captured no graphs, and record the logits that each step samples from."""
  def __init__(self, engine: Any):
    from tinygrad import Tensor
    assert not engine.runner.graphs
    self.engine, self.model, V = engine, engine.runner.model, engine.model_config.vocab_size
    rows = range(1, 2 * engine.config.max_num_seqs)   # a power of two
    self.logits = {n: Tensor.zeros(n, V).contiguous().realize() for n in rows}   # by a graph's number of rows
    self.devices, self.vocab_size = self.model.devices, self.model.vocab_size
    engine.runner.model = self
    engine.runner.is_async = False   # the next step would overwrite the logits

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    logits = self.model(*args, **kwargs)
    # The sampler must read the assigned tensor, which makes it part of the graph: with several devices, tinygrad cannot
    # schedule the assignment alone
    return self.logits[logits.shape[0]].assign(logits)

  def generate(self, ids: list[int], n: int, **fields: Any) -> tuple[list[int], np.ndarray]:
    """Return the next n greedy ids of a single request, and their logits, (n, V). fields: of its prompt."""
    engine, out, params = self.engine, [], SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
    engine.add_request("logits", {"prompt_token_ids": ids, **fields}, params)
    while engine.has_unfinished_requests():
      for buffer in self.logits.values(): buffer.assign(buffer.full_like(np.nan)).realize()
      if outputs := engine.step(): out += [x[0] for b in self.logits.values() if np.isfinite((x := b.numpy())[0]).all()]
    assert len(out) == n
    return outputs[-1].outputs[0].token_ids, np.stack(out)


def check_logits(model: Any, folder: Any, ids: list[int], n: int = 8, atol: float = 1e-4, **options: Any) -> Any:
  """Check that n greedy ids and their logits equal the reference with the weights in `folder`. Return the engine, which
  does not quantize activations."""
  engine = LLM(model, **{**ENGINE, "activation_quantization": "none", **options})
  out, logits = LogitsRecorder(engine).generate(ids, n)
  assert out == reference_greedy(folder, ids, n)
  np.testing.assert_allclose(logits, reference_logits(folder, [*ids, *out])[len(ids) - 1:-1], atol=atol)
  return engine


def assert_same_outputs(outputs: list[Any], expected: list[Any]) -> None:
  """Check that two lists of RequestOutputs have equal prompts, ids, text and finish reasons."""
  def fields(o: Any) -> tuple:
    c = o.outputs[0]
    return o.prompt, o.prompt_token_ids, c.token_ids, c.text, c.finish_reason, c.stop_reason, o.finished
  assert len(outputs) == len(expected), f"{len(outputs)} outputs, {len(expected)} expected"
  for i, (a, b) in enumerate(zip(outputs, expected, strict=True)): assert fields(a) == fields(b), f"output {i}"


def check_pool(blocks: Any, tables: list[list[int]]) -> None:
  """Check the invariants of a BlockManager and all block tables."""
  free, ref_counts = [*blocks.free_blocks, *blocks.evictable], Counter(b for table in tables for b in table)
  assert (blocks.num_free(), blocks.num_used()) == (len(free), len(ref_counts))
  assert sorted([*free, *ref_counts]) == [*range(1, blocks.num_blocks)], "a block must be free once or in block tables"
  for table in tables: assert len(set(table)) == len(table), "a block appears twice in a block table"
  cached = {*blocks.cached_blocks.values()}
  assert {*+blocks.shared} <= cached, "a block in two block tables must be full and cached"
  assert all(blocks.block_hashes[b] == key and b for key, b in blocks.cached_blocks.items()), "wrong hash"
  assert dict(+blocks.shared) == {b: n - 1 for b, n in ref_counts.items() if n > 1}
  assert {*blocks.evictable} == cached - {*ref_counts}, "evictable blocks must be the free cached blocks"


def check_scheduler(scheduler: Any, blocks: Any) -> None:
  """Check the invariants of a scheduler between steps."""
  seqs = [*scheduler.running, *scheduler.waiting]
  assert len(set(seqs)) == len(seqs), "a sequence is queued twice"
  check_pool(blocks, [seq.block_table for seq in seqs])
  for seq in seqs:
    length = seq.length + len(seq.draft_token_ids)
    assert 0 <= seq.num_computed < length or seq.reached_max_len, f"{seq.num_computed} of {length} tokens computed"
    assert not seq.draft_token_ids or seq.num_in_flight == 1, "no step verifies the draft tokens"
    assert len(seq.block_table) * blocks.block_size >= seq.num_computed, "a computed token has no block"
    assert seq.finish_reason is None, "a finished sequence is in the scheduler"
  for seq in scheduler.waiting:
    assert not seq.block_table and seq.slot is None and not seq.draft_token_ids
    assert seq.num_computed == seq.num_in_flight == 0
  slots = [seq.slot for seq in scheduler.running]
  assert len({*slots}) == len(slots), "two sequences in a slot"
  assert {*slots} <= {*range(scheduler.config.max_num_seqs)}, "a running sequence has no valid slot"
  order = [seq.order for seq in scheduler.waiting]
  assert order == sorted(order), "the queue is not sorted"


def check_states(states: Any, num_snapshots: int) -> None:
  """Check that each row for snapshots of recurrent states is free or in use, once."""
  rows, first = [*states.free_rows, *states.snapshots.values()], states.padding + 1
  assert sorted(rows) == [*range(first, first + num_snapshots)], "a row is lost or has two uses"


def check_invariants(engine: Any) -> dict[str, Any]:
  """Check blocks, block tables, counters and slots of an engine between two steps, and return its metrics. An idle
  engine uses no blocks."""
  blocks, metrics = engine.blocks, engine.get_metrics()
  check_scheduler(engine.scheduler, blocks)
  if not engine.has_unfinished_requests(): assert blocks.num_used() == 0, "an idle engine uses blocks"
  counts = blocks.num_free(), blocks.num_used(), len(blocks.evictable), len(+blocks.shared)
  assert tuple(metrics[f"blocks_{name}"] for name in ("free", "used", "cached", "shared")) == counts
  assert 0 <= metrics["prefix_cache_hits"] <= metrics["prefix_cache_queries"]
  return metrics


def count_bytecodes(call: Callable[[], Any]) -> int:
  """Return the number of Python bytecodes that a call runs. Excludes C code and, in Python 3.13, functions called for
  the first time."""
  count = 0

  def trace(frame: Any, event: str, argument: Any) -> Any:
    nonlocal count
    frame.f_trace_opcodes = True
    count += event == "opcode"
    return trace
  sys._getframe().f_trace_opcodes = True   # Python 3.12 needs it set first
  sys.settrace(trace)
  try: call()
  finally: sys.settrace(None)
  assert count, "tracing must count bytecodes"
  return count


def set_overlap(monkeypatch: Any, runner: Any, overlaps: str) -> None:
  """Set when a step's results are read: "overlapped" after the next step is built, "early" after it is launched, as on
  CUDA, "" before it is built. On a CPU "early" copies results at once, before the next step overwrites them."""
  def start_reading(tensor):
    values = tensor.tolist()
    return lambda: values
  monkeypatch.setattr(runner, "is_async", bool(overlaps))
  monkeypatch.setattr(runner.backend, "reads_early", overlaps == "early")
  if overlaps == "early": monkeypatch.setattr(runner.backend, "start_reading", start_reading)


@contextmanager
def assert_all_blocks_freed(engine: Any) -> Iterator[dict[str, Any]]:
  """Check that the engine is idle, with all blocks free, before and after. Yields the metrics before."""
  before = check_invariants(engine)
  assert not engine.has_unfinished_requests(), "requests of another test remain"
  try: yield before
  finally:
    unfinished = list(engine.requests)
    for name in unfinished: engine.abort_request(name)   # so that later tests do not fail, too
  check_invariants(engine)
  assert not unfinished, "a request did not end"


def run_watched(engine: Any, limit: int = 4000, watch: Callable = lambda metrics: None) -> tuple[dict, dict]:
  """Step until all requests finish, and check the invariants and metrics after each step. Return each request's last
  output, in order of completion, and the step that finished it."""
  last, finish_steps = {}, {}
  for step in range(limit):
    if not engine.has_unfinished_requests(): return {i: last[i] for i in finish_steps} | last, finish_steps
    for output in engine.step():
      last[output.request_id] = output
      if output.finished: finish_steps[output.request_id] = step
    watch(check_invariants(engine))
  raise AssertionError(f"not finished after {limit} steps")


def run_to_end(engine: Any, limit: int = 4000) -> dict[str, Any]: return run_watched(engine, limit)[0]
