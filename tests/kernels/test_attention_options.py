"""Attention with scale, window, cap and sinks, compared with numpy: the core's version, the generic kernel, and the
kernels for tensor cores (on CUDA or with DEV=PYTHON::sm_89)."""
from typing import Any

import numpy as np
import pytest
from helpers.engines import token_rows
from helpers.kernels import as_stored, bytes_as_stored, on_device, reference_attention
from helpers.parameters import slow
from helpers.reference import quantize_kv
from helpers.tensor_cores import SLOW, TOLERANCE, as_stored as as_stored_on_tensor_cores
from helpers.tensor_cores import each_kind, on_tensor_cores, replace_cuda_statements
from tinygrad import UOp, dtypes

from tinyvllm.backend import Backend
from tinyvllm_extra.kernels import FastBackend, tensor_cores
from tinyvllm_extra.kernels.schedule import ScoreOptions

KV, G, D, BS = (1, 4, 32, 16) if SLOW else (2, 2, 32, 16)
SINKS = np.array([-30, 0, 30, 2.5], np.float32)   # relative to scores of about 1
ALL = {"scale": 0.4, "window": 17, "cap": 1.5, "sinks": SINKS}
WINDOWS = {f"window {n}": {"window": n} for n in (1, BS - 1, BS, BS + 1, 40, 1000)}
OPTIONS: dict[str, dict[str, Any]] = {"none": {}, "scale": {"scale": 0.4}, "cap": {"cap": 1.5},
  "saturated cap": {"scale": 50.0, "cap": 2.0}, "sinks": {"sinks": SINKS}, **WINDOWS, "all": ALL}
kernel_versions = pytest.mark.parametrize("version", ["generic", pytest.param("tensor cores", marks=on_tensor_cores)])
CASES = {   # (first position, number of tokens) of each sequence, tokens with padding
  "decode and a chunk": ([(69, 1), (38, 3), (0, 1), (BS, 1)], 8), "long chunk": ([(30, 66), (69, 1), (14, 5)], 80),
  "decode": ([(69, 1), (40, 1)], 2), "split-KV": ([(1100, 1)], 1)}
QUICK = "cap", "sinks", f"window {BS}", "all"
LONG_CHUNK = (*QUICK, f"window {BS + 1}") if SLOW else OPTIONS   # slow in the interpreter
TENSOR_CORE_CASES = [*[("decode and a chunk", name) for name in (*QUICK, "window 1", "window 40")],
                     *[("long chunk", name) for name in LONG_CHUNK]]


@pytest.fixture(autouse=True)
def emulate_cuda(monkeypatch): replace_cuda_statements(monkeypatch)


@pytest.fixture
def split_in_three(monkeypatch): monkeypatch.setattr(tensor_cores, "MIN_WORK_GROUPS", 3 * KV)


