"""Snapshots of recurrent states, where sequences with a cached prefix continue. A snapshot belongs to the block that
ends there, and is taken only where a step ends at a multiple of block_size: before a prompt's last block, about every
INTERVAL tokens, and at the last such place of an answer."""
import math, weakref
from collections.abc import Callable

from tinyvllm.config import EngineConfig, check
from tinyvllm.engine import LoadedModel
from tinyvllm.request import Sequence
from tinyvllm.runner import Runner
from tinyvllm.scheduler import BlockManager, Scheduler
from tinyvllm_extra.models.recurrent import StatePool, state_shapes
from tinyvllm_extra.sampling import speculation

INTERVAL = 1024   # tokens between snapshots in a long prompt or answer
SHARE = 1 / 8     # part of the memory for the KV cache that snapshots may use
MAX_SNAPSHOTS = 16   # per slot


class SnapshotScheduler(Scheduler):
  """A Scheduler that takes and restores snapshots if the model has recurrent states."""
  states: StatePool | None = None   # set after the model's start

  def __init__(self, config: EngineConfig, blocks: BlockManager):
    super().__init__(config, blocks)
    self.match_prefix = self.match_snapshot
    self.interval = max(1, INTERVAL // blocks.block_size) * blocks.block_size
    self.ends: list[tuple[Sequence, int, int]] = []      # sequence, slot and position at the end of the last step
    self.taken: list[bytes] = []                         # snapshots of a step that may still be in flight
    self.positions: dict[int, int] = {}                  # each slot's state is after this many tokens
    self.backups: dict[int, int] = {}                    # position of each slot's backup
    self.newest = weakref.WeakKeyDictionary[Sequence, bytes]()   # each answer's last snapshot, until the next one

  def schedule(self, budget: int = 0) -> dict[Sequence, int]:
    if self.states: self.refresh(self.states)
    return super().schedule(budget)

  def refresh(self, states: StatePool) -> None:
    """Take the snapshots at the end of the last step, whose inputs are known by now, and return to the state before
    drafts if one was rejected."""
    self.taken = []
    slots: dict[int, int] = {}   # by row: the snapshot that replaces another of this step gets the row
    for seq, slot, position in self.ends:
      key = self.blocks.block_hash(seq, position // self.blocks.block_size - 1)
      is_answer = position > seq.num_prompt and position % self.interval != 0
      if is_answer and seq in self.newest: states.drop(self.newest.pop(seq))
      if key in states.snapshots or (row := states.take_row()) is None: continue
      states.snapshots[key] = row
      slots[row] = slot
      self.taken.append(key)
      if is_answer: self.newest[seq] = key
    self.ends = []
    states.copy([(slot, row) for row, slot in slots.items()])
    for seq in self.running:
      if seq.slot is None or seq.num_computed == self.positions[seq.slot]: continue
      states.copy([(states.backup(seq.slot), seq.slot)])
      seq.num_computed = self.positions[seq.slot] = self.backups[seq.slot]

  def _schedule_tokens(self, batch: dict[Sequence, int], seq: Sequence, num_tokens: int) -> int:
    if self.states and num_tokens > 1:   # end where a snapshot is due
      num_tokens = min([num_tokens, *[end - seq.num_computed for end in self.due(seq, len(seq.tokens))]])
    return super()._schedule_tokens(batch, seq, num_tokens)

  def due(self, seq: Sequence, length: int) -> list[int]:
    """Return the positions, after the next token, where a snapshot of the first `length` tokens is due."""
    size = self.blocks.block_size
    ends = (length - 1) // size * size, (seq.num_computed // self.interval + 1) * self.interval
    return [end for end in ends if seq.num_computed < end]

  def match_snapshot(self, seq: Sequence) -> None:
    """Like BlockManager.match_prefix, up to the last block with a snapshot if there are states."""
    self.blocks.match_prefix(seq)
    if not self.states: return
    hits = [i for i in range(len(seq.block_table)) if self.blocks.block_hash(seq, i) in self.states.snapshots]
    count = hits[-1] + 1 if hits else 0
    self.blocks.free(seq, count)
    seq.num_computed = count * self.blocks.block_size

  def start(self, seq: Sequence, free_slots: set[int]) -> bool:
    if not super().start(seq, free_slots): return False
    if self.states and seq.slot is not None:
      self.positions[seq.slot] = seq.num_computed
      if seq.num_computed:
        key = self.blocks.block_hash(seq, seq.num_computed // self.blocks.block_size - 1)
        self.states.snapshots.move_to_end(key)
        self.states.num_hits += 1
        self.states.copy([(self.states.snapshots[key], seq.slot)])
    return True

  def start_step(self, batch: dict[Sequence, int], num_behind: int = 0) -> None:
    if self.states: self.move(self.states, {seq: seq.slot for seq in batch if seq.slot is not None}, batch)
    super().start_step(batch, num_behind)

  def move(self, states: StatePool, slots: dict[Sequence, int], batch: dict[Sequence, int]) -> None:
    """Save the states of sequences with drafts, and note where the states will be after the step."""
    drafting = [slot for seq, slot in slots.items() if seq.draft_token_ids]
    states.copy([(slot, states.backup(slot)) for slot in drafting])
    self.backups |= {slot: self.positions[slot] for slot in drafting}
    for seq, slot in slots.items():
      end = self.positions[slot] = seq.num_computed + batch[seq]
      is_end = end % self.blocks.block_size == 0 and (end > seq.num_prompt or end in self.due(seq, seq.num_prompt))
      if is_end and slot not in drafting and self.config.enable_prefix_caching: self.ends.append((seq, slot, end))

  def reset(self, unfinished: list[Sequence]) -> None:
    super().reset(unfinished)
    self.ends = []
    if self.states:   # the failed step may not have computed them
      for key in self.taken: self.states.drop(key)


def open_proposer(target: LoadedModel, new_runner: Callable[[int], Runner], num_bytes: int) -> tuple:
  """Like speculation.open_proposer, for a model that may have recurrent states: they take part of the memory."""
  shapes, has_drafts = state_shapes(target.model_config), vars(target.config)["speculative_config"] is not None
  sizes = [4 * math.prod(shape) for shape in shapes if shape]   # bytes of a row
  if not sizes: return speculation.open_proposer(target, new_runner, num_bytes)
  slots, row_bytes = target.config.max_num_seqs, sum(sizes)
  fewest = (slots + 1) * (1 + has_drafts)
  room = min(num_bytes, target.backend.memory.largest_tensor() // max(sizes) * row_bytes)
  num_rows = min(fewest + MAX_SNAPSHOTS * slots, fewest + int(num_bytes * SHARE) // row_bytes, room // row_bytes)
  check(fewest * row_bytes < room, f"max_num_seqs={slots} needs {fewest * row_bytes / 2**30:.2f} GiB of recurrent "
        f"states, but there is room for {room / 2**30:.2f} GiB: lower max_num_seqs or raise gpu_memory_utilization")
  proposer, runners = speculation.open_proposer(target, new_runner, num_bytes - num_rows * row_bytes)
  vars(target)["states"] = StatePool(runners[0], shapes, num_rows, has_drafts)
  return proposer, runners
