"""The kernel of the gated delta rule beside the recurrence of arXiv:2412.06464 in numpy, in float64."""
import functools

import numpy as np
import pytest
from helpers.kernels import on_device
from tinygrad import Tensor

from tinyvllm_extra.models.recurrent import POSITION, SLOT, delta_kernel

K, V, HEADS, KEYS, ROWS = 32, 16, 4, 2, 6   # sizes of a head's S, heads, heads of q and k, rows of states


def naive(states: np.ndarray, slot: int, x: np.ndarray, gates: np.ndarray, groups: int) -> np.ndarray:
  """Compute a token of a sequence, (HEADS, V), and change its states, (HEADS, K, V)."""
  qk, v = x[:2 * KEYS * K].reshape(2, KEYS, K), x[2 * KEYS * K:].reshape(HEADS, V)
  q, k = qk / np.sqrt(np.square(qk).sum(-1, keepdims=True) + 1e-6)
  outputs = []
  for h, (decay, beta) in enumerate(gates):
    key, S = h * groups // HEADS % KEYS, states[slot, h]
    S *= decay
    S += np.outer(k[key], (v[h] - k[key] @ S) * beta)
    outputs.append(q[key] @ S * K**-0.5)
  return np.array(outputs)


@pytest.mark.parametrize("groups", [2, 4])
def test_steps_of_several_sequences_equal_the_recurrence(groups):
  """Each step has chunks of different lengths, decodes and, at position 0, new sequences in slots with old states."""
  rng, used, expected = np.random.default_rng(0), dict.fromkeys(range(5), 0), np.zeros((ROWS, HEADS, K, V))
  states = on_device(rng.standard_normal((ROWS, 3 + HEADS * K * V)).astype(np.float32))   # the 3: a convolution's
  before = states.numpy()
  for lengths in ({0: 5, 3: 2, 1: 1}, {1: 1, 3: 7}, {0: 1, 1: 1, 2: 1, 3: 1, 4: 4}, {2: 8}):
    slots = [slot for slot, n in lengths.items() for _ in range(n)]
    positions = [used[slot] + i for slot, n in lengths.items() for i in range(n)]
    for slot, n in lengths.items(): used[slot] += n
    x = rng.standard_normal((8, 2 * KEYS * K + HEADS * V)).astype(np.float32)
    gates, tokens = rng.uniform(0.3, 1, (8, HEADS, 2)).astype(np.float32), np.zeros((4, 8), np.int32)
    tokens[SLOT], tokens[POSITION] = slots, positions
    units = 1 / np.sqrt(np.square(x[:, :2 * KEYS * K].reshape(8, 2, KEYS, K)).sum(-1) + 1e-6)   # (8, 2, KEYS)
    factors = units[:, :, [h * groups // HEADS % KEYS for h in range(HEADS)]]
    inputs = np.concatenate([gates.transpose(2, 0, 1), factors.transpose(1, 0, 2)]).astype(np.float32)
    out, states, *_ = Tensor.empty(8, HEADS, V).custom_kernel(
      states, on_device(x), on_device(inputs), on_device(tokens),
      fxn=functools.partial(delta_kernel, K=K, groups=groups))
    Tensor.realize(out, states)
    rows = zip(slots, x.astype(np.float64), gates, strict=True)
    correct = [naive(expected, *row, groups) for row in rows]
    np.testing.assert_allclose(out.numpy(), correct, atol=1e-5)
  np.testing.assert_array_equal(states.numpy()[5], before[5])             # no sequence has this row
  np.testing.assert_array_equal(states.numpy()[:, :3], before[:, :3])
