"""A scheduled batch as one int32 array of parts with named fields, which is all that the device is given; numpy only.
It is padded to one of few shapes, each of which is a graph."""
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .config import EngineConfig
from .request import EDIT, Sequence

# id: -1 where the host has not read it: the device's last one of the row. row: of the block tables, max_num_seqs for
# padding. block: of its position. entry: where the tables have that, seen flat. tile: not of this token, but of the
# n-th tile of up to TILE tokens that follow one another in a sequence: TILE * the first one + how many follow it, or -1
TOKEN: Any = np.dtype({"names": ["id", "position", "row", "entry", "block", "tile"], "formats": ["i4"] * 6})
TILE = 64
# SamplingParams' fields that the device draws by
DRAWN_BY = ["temperature", "top_k", "top_p", "min_p"]
# Of each row of logits: the token in the batch that it follows, and its position; the row whose last token is chosen
# here, max_num_seqs for none; the token whose log probability is wanted, -1 for the one that is chosen
# With TOKEN's they are 16 words, as GPUs load four words at once of what follows
LOGITS: Any = np.dtype({"names": ["token", "position", "last_row", "target", *DRAWN_BY, "seed"],
                        "formats": ["i4"] * 4 + ["f4"] * 4 + ["u8"]})


DRAFT_ROWS = 64   # of logits that a step may have where there are drafts


class Shape(NamedTuple):
  """Of a step's array, and so of its graph. One that is nowhere less than another can take the other's place."""
  tokens: int
  rows: int        # of logits
  sampler: int     # SamplingParams.sampler
  logprobs: bool
  edits: int
  masked: bool

  def cost(self) -> int:
    """Of time, roughly: to read the weights takes as long as 16 tokens, each thing beside greedy tokens half a step."""
    return (16 + self.tokens) * (2 + sum(map(bool, self[2:])))


class Step(NamedTuple):
  """What the device computes next, and what its results belong to."""
  shape: Shape
  array: np.ndarray                     # TOKEN and LOGITS, 16 words a token together; EDIT; masks
  # Of each row of logits: the sequence, the place of the token that it gives, and the token before, -1 if not read
  targets: list[tuple[Sequence, int, int]]
  computed: dict[Sequence, range]       # the places of the tokens whose K and V it writes


def bucket(n: int) -> int: return 1 << max(0, n - 1).bit_length()


def words(rows: list[tuple], kind: np.dtype, size: int, **nobody: int) -> np.ndarray:
  """Rows of named fields as int32, (fields, size), padded with those of nobody."""
  array = np.zeros(size, kind)
  for name, value in nobody.items(): array[name] = value
  array[:len(rows)] = rows
  return array.view(np.int32).reshape(size, kind.itemsize // 4).T.ravel()


def pack(batch: dict[Sequence, int], config: EngineConfig, max_blocks: int, vocab_size: int,
         fit: Callable[[Shape], Shape]) -> Step:
  """The next n tokens of each sequence, and the rows of logits that these want. max_blocks: in a row of the tables.
  fit: the shape that is to hold what is needed."""
  spare = config.max_num_seqs   # padding's row
  tokens: list[tuple] = []
  tiles = []
  rows = []
  targets = []
  computed = {seq: range(seq.num_computed, seq.num_computed + n) for seq, n in batch.items()}
  for seq, places in computed.items():
    inputs = [*seq.tokens[places.start:places.stop], *seq.drafts, -1]   # -1: the host has not read the last
    known = seq.tokens[places.start + 1:places.stop + 1] + [-1] * len(places)
    tiles += [(len(tokens) + i) * TILE + min(TILE, len(places) - i) - 1 for i in range(0, len(places), TILE)]
    wanted = places.start if seq.scores_prompt and places.start < seq.num_prompt else seq.length - 1   # logits
    for position, token, target in zip(places, inputs, known, strict=False):
      page = position // config.block_size
      block = seq.block_table[page]
      tokens.append((token, position, seq.row, seq.row * max_blocks + page, block))   # type: ignore[operator]
      if position < wanted: continue
      targets.append((seq, position + 1, token))
      rows.append((len(tokens) - 1, position, seq.row if target < 0 else spare, target,
                   *[getattr(seq.params, name) for name in DRAWN_BY], seq.seed % 2**64))
  chosen = [(row, seq, place) for row, (seq, place, _) in enumerate(targets) if place >= seq.length]   # of new tokens
  edits = [(row, *edit) for row, seq, place in chosen for edit in seq.edits(place)]
  masks = {row: mask for row, seq, _ in chosen for mask in [seq.mask(vocab_size)] if mask is not None}
  sampler = max([seq.params.sampler for seq, *_ in targets], default=0)
  scored = any(seq.params.logprobs is not None or seq.scores_prompt for seq in batch)
  shape = fit(Shape(len(tokens), len(rows), sampler, scored, len(edits), bool(masks)))
  tokens = [(*token, tile) for token, tile in itertools.zip_longest(tokens, tiles, fillvalue=-1)]   # type: ignore[misc]
  parts = [words(tokens, TOKEN, shape.tokens, row=spare, entry=spare * max_blocks, tile=-1),
           words(rows, LOGITS, shape.tokens, last_row=spare), words(edits, EDIT, shape.edits, row=-1)]
  everything = np.full(-(-vocab_size // 32), -1, np.int32)
  if shape.masked: parts += [masks.get(row, everything) for row in range(shape.rows)]
  return Step(shape, np.concatenate(parts), targets, computed)
