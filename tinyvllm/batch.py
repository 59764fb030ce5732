"""A scheduled batch as one array of int32, made of parts with named fields; numpy only. It is padded to one of few
shapes, each of which is a graph."""
import itertools
from typing import Any, NamedTuple

import numpy as np

from .config import EngineConfig
from .request import EDIT, Sequence
from .scheduler import Written

# id: -1 where the host has not read it: the device's last one of the row. slot: block * block_size + offset. row: of the
# block tables, max_num_seqs for padding
TOKEN = np.dtype([("id", "i4"), ("position", "i4"), ("slot", "i4"), ("row", "i4")])
# Of each row of logits: the token in the batch that it follows, that one's position; the row whose last token is chosen
# here, max_num_seqs for none; the token whose log probability is wanted, -1 for the one that is chosen
LOGITS = np.dtype([("token", "i4"), ("position", "i4"), ("row", "i4"), ("target", "i4"), ("top_k", "i4"),
                   ("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("seed_low", "u4"), ("seed_high", "u4")])
GREEDY, DRAWN, FILTERED = range(3)   # samplers: the best token, one drawn of all, one drawn of the best


class Shape(NamedTuple):
  """Of a step's array, and so of its graph."""
  tokens: int
  rows: int         # of logits
  sampler: int
  logprobs: bool
  edits: int
  mask_words: int   # of 32 bits in the mask of a row; 0: no masks

  def slices(self) -> list[slice]:
    """Where the parts lie: tokens, rows of logits, edits, masks. Each begins at 64 bytes, as a CPU's vector loads want."""
    words = [dtype.itemsize // 4 for dtype in (TOKEN, LOGITS, EDIT)]
    sizes = [self.tokens * words[0], self.rows * words[1], self.edits * words[2], self.rows * self.mask_words]
    starts = itertools.accumulate((-(-size // 16) * 16 for size in sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


class Step(NamedTuple):
  """What the device computes next, and what its results belong to."""
  shape: Shape
  array: np.ndarray
  targets: list[tuple[Sequence, int]]   # of each row of logits: the sequence, and the place of the token that it gives
  samples: dict[Sequence, int]          # the row that each one's next token comes from
  written: list[Written]


def bucket(n: int) -> int: return 1 << max(0, n - 1).bit_length()


def sampler_of(params: Any) -> int:
  if params.temperature < 1e-5: return GREEDY
  return FILTERED if params.top_k > 0 or params.top_p < 1 else DRAWN


def _token_rows(seq: Sequence, n: int, block_size: int) -> list[tuple]:
  """The next n tokens of a sequence, as TOKEN has them."""
  def token(i: int) -> int: return seq.tokens[i] if i < len(seq.tokens) else -1
  def slot(i: int) -> int: return seq.block_table[i // block_size] * block_size + i % block_size
  return [(token(i), i, slot(i), seq.row) for i in range(seq.num_computed, seq.num_computed + n)]


def _logits_row(seq: Sequence, place: int, token: int, spare: int) -> tuple:
  """The row of logits that gives the token in this place and follows that one of the batch, as LOGITS has it."""
  params, seed = seq.params, seq.seed % 2**64
  chosen = place == seq.length   # else it is there already
  return (token, place - 1, seq.row if chosen else spare, -1 if chosen else seq.tokens[place], params.top_k,
          params.temperature, params.top_p, params.min_p, seed % 2**32, seed >> 32)


def pack(batch: dict[Sequence, int], config: EngineConfig, vocab_size: int) -> Step:
  """The next n tokens of each sequence, and the rows of logits that these want."""
  spare = config.max_num_seqs
  tokens, rows = list[tuple](), list[tuple]()
  targets, samples = list[tuple[Sequence, int]](), dict[Sequence, int]()
  for seq, n in batch.items():
    tokens += _token_rows(seq, n, config.block_size)
    for behind in reversed(range(seq.num_logits(n))):
      targets.append((seq, seq.num_computed + n - behind))
      rows.append(_logits_row(*targets[-1], len(tokens) - 1 - behind, spare))
    if n == seq.remaining(): samples[seq] = len(rows) - 1
  edits, masks = list[np.ndarray](), dict[int, np.ndarray]()
  for seq, row in samples.items():
    if seq.params.edited:
      edits.append(seq.edits())
      edits[-1]["row"] = row
    mask = seq.mask(vocab_size)
    if mask is not None: masks[row] = mask
  num_edits = sum(map(len, edits))
  most = bucket(len(tokens))
  shape = Shape(
    tokens=most, rows=min(most, bucket(spare)) if len(rows) <= bucket(spare) else most,
    sampler=max((sampler_of(seq.params) for seq in samples), default=GREEDY),
    logprobs=any(seq.params.logprobs is not None or seq.scores_prompt for seq in batch),
    edits=8 ** -(-num_edits.bit_length() // 3) if num_edits else 0,   # few sizes, few graphs
    mask_words=-(-vocab_size // 32) if masks else 0)
  array = np.zeros(shape.slices()[-1].stop, np.int32)
  parts = [array[part] for part in shape.slices()]
  _fill(parts[0].view(TOKEN), tokens, spare)
  _fill(parts[1].view(LOGITS), rows, spare)
  _fill(parts[2].view(EDIT), np.concatenate([np.zeros(0, EDIT), *edits]), -1)
  if masks:
    bits = parts[3].reshape(-1, shape.mask_words)
    bits[:] = -1
    bits[[*masks]] = [*masks.values()]
  written = [Written(seq, seq.block_table, seq.num_computed, seq.num_computed + n) for seq, n in batch.items()]
  return Step(shape, array, targets, samples, written)


def _fill(part: np.ndarray, rows: Any, nobody: int) -> None:
  part["row"] = nobody   # padding's
  part[:len(rows)] = rows
