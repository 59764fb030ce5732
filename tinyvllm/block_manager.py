"""Owns the physical blocks of the KV cache: who holds each, and which are free. free + used == num_blocks - 1, as block
0 takes padding's writes and is nobody's."""
from collections import deque


class BlockManager:
  def __init__(self, num_blocks: int, block_size: int):
    self.num_blocks, self.block_size, self.num_tokens = num_blocks, block_size, (num_blocks - 1) * block_size
    self.free_blocks = deque(range(1, num_blocks))
    self.ref_counts = [0] * num_blocks

  @property
  def num_free(self) -> int: return len(self.free_blocks)
  @property
  def num_used(self) -> int: return self.num_blocks - 1 - self.num_free

  def missing(self, table: list[int], num_tokens: int) -> int: return -(-num_tokens // self.block_size) - len(table)

  def can_allocate(self, table: list[int], num_tokens: int) -> bool:
    return self.missing(table, num_tokens) <= self.num_free

  def allocate(self, table: list[int], num_tokens: int) -> None:
    """Grow `table` until it holds `num_tokens`. The caller has asked `can_allocate`."""
    for _ in range(self.missing(table, num_tokens)):
      table.append(block := self.free_blocks.popleft())
      self.ref_counts[block] = 1

  def free(self, table: list[int]) -> None:
    """Let go of a table's blocks, newest first, and empty it."""
    while table:
      self.ref_counts[block := table.pop()] -= 1
      if self.ref_counts[block] == 0: self.free_blocks.append(block)
