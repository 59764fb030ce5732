"""Attention on tensor cores against numpy: on CUDA, or in its place in tinygrad's interpreter, DEV=PYTHON::sm_89, for
which lanes exchange numbers through shared memory. Elsewhere only whether it is chosen."""
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from reference import in_8_bits, rope_frequencies, token_rows
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import Ops

from tinyvllm.runner import TILE
from tinyvllm_extra.kernels import tensor_cores
from tinyvllm_extra.kernels.tensor_cores import BS

SLOW = Device.DEFAULT == "PYTHON"
on_tensor_cores = pytest.mark.skipif("sm_" not in str(Device.default.renderer.target), reason="this device has none")
# Python 3.11's interpreter has no vectors of float16, and makes 0 of small ones
stored_in = pytest.mark.parametrize("kind", ["auto", *[pytest.param(kind, marks=pytest.mark.skipif(
  SLOW and sys.version_info < (3, 12), reason="needs small halves")) for kind in ("int8", "fp8")]])
NEAR = {"auto": 2e-3, "int8": 4e-3, "fp8": 4e-3}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  """tinygrad's interpreter knows no CUDA: a lane finds the other one's number in shared memory, and none leaves."""
  if not SLOW: return
  slots = iter(range(500, 10**6))

  def exchanged(x: UOp, bit: int) -> UOp:
    warp, = {u for u in x.toposort() if u.op is Ops.SPECIAL and u.arg == "lidx1"} or [UOp.const(0)]
    count = warp.src[0].arg if warp.op is Ops.SPECIAL else 1
    lane = UOp.special(32, "lidx0")
    shared = UOp.placeholder((count * 32,), x.dtype, next(slots), AddrSpace.LOCAL)
    shared = shared.after(shared[warp * 32 + lane].store(x))
    return shared[warp * 32 + lane + bit - lane // bit % 2 * (2 * bit)].load()
  monkeypatch.setattr(tensor_cores, "exchanged", exchanged)
  monkeypatch.setattr(tensor_cores, "ENOUGH", 3)
  monkeypatch.setattr(tensor_cores, "leave", lambda condition: UOp(Ops.BARRIER, dtypes.void))
  monkeypatch.setattr(tensor_cores, "speaks_cuda", lambda: True)


def on_device(x: np.ndarray) -> Tensor: return Tensor(np.ascontiguousarray(x)).contiguous().realize()


def parts(kv_heads: int, groups: int, head_dim: int, kind: str = "auto", block_size: int = BS,
          dtype=dtypes.float16) -> list:
  model = SimpleNamespace(num_key_value_heads=kv_heads, num_attention_heads=kv_heads * groups, head_dim=head_dim)
  return tensor_cores.block_parts(model, SimpleNamespace(kv_cache_dtype=kind, block_size=block_size), dtype)


def as_stored(keys: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
  """Of (blocks, BS, KV, D) each, in float16 or bytes, as the kernels read them."""
  if keys.dtype == np.uint8: keys, values = [np.ascontiguousarray(x).view(np.uint32) for x in (keys, values)]
  width = 32 if keys.dtype == np.float16 else 8
  return [keys.reshape(*keys.shape[:3], -1, width).transpose(0, 2, 3, 1, 4), values.transpose(0, 2, 3, 1)]


CASES = {   # tokens, K/V heads, groups, head_dim, the longest context, sequences, blocks in a row of the table at least
  "decode": (8, 2, 4, 64, 700, 8, 0), "one token": (1, 8, 4, 128, 1000, 1, 0),
  "no groups": (16, 32, 1, 128, 60, 16, 0), "many groups": (2, 1, 12, 96, 300, 2, 0),
  "drafts": (10, 2, 2, 32, 90, 2, 0), "a chunk": (64, 2, 2, 64, 70, 1, 0), "shared": (2, 4, 4, 128, 900, 2, 65),
  "tiles": (128, 2, 2, 64, 300, 1, 0), "few in a tile": (128, 2, 1, 128, 90, 9, 0),
  "a mixed step": (256, 2, 4, 64, 200, 7, 0), "sixteen": (128, 1, 2, 32, 70, 8, 0)}
if SLOW:
  CASES = {"decode": (2, 1, 4, 32, 40, 2, 0), "many groups": (1, 1, 12, 32, 20, 1, 0),
           "shared": (1, 1, 1, 32, 40, 1, 65), "drafts": (4, 1, 2, 64, 20, 2, 0),
           "few in a tile": (80, 1, 1, 32, 20, 8, 0), "tiles": (72, 1, 1, 32, 80, 1, 0),
           "a tile that ends within a warp": (84, 1, 1, 32, 88, 1, 0)}


@on_tensor_cores
@stored_in
@pytest.mark.parametrize("case", CASES)
def test_attention_equals_numpy_and_sees_nothing_beyond_its_own_sequence(case, kind):
  (T, KV, G, D, longest, R, least), rng = CASES[case], np.random.default_rng(5)
  M = max(-(-longest // BS), least)
  lengths = rng.integers(T // R + 2, longest + 1, R)
  lengths[0] = longest
  rows = np.sort(np.resize(np.arange(R), T))
  positions = np.concatenate([np.arange(length - (rows == r).sum(), length) for r, length in enumerate(lengths)])
  if case == "a mixed step":   # most tokens are one sequence's, the others' one each
    rows = np.concatenate([np.zeros(T - R + 1, int), np.arange(1, R)])
    M, lengths[0] = max(M, -(-T // BS)), T - R + 1
    positions = np.concatenate([np.arange(lengths[0]), lengths[1:] - 1])
  table = np.concatenate([(rng.permutation(R * M) + 1).reshape(R, M), np.zeros((1, M), int)])
  unwritten = np.full((R * M + 1, BS), True)
  for r, length in enumerate(lengths):
    for p in range(length): unwritten[table[r, p // BS], p % BS] = False
  keys, values = rng.standard_normal((2, R * M + 1, BS, KV, D)).astype(np.float16)
  scales = []
  if kind == "auto": stored = [np.where(unwritten[..., None, None], np.float16(np.nan), x) for x in (keys, values)]
  else:   # what no sequence wrote may be anything
    both = [in_8_bits(x.astype(np.float32), kind) for x in (keys, values)]
    (keys, k_bytes, k_scales), (values, v_bytes, v_scales) = both
    garbage = rng.integers(0, 256, keys.shape).astype(np.uint8)
    stored = [np.where(unwritten[..., None, None], garbage, x) for x in (k_bytes, v_bytes)]
    if k_scales: scales = [np.where(unwritten[..., None], np.nan, [*k_scales, *v_scales]).transpose(1, 3, 0, 2)]
  stored = [*as_stored(*stored), *[x.astype(np.float32) for x in scales]]
  assert [x.shape[1:] for x in stored] == [shape for shape, _ in parts(KV, G, D, kind)]
  q = rng.standard_normal((T, KV, G, D)).astype(np.float16)
  expected = np.zeros(q.shape, np.float32)
  for t, (r, p) in enumerate(zip(rows, positions, strict=True)):
    k, v = [x[table[r]].reshape(-1, KV, D)[:p + 1].astype(np.float32) for x in (keys, values)]
    scores = np.einsum("hgd,nhd->hgn", q[t].astype(np.float32), k) / np.sqrt(D)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected[t] = np.einsum("hgn,nhd->hgd", weights / weights.sum(-1, keepdims=True), v)
  tokens = token_rows(positions, rows, table[rows, positions // BS], BS, M)
  inputs = on_device(q), [on_device(x) for x in stored], on_device(table.astype(np.int32)), on_device(tokens)
  got = tensor_cores.read(*inputs).numpy().astype(np.float32)
  np.testing.assert_allclose(got, expected, rtol=NEAR[kind], atol=NEAR[kind] * np.abs(expected).max())


@on_tensor_cores
@stored_in
@pytest.mark.parametrize("T", [1, 8, 32])
def test_rope_and_the_writes_equal_numpy(T, kind):
  KV, G, D, blocks, rng = 2, 3, 64, 6, np.random.default_rng(0)
  if SLOW: KV, G, D = 1, 1, 32
  slots = rng.permutation(blocks * BS)[:T]
  positions = slots % BS + BS * rng.integers(0, 5, T)
  qkv = rng.standard_normal((T, KV * (G + 2), D)).astype(np.float16)
  angles = np.arange(99)[:, None] * rope_frequencies({"rope_theta": 1e4}, D)
  rope = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
  tokens = token_rows(positions, 0 * positions, slots // BS, BS)
  names = {dtypes.float16: np.float16, dtypes.uint32: np.uint32, dtypes.float32: np.float32}
  cache = [on_device(np.zeros((blocks, *shape), names[x])) for shape, x in parts(KV, G, D, kind)]
  inputs = [*cache, *[on_device(x) for x in (qkv.reshape(T, -1), rope, tokens)]]
  q, *written = on_device(np.zeros((T, KV, G, D), np.float16)).custom_kernel(*inputs, fxn=tensor_cores.rope_kernel)
  cos, sin = rope[positions].transpose(1, 0, 2)[:, :, None]
  a, b = np.split(qkv.astype(np.float32), 2, -1)
  turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
  np.testing.assert_allclose(q.numpy(), turned[:, :KV * G].reshape(T, KV, G, D), atol=4e-3)
  expected = np.zeros((2, blocks * BS, KV, D), np.float32)
  expected[:, slots] = turned[:, KV * G:-KV], qkv[:, -KV:]
  expected = expected.reshape(2, blocks, BS, KV, D)
  if kind == "auto":
    for got, wanted in zip(written[:2], as_stored(*expected.astype(np.float16)), strict=True):
      np.testing.assert_allclose(got.numpy(), wanted, atol=4e-3)
    return
  (_, k_bytes, k_scales), (_, v_bytes, v_scales) = [in_8_bits(x, kind) for x in expected]
  for got, wanted in zip(written[:2], as_stored(k_bytes, v_bytes), strict=True):
    got, wanted = [np.ascontiguousarray(x).view(np.uint8).astype(int) for x in (got.numpy(), wanted)]
    filled = got != 0   # one number of 256 is 0, too
    assert np.abs(got - wanted)[filled].max() <= 1 and (got != wanted)[filled].mean() < 0.01   # cos rounds, too
    assert filled.mean() > 0.9 * T / (blocks * BS)
  if k_scales:
    got, wanted = written[2].numpy().transpose(2, 0, 3, 1), np.stack([*k_scales, *v_scales])   # (2, blocks, BS, KV)
    got, wanted = [x.reshape(2, -1, KV)[:, slots] for x in (got, wanted)]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_tensor_cores_are_taken_where_blocks_and_heads_suit_them():
  able = "sm_" in str(Device.default.renderer.target)
  def taken(*sizes, **options): return len(parts(*sizes, **options)[0][0]) == 4
  assert taken(8, 4, 128) == taken(2, 16, 32) == able
  assert not any([taken(8, 4, 128, block_size=32), taken(8, 4, 80), taken(1, 17, 64), taken(1, 1, 256),
                  taken(8, 4, 128, dtype=dtypes.float32)])
  assert TILE % 16 == 0
