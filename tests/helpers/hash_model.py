"""A fake model that hashes a step's inputs and the content of its blocks into the next tokens, for tests of speculative
decoding: one wrong token, position or block table changes the output, and its texts are known without an engine."""
from typing import Any

import numpy as np

from .fake_device import Step

MASK = 2**64 - 1


def mix(x):
  """splitmix64's finalizer."""
  x &= MASK
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9 & MASK
  x = (x ^ x >> 27) * 0x94d049bb133111eb & MASK
  return x ^ x >> 31


WEIGHTS = [mix(i + 1) | 1 for i in range(1024)]   # by position in the sequence
WEIGHTS_ARRAY = np.array(WEIGHTS, np.uint64)


class HashModel:
  """A fake model over the tokens of `alphabet`. Its state is a weighted sum of a value per position, like attention."""
  def __init__(self, alphabet): self.alphabet = alphabet

  def fold(self, state, token, position):
    """Return a token's cached value, and the state after it."""
    value = mix(state ^ (token + 1) * 0x9e3779b97f4a7c15)
    return value, state + value * WEIGHTS[position] & MASK

  def choose(self, state, seed, salt=0, banned=(), allowed_ids=None):
    pool = allowed_ids or self.alphabet
    pool = [token for token in pool if token not in banned] or pool
    return pool[mix(state ^ mix(seed) ^ mix(salt + 7)) % len(pool)]

  def score(self, state, token): return -(mix(state ^ token * 0x632be59bd9b4e019) % 4096) / 64

  def state_and_scores(self, ids):
    """Return the state after a sequence, and the score of each token; None for the first."""
    state, scores = 0, [None]
    for position, token in enumerate(ids):
      if position: scores.append(self.score(state, token))
      _, state = self.fold(state, token, position)
    return state, scores

  def text(self, ids, params, seed, n, stop_ids=()):
    """Return the next n tokens and their scores. An end token does not end them."""
    (state, _), out, scores = self.state_and_scores(ids), [], []
    for _ in range(n):
      banned = stop_ids if len(out) < params.min_tokens else ()
      pool = params.allowed_token_ids
      if pool and {*pool} <= {*banned}: banned = ()
      bias = sum(token * int(16 * x) for token, x in (params.logit_bias or {}).items() if token not in banned)
      salt = bias + sum(int(16 * params.presence_penalty) * token for token in {*out})
      out.append(self.choose(state, seed if params.temperature else 0, salt, banned, pool and sorted(pool)))
      scores.append(self.score(state, out[-1]))
      _, state = self.fold(state, out[-1], len(ids) + len(out) - 1)
    return out, scores


class HalfRightModel(HashModel):
  """A draft model whose tokens often equal the target's."""
  def choose(self, state, *args):
    token = super().choose(state, *args)
    return token if mix(state + 1) % 3 else self.alphabet[(self.alphabet.index(token) + 1) % len(self.alphabet)]


class HashDevice:
  """Computes a runner's steps with a HashModel. Writes to a shared or cached block, or of more tokens than the budget,
  are errors."""
  def __init__(self, engine: Any, runner: Any, model: HashModel):
    self.engine, self.model = engine, model
    self.cache = np.zeros((runner.num_blocks, engine.config.block_size), np.uint64)
    engine.backend.devices[runner] = self

  def write(self, step: Step) -> dict[int, int]:
    """Fill the cache, and return the state after each token, by its index."""
    states: dict[int, int] = {}
    size = self.cache.shape[1]
    readable = {*+self.engine.blocks.shared, *self.engine.blocks.cached_blocks.values()}
    for slot, index in step.sequences.items():
      start = int(step.tokens["position"][index[0]])
      before = self.cache[step.tables[slot, :start // size + 1]].ravel()[:start]
      state = int((before * WEIGHTS_ARRAY[:start]).sum())
      for i in index.tolist():
        position, block = int(step.tokens["position"][i]), int(step.tokens["block"][i])
        assert block not in readable, "a write to a shared or cached block"
        self.cache[block, position % size], state = self.model.fold(state, int(step.ids[i]), position)
        states[i] = state
    assert len(states) <= self.engine.config.max_num_batched_tokens, "more tokens than the budget"
    return states

  def run(self, step: Step) -> list[np.ndarray]:
    states, adjustments, masks = self.write(step), step.adjustments(), step.bitmasks()
    sampled = np.zeros(len(step.rows["token"]), np.int32)
    scores = np.zeros((len(sampled), 4))
    for i, token in enumerate(step.rows["token"].tolist()):
      if token not in states: continue   # padding
      row = {name: column[i] for name, column in step.rows.items()}
      assert row["slot"] == step.padding or row["position"] == step.tokens["position"][token]
      own = adjustments[adjustments["row"] == i]
      is_banned = own["bias"] == -np.inf
      numbers = 16 * np.where(is_banned, 0, own["bias"]) + 16 * own["penalty"]
      salt = sum(t * int(x) for t, x in zip(own["token"].tolist(), numbers.tolist(), strict=True))
      allowed_ids = None if masks is None or masks[i].all() else np.flatnonzero(masks[i]).tolist()
      seed = int(row["seed_high"]) << 32 | int(row["seed_low"]) if row["temperature"] > 0 else 0
      sampled[i] = self.model.choose(states[token], seed, salt, {*own["token"][is_banned].tolist()}, allowed_ids)
      target = int(step.targets()[i]) if step.plan.has_logprobs else -1
      scored = int(sampled[i]) if target < 0 else target
      scores[i] = self.model.score(states[token], scored), 1.0 + scored, 5, self.model.score(states[token], 5)
    step.write_last(sampled)
    return [sampled, scores] if step.plan.has_logprobs else [sampled]