def attend(version: str, case: str, kind: str = "auto", first: int = 0, **options: Any) -> tuple[np.ndarray, ...]:
  """Return a version's output and numpy's, (tokens, KV, G, D) each, without padding. first: numpy's first position."""
  (sequences, T), rng = CASES[case], np.random.default_rng(5)
  rows = np.repeat(np.arange(len(sequences)), [n for _, n in sequences])
  positions = np.concatenate([np.arange(start, start + n) for start, n in sequences])
  M, R = max(positions) // BS + 2, len(sequences)
  table = np.concatenate([(rng.permutation(R * M) + 1).reshape(R, M), np.zeros((1, M), int)])   # the last is padding's
  dtype = np.float16 if version == "tensor cores" else np.float32
  cache = np.full((2, R * M + 1, BS, KV, D), np.nan, dtype)   # unwritten positions hold NaN or random bytes
  for r, (start, n) in enumerate(sequences):
    for p in range(start + n): cache[:, table[r, p // BS], p % BS] = rng.standard_normal((2, KV, D))
  unwritten, scales = np.isnan(cache), []
  stored = cache
  if kind != "auto":
    (keys, k_bytes, k_scales), (values, v_bytes, v_scales) = [quantize_kv(np.nan_to_num(x), kind) for x in cache]
    stored = np.where(unwritten, rng.integers(0, 256, cache.shape).astype(np.uint8), [k_bytes, v_bytes])
    cache = np.stack([keys, values])
    if k_scales: scales = [np.where(unwritten[..., 0], np.nan, [*k_scales, *v_scales]).transpose(1, 3, 0, 2)]
  q = rng.standard_normal((len(rows), KV, G, D)).astype(dtype)
  expected = reference_attention(q, cache, table, rows, positions, first, **options)
  blocks = table[rows, positions // BS]
  # attend() writes the step's K and V again; cosine 1 and sine 0 do not rotate
  kv = cache[:, blocks, positions % BS].astype(dtype)   # (2, tokens, KV, D)
  qkv = np.concatenate([x.reshape(len(rows), -1) for x in (q, *kv)], 1)
  tokens, padding = token_rows(positions, rows, blocks, BS, M), token_rows([0], [R], [0], BS, M)
  padding[-1] = -1   # no query tile
  tokens = np.concatenate([tokens, *[padding] * (T - len(rows))], 1)
  rope = np.stack([np.ones((M * BS, D // 2)), np.zeros((M * BS, D // 2))], 1).astype(np.float32)
  layouts = {"core": lambda: tuple(stored), "tensor cores": lambda: as_stored_on_tensor_cores(*stored),
             "generic": lambda: as_stored(stored) if kind == "auto" else bytes_as_stored(*stored)}
  caches = [on_device(x) for x in (*layouts[version](), *[x.astype(np.float32) for x in scales])]
  if "sinks" in options: options["sinks"] = on_device(options["sinks"])
  arrays = np.pad(qkv, ((0, T - len(rows)), (0, 0))), rope, tokens, table.astype(np.int32)
  qkv, *inputs = [on_device(x) for x in arrays]
  backend = Backend() if version == "core" else FastBackend()
  output = backend.attend(qkv, caches, *inputs, KV * G, **options).numpy().reshape(T, KV, G, D)
  return output[:len(rows)].astype(np.float32), expected


def compare(outputs: tuple[np.ndarray, ...], tolerance: float) -> None:
  output, expected = outputs
  np.testing.assert_allclose(output, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(("case", "name"), [
  *[("decode and a chunk", name) for name in QUICK],
  *slow(*[("decode and a chunk", name) for name in OPTIONS if name not in QUICK]),
  *slow(*[("long chunk", name) for name in QUICK])])
@pytest.mark.parametrize("version", ["core", "generic"])
def test_attention_with_options_equals_numpy(version, case, name):
  compare(attend(version, case, **OPTIONS[name]), 2e-5)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("case", ["decode and a chunk", *slow("long chunk")])
def test_generic_attention_with_all_options_reads_int8_and_fp8(case, kind):
  compare(attend("generic", case, kind, **ALL), 2e-5)


@on_tensor_cores
@pytest.mark.parametrize(("case", "name"), TENSOR_CORE_CASES)
def test_tensor_cores_with_options_equal_numpy(case, name):
  compare(attend("tensor cores", case, **OPTIONS[name]), 3e-3)


@on_tensor_cores
@each_kind
@pytest.mark.parametrize("case", ["decode and a chunk", "long chunk", "split-KV"])
def test_tensor_cores_with_all_options_read_each_cache_dtype(case, kind, split_in_three):
  window = 1030 if case == "split-KV" else 17
  compare(attend("tensor cores", case, kind, **{**ALL, "window": window}), TOLERANCE[kind] * 2)


@on_tensor_cores
def test_short_window_in_long_context_needs_no_split_kv(monkeypatch, split_in_three):
  def combine(*inputs: UOp) -> None: raise AssertionError("split-KV")
  monkeypatch.setattr(tensor_cores, "combine_kernel", combine)
  compare(attend("tensor cores", "split-KV", window=1024), 3e-3)
  with pytest.raises(AssertionError, match="split-KV"): attend("tensor cores", "split-KV", window=1025)


@pytest.mark.parametrize("window", [1, BS - 1, BS, BS + 1, 100])
def test_first_block_holds_the_first_visible_position(window):
  for position in (0, 1, window - 1, window, *range(window + BS - 2, window + BS + 1), 1000):
    block = ScoreOptions(window=window).first_block(UOp.const(position, dtypes.weakint), 100, BS)
    assert block.simplify().arg == max(0, position - window + 1) // BS


@kernel_versions
def test_attention_reads_no_block_before_the_first(version, monkeypatch):
  monkeypatch.setattr(ScoreOptions, "first_block", lambda *args: 2)
  compare(attend(version, "decode", first=2 * BS), 3e-3)


@kernel_versions
def test_number_of_iterations_depends_on_the_first_block(version, monkeypatch):
  starts: list[UOp] = []
  conditions: list[UOp] = []
  first_block, end = ScoreOptions.first_block, UOp.end

  def record_start(*args: Any) -> UOp:
    starts.append(first_block(*args))
    return starts[-1]

  def record_condition(self: UOp, *args: UOp) -> UOp:
    conditions.extend(x for x in args if x.dtype == dtypes.bool)   # for the next iteration
    return end(self, *args)
  monkeypatch.setattr(ScoreOptions, "first_block", record_start)
  monkeypatch.setattr(UOp, "end", record_condition)
  attend(version, "decode", window=BS)
  assert starts and all(any(start in x.toposort() for x in conditions) for start in starts)
