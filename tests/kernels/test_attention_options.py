"""Attention with scale, window, cap and sinks, compared with numpy: the core's version, the generic kernel, the source
for CPUs, and the source for tensor cores (on CUDA, or on the CPU)."""
from typing import Any

import numpy as np
import pytest
from helpers.kernels import VERSIONS, check_attention
from helpers.parameters import slow
from helpers.tensor_cores import TOLERANCE, each_kind, run_on_cpu
from tinygrad import UOp, dtypes

from tinyvllm_extra.kernels import tensor_cores
from tinyvllm_extra.kernels.schedule import ScoreOptions

KV, G, D, BS = 2, 2, 32, 16
SINKS = np.array([-30, 0, 30, 2.5], np.float32)   # relative to scores of about 1
ALL = {"scale": 0.4, "window": 17, "cap": 1.5, "sinks": SINKS}
OPTIONS: dict[str, dict[str, Any]] = {
  "none": {}, "scale": {"scale": 0.4}, "cap": {"cap": 1.5}, "saturated cap": {"scale": 50.0, "cap": 2.0},
  "sinks": {"sinks": SINKS}, "all": ALL,
  **{f"window {n}": {"window": n} for n in (1, BS - 1, BS, BS + 1, 40, 1000)}}
CASES = {   # (first position, number of tokens) of each sequence, tokens with padding
  "decode and a chunk": ([(69, 1), (38, 3), (0, 1), (BS, 1)], 8), "long chunk": ([(33, 66), (69, 1), (14, 5)], 80),
  "decode": ([(69, 1), (40, 1)], 2), "split-KV": ([(1100, 1)], 1)}
QUICK = "cap", "sinks", f"window {BS}", "all"
TENSOR_CORE_CASES = [*slow(*[("decode and a chunk", name) for name in (*QUICK, "window 1", "window 40")]),
                     ("long chunk", "all"), *slow(*[("long chunk", name) for name in OPTIONS if name != "all"])]


@pytest.fixture
def sources(monkeypatch): run_on_cpu(monkeypatch)


@pytest.fixture
def split_in_three(monkeypatch, sources): monkeypatch.setattr(tensor_cores, "MIN_WORK_GROUPS", 3 * KV)


def check(version: str, case: str, tolerance: float, **options: Any) -> None:
  (sequences, num_tokens), dtype = CASES[case], "float16" if version == "tensor cores" else "float32"
  check_attention(version, sequences, (KV, G, D), tolerance, dtype=dtype, num_tokens=num_tokens, **options)


@pytest.mark.parametrize(("case", "name"), [
  *[("decode and a chunk", name) for name in QUICK],
  *slow(*[("decode and a chunk", name) for name in OPTIONS if name not in QUICK]),
  *slow(*[("long chunk", name) for name in QUICK])])
@pytest.mark.parametrize("version", ["core", *VERSIONS])
def test_attention_with_options_equals_numpy(version, case, name): check(version, case, 2e-5, **OPTIONS[name])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("case", ["decode and a chunk", *slow("long chunk")])
@pytest.mark.parametrize("version", VERSIONS)
def test_attention_with_all_options_reads_int8_and_fp8(version, case, kind):
  check(version, case, 2e-5, kind=kind, **ALL)


@pytest.mark.parametrize(("case", "name"), TENSOR_CORE_CASES)
def test_tensor_cores_with_options_equal_numpy(case, name, sources):
  check("tensor cores", case, 3e-3, **OPTIONS[name])


@each_kind
@pytest.mark.parametrize("case", ["split-KV", *slow("decode and a chunk", "long chunk")])
def test_tensor_cores_with_all_options_read_each_cache_dtype(case, kind, split_in_three):
  window = 1030 if case == "split-KV" else 17
  check("tensor cores", case, TOLERANCE[kind] * 2, kind=kind, **{**ALL, "window": window})


def test_short_window_in_long_context_needs_no_split_kv(monkeypatch, split_in_three):
  def combine(*inputs: UOp) -> None: raise AssertionError("split-KV")
  monkeypatch.setattr(tensor_cores, "combine_kernel", combine)
  check("tensor cores", "split-KV", 3e-3, window=1024)
  with pytest.raises(AssertionError, match="split-KV"): check("tensor cores", "split-KV", 3e-3, window=1025)


@pytest.mark.parametrize("window", [1, BS - 1, BS, BS + 1, 100])
def test_first_block_holds_the_first_visible_position(window):
  for position in (0, 1, window - 1, window, *range(window + BS - 2, window + BS + 1), 1000):
    block = ScoreOptions(window=window).first_block(UOp.const(position, dtypes.weakint), 100, BS)
    assert block.simplify().arg == max(0, position - window + 1) // BS


def test_attention_reads_no_block_before_the_first(monkeypatch):
  monkeypatch.setattr(ScoreOptions, "first_block", lambda *args: 2)
  check("generic", "decode", 3e-3, first=2 * BS)


def test_number_of_iterations_depends_on_the_first_block(monkeypatch):
  starts, conditions, first_block, end = [], [], ScoreOptions.first_block, UOp.end   # conditions: of next iterations
  def record_start(*args): return starts.append(first_block(*args)) or starts[-1]
  def record_condition(*args): return conditions.extend(x for x in args[1:] if x.dtype == dtypes.bool) or end(*args)
  monkeypatch.setattr(ScoreOptions, "first_block", record_start)
  monkeypatch.setattr(UOp, "end", record_condition)
  check("generic", "decode", 3e-3, window=BS)
  assert starts and all(any(start in x.toposort() for x in conditions) for start in starts)
