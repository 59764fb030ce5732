"""Prompt lookup: the drafter of speculative decoding without a draft model."""
import random

import pytest
from helpers.speculation import NGRAM

from tinyvllm import SamplingParams
from tinyvllm_extra.sampling.speculation import NGramDrafter, SpeculativeConfig


# Prompt lookup

def naive_lookup(ids, n, longest, shortest):
  """Return up to n tokens after the last earlier occurrence of the longest n-gram at the end of ids."""
  for size in range(min(longest, len(ids) - 1), shortest - 1, -1):
    for end in range(len(ids) - 1, size - 1, -1):
      if ids[end - size:end] == ids[-size:]: return ids[end:end + n]
  return []


@pytest.mark.parametrize("longest, shortest", [(4, 2), (3, 1), (1, 1), (2, 2), (8, 3)])
def test_ngram_drafter_equals_naive_lookup(longest, shortest):
  rng, num_hits, num_misses = random.Random(longest), 0, 0
  config = SpeculativeConfig(**NGRAM | {"prompt_lookup_max": longest, "prompt_lookup_min": shortest})
  for _ in range(150):
    drafter, letters, ids = NGramDrafter(config, SamplingParams()), rng.choice([1, 2, 3, 5, 12]), []
    for _ in range(rng.randrange(2, 12)):
      ids += [rng.randrange(letters) for _ in range(rng.randrange(1, 6))]   # several per call, as with accepted drafts
      n = rng.randrange(9)
      expected = naive_lookup(ids, n, longest, shortest)
      drafts = drafter.propose(list(ids), n)
      assert drafts[:len(expected)] == expected and len(drafts) <= n, (ids, n)
      # If fewer than n tokens follow, a repetition continues
      assert drafts == (expected * n)[:len(drafts)] and bool(drafts) == bool(expected), (ids, n)
      num_hits += bool(drafts)
      num_misses += not drafts
  assert num_hits > 100 and (num_misses > 100 or longest == 1), "both cases must occur"


class CountingList(list):
  """A list that counts the items that are read."""
  num_read = 0

  def __getitem__(self, i):
    out = super().__getitem__(i)
    self.num_read += len(out) if isinstance(i, slice) else 1
    return out

  def __iter__(self):
    self.num_read += len(self)
    return super().__iter__()


def test_ngram_drafter_reads_only_new_tokens():
  rng, ids, drafter = random.Random(0), CountingList(), NGramDrafter(SpeculativeConfig(**NGRAM), SamplingParams())
  for num_new in (8000, *[3] * 20):
    ids += [rng.randrange(20) for _ in range(num_new)]
    ids.num_read = 0
    drafter.propose(ids, 5)
    assert 0 < ids.num_read < 100 or num_new == 8000
