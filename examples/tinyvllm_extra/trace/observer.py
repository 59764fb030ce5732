"""Writes a trace: a header, then a line of JSON for each step of an engine. examples/docs/trace.md describes the lines.
The engine's thread only collects them; another one writes. Without a trace, no code of this module runs in a step."""
import collections, contextlib, io, json, os, pathlib, queue, threading, time, typing, weakref

from tinyvllm.config import InputError, JsonObject, logger
from tinyvllm.engine import Engine
from tinyvllm.request import Sequence
from tinyvllm.runner import Results, Step
from tinyvllm_extra.cache.snapshots import SnapshotScheduler


def open_trace(path: str) -> io.FileIO:
  """Return a file, which only its owner may read: it will hold the tokens of all requests. An earlier trace in it stays
  until `write_lines` starts, as the engine may fail to load."""
  try: return open(pathlib.Path(path).expanduser(), "ab", 0, opener=lambda name, flags: os.open(name, flags, 0o600))
  except OSError as error: raise InputError(f"trace={path!r} cannot be written: {error.strerror}") from error


def name_of(seq: Sequence) -> str: return f"{seq.request_id}#{seq.index}" if seq.index else seq.request_id
def milliseconds(start: float, end: float) -> float: return round(1000 * (end - start), 3)


# A sequence in a step: the positions that the step computes, the block table, which a sequence leaves unchanged when it
# ends, and the number of draft tokens
Scheduled = typing.NamedTuple("Scheduled", [("seq", Sequence), ("positions", range), ("table", list[int]),
                                            ("num_drafts", int)])


def tokens_of(scheduled: Scheduled, length: int) -> JsonObject:
  """Return the tokens of a sequence that a step computed and sampled. length: of the sequence before the results."""
  seq, positions, _, num_drafts = scheduled
  start, end, sampled = positions.start, positions.stop - num_drafts, seq.tokens[length:]
  return {"id": seq, "kind": "decode" if start >= seq.num_prompt and end == start + 1 else "prefill", "from": start,
          "to": end, "ids": seq.tokens[start:end], "drafts": num_drafts, "accepted": max(0, len(sampled) - 1),
          "sampled": sampled, "finished": seq.finish_reason}


def write_lines(file: io.FileIO, lines: queue.SimpleQueue[JsonObject | None]) -> None:
  """Write lines until the None. Each is written in one call, so that it is complete or absent. A Sequence in a line
  stands for its name. After an error, the file ends with its last line."""
  size = os.fstat(file.fileno()).st_size and file.truncate(0)   # a device has size 0
  for line in iter(lines.get, None):
    if not file.closed:
      data = f"{json.dumps(line, separators=(',', ':'), default=name_of)}\n".encode()
      try:
        if file.write(data) != len(data): raise OSError("no space is left")
        size += len(data)
      except OSError as error:
        logger.warning(f"trace: {file.name!r} ends before step {line.get('step', 0)}: {error}")
        with contextlib.suppress(OSError): file.truncate(size)
        file.close()
    if lines.empty(): time.sleep(0.05)   # an engine that wakes this thread in each step would be slower
  file.close()


def stop(lines: queue.SimpleQueue[JsonObject | None], thread: threading.Thread) -> None:
  lines.put(None)
  if thread is not threading.current_thread(): thread.join()   # it may collect the engine as garbage


class Tracer:
  """Wraps the methods of an engine that schedule, update and reset steps, and collects a line for each step.

  tables: block tables of the running sequences, as the lines so far describe them. cached: cached blocks. steps: those
  whose results are not read yet, each with its line so far, when it was scheduled, and its sequences. stop: a function
  that writes the last lines, and closes the file."""
  def __init__(self, engine: Engine, scheduler: SnapshotScheduler, file: io.FileIO):
    self.scheduler, self.blocks, self.size = scheduler, engine.blocks, engine.config.block_size
    self.lines = queue.SimpleQueue[JsonObject | None]()
    self.lines.put({
      "format": "tinyvllm trace", "version": 1, "model": str(engine.path), "options": repr(engine.config),
      "devices": engine.runner.model.devices.names, "num_blocks": self.blocks.num_blocks, "block_size": self.size})
    self.tables: dict[Sequence, list[int]] = {}
    self.cached = set[int]()
    self.steps = collections.deque[tuple[JsonObject, float, list[Scheduled]]]()
    self.num_steps, self.start, self.graphs = 0, time.perf_counter(), engine.runner.graphs
    self.next_step, self.update, self.reset = engine._next_step, engine._update, engine._reset
    vars(engine).update(_next_step=self.trace_step, _update=self.trace_update, _reset=self.trace_reset)
    thread = threading.Thread(target=write_lines, args=(file, self.lines), name="tinyvllm-trace", daemon=True)
    thread.start()
    self.stop = weakref.finalize(engine, stop, self.lines, thread)   # at the latest when the process ends

  def trace_step(self) -> Step | None:
    if len(self.cached) != len(self.blocks.cached_blocks):   # the engine has loaded a prefix cache
      self.cached = {*self.blocks.cached_blocks.values()}
    start = time.perf_counter()
    if step := self.next_step():
      line = self.describe(step, start, time.perf_counter())
      scheduled = [Scheduled(seq, x, seq.block_table, len(seq.draft_token_ids)) for seq, x in step.computed.items()]
      self.steps.append((line, time.perf_counter(), scheduled))
    return step

  def describe(self, step: Step, start: float, end: float) -> JsonObject:
    """Return the line of a step before its results. start, end: of its scheduling."""
    scheduler, states, key = self.scheduler, self.scheduler.states, step.key
    preempted = [seq for seq in self.tables if seq.slot is None and not seq.finish_reason]
    tables = self.table_changes(step.computed)
    evicted = [block for change in tables for block in change["new"] if block in self.cached]
    self.cached.difference_update(evicted)
    return {"step": self.num_steps + len(self.steps), "start_ms": milliseconds(self.start, start),
            "host_ms": milliseconds(start, end), "waiting": scheduler.waiting[:100],
            "num_waiting": len(scheduler.waiting), "running": [*scheduler.running], "preempted": preempted,
            "tables": tables, "evicted": evicted, "graph": {
              "tokens": key.num_tokens, "rows": key.num_rows, "sampler": key.sampler_mode.name.lower(),
              "processors": key.plan is not None, "is_new": key not in self.graphs},
            "states": states and states.metrics() | {
              "positions": [[seq, scheduler.positions[seq.slot or 0]] for seq in scheduler.running]}}

  def table_changes(self, computed: dict[Sequence, range]) -> list[JsonObject]:
    """Return the blocks that left and joined each block table since the last call. computed: positions of a step: the
    blocks before them, in the table of a sequence that starts, are from the prefix cache."""
    tables = {seq: seq.block_table for seq in self.scheduler.running}
    changes = []
    for seq in dict.fromkeys([*self.tables, *tables]):
      before, now = self.tables.get(seq, []), tables.get(seq, [])
      if now == before: continue
      num_kept = len(os.path.commonprefix([before, now]))   # compares any lists
      num_used = num_kept if before else computed.get(seq, range(0)).start // self.size
      changes.append({"id": seq, "freed": before[num_kept:], "shared": now[num_kept:num_used], "new": now[num_used:]})
    self.tables = {seq: [*table] for seq, table in tables.items() if table}
    return changes

  def trace_update(self, results: Results) -> None:
    line, end, scheduled = self.steps[0]
    lengths = [len(x.seq.tokens) for x in scheduled]
    start = time.perf_counter()
    self.update(results)
    line["host_ms"] = round(line["host_ms"] + milliseconds(start, time.perf_counter()), 3)
    line |= {"device_ms": milliseconds(end, start), "tokens": [*map(tokens_of, scheduled, lengths)]}
    self.finish()

  def finish(self) -> None:
    """Collect the line of the oldest step, with the blocks that its results cached, and the changes of block tables by
    its results, unless a later step was scheduled before."""
    line, _, scheduled = self.steps.popleft()
    line["cached"] = [[block, self.blocks.block_hashes[block].hex()[:16]] for x in scheduled
                      for block in x.table[x.positions.start // self.size:x.positions.stop // self.size]
                      if block not in self.cached and self.blocks.is_cached(block)]
    self.cached.update(block for block, _ in line["cached"])
    self.lines.put(line | {"tables_after": [] if self.steps else self.table_changes({})})
    self.num_steps += 1

  def trace_reset(self) -> None:
    self.reset()
    for line, *_ in [*self.steps]:
      line.update(tokens=[], device_ms=None, failed=True)
      self.finish()
