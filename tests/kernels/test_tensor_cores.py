"""Attention compared with numpy: on tensor cores, on CUDA or with its source on the CPU; with scale, window, cap and
sinks also the core's version, the generic kernel, and the source for CPUs. tinygrad's kernels run on the default
device."""
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.data import read_data
from helpers.engines import token_rows
from helpers.kernels import VERSIONS, as_stored, check_attention, check_rope, spread
from helpers.parameters import slow
from helpers.tensor_cores import TOLERANCE, each_kind, run_on_cpu
from tinygrad import Tensor, UOp, dtypes

from tinyvllm_extra.kernels import FastBackend, attention, cuda_source
from tinyvllm_extra.kernels.attention import BS, ScoreOptions, add_query_tiles, tile_size


@pytest.fixture
def sources(monkeypatch): run_on_cpu(monkeypatch)


def parts(kv_heads: int, groups: int, head_dim: int, kind: str = "auto", block_size: int = BS,
          dtype=dtypes.float16) -> list:
  model = SimpleNamespace(num_key_value_heads=kv_heads, num_attention_heads=kv_heads * groups, head_dim=head_dim)
  return FastBackend().kv_layout(model, SimpleNamespace(kv_cache_dtype=kind, block_size=block_size), dtype)


# tensor cores: tokens, K/V heads, query heads per K/V head, head_dim, longest context, sequences, minimum blocks per
# table. options: (first position, number of tokens) of each sequence, tokens with padding. query tiles: tokens of each
# slot, then padding
CASES = read_data("kernel_cases.json")
QUICK = [("mixed step", "auto"), ("mixed step", "int8"), ("mixed step", "fp8"), ("split-KV", "auto"), ("decode", "fp8")]


@pytest.mark.parametrize(("case", "kind"), [
  *QUICK, *slow(*[(case, kind) for case in CASES["tensor cores"] for kind in TOLERANCE if (case, kind) not in QUICK])])
def test_attention_equals_numpy_and_reads_only_own_sequence(case, kind, sources):
  T, *shape, longest, R, max_blocks = CASES["tensor cores"][case]
  sequences = spread(T, longest, R)
  if case == "mixed step":   # one token of each sequence but the last one, which has a long chunk
    sequences = [*[(start + n - 1, 1) for start, n in sequences[1:]], (0, T - R + 1)]
  check_attention("tensor cores", sequences, shape, TOLERANCE[kind], kind, "float16", max_blocks=max_blocks)


@each_kind
@pytest.mark.parametrize("T", [1, 8, 32])
def test_rope_kernel_equals_numpy(T, kind, sources):
  KV, G, D = 2, 3, 64
  check_rope("tensor cores", attention.rope_kernel, T, (KV, G, D), 4e-3, kind, "float16")
  blocks = as_stored("tensor cores", *np.zeros((2, 1, BS, KV, D), np.float16 if kind == "auto" else np.uint8))
  assert [x.shape[1:] for x in blocks] == [shape for shape, _ in parts(KV, G, D, kind)[:2]]


@pytest.mark.parametrize("sizes", CASES["query tiles"])
def test_query_tiles_are_consecutive_tokens_of_a_sequence(sizes):
  slots = np.repeat(np.arange(len(sizes)), sizes)
  starts = np.cumsum([0, *sizes[:-2]])
  size = tile_size(len(slots))
  expected = [(start + i) * size + min(size, n - i) - 1
              for start, n in zip(starts, sizes[:-1], strict=False) for i in range(0, n, size)
              if n > 1 or start >= len(sizes)]   # the first tokens that are alone need no tile
  tokens = Tensor(token_rows(0 * slots, slots, slots))
  tiles = add_query_tiles(tokens, Tensor.zeros(len(sizes), 1)).numpy()
  assert tiles[-2].tolist() == expected + [-1] * (len(slots) - len(expected))
  assert tiles[-1].tolist() == [sum(sizes[:-1])] * len(slots)
  np.testing.assert_array_equal(tiles[:-2], tokens.numpy())


def test_tensor_cores_selected_only_for_supported_block_and_head_sizes(sources):
  def uses(*sizes, **options): return len(parts(*sizes, **options)[0][0]) == 4
  assert uses(8, 4, 128) and uses(2, 16, 32)
  assert not any([uses(8, 4, 128, block_size=32), uses(8, 4, 80), uses(1, 17, 64),
                  uses(8, 4, 128, dtype=dtypes.float32)])
  assert uses(4, 4, 256) == cuda_source.has_wgmma()


@pytest.mark.parametrize(("is_hopper", "limit"), [(False, 99), (True, 227)])   # KiB of a work group
def test_attention_fits_shared_memory_with_at_least_two_warps(is_hopper, limit, monkeypatch):
  monkeypatch.setattr(cuda_source, "has_wgmma", lambda: is_hopper)
  sizes = 32, 64, 96, 128, *[256] * is_hopper
  for T, KV, G, D, is_bytes in itertools.product((1, 8, 64, 512), (1, 8, 32), (1, 4, 16), sizes, (0, 1)):
    shapes = {"q": (T, KV, G, D), "keys": (9, KV, D // 32, BS, 8 if is_bytes else 32), "table": (65, 64)}
    types = {"q": dtypes.half, "keys": dtypes.uint32 if is_bytes else dtypes.half, "table": dtypes.int}
    operands = {name: UOp.placeholder(shape, types[name], 0) for name, shape in shapes.items()}
    for is_prefill in (False, True)[:1 + (T > attention.MAX_DECODE)]:
      launch = attention.launch_attention(operands, ScoreOptions(), 1, is_prefill)
      assert launch.shared_bytes <= limit * 1024 and launch.threads >= 64


# Options

KV, G, D = 2, 2, 32
SINKS = np.array([-30, 0, 30, 2.5], np.float32)   # relative to scores of about 1
ALL = {"scale": 0.4, "window": 17, "cap": 1.5, "sinks": SINKS}
OPTIONS: dict[str, dict[str, Any]] = {
  "none": {}, "scale": {"scale": 0.4}, "cap": {"cap": 1.5}, "saturated cap": {"scale": 50.0, "cap": 2.0},
  "sinks": {"sinks": SINKS}, "all": ALL,
  **{f"window {n}": {"window": n} for n in (1, BS - 1, BS, BS + 1, 40, 1000)}}
QUICK_OPTIONS = "cap", "sinks", f"window {BS}", "all"
TENSOR_CORE_CASES = [*slow(*[("decode and a chunk", name) for name in (*QUICK_OPTIONS, "window 1", "window 40")]),
                     ("long chunk", "all"), *slow(*[("long chunk", name) for name in OPTIONS if name != "all"])]


@pytest.fixture
def split_in_three(monkeypatch, sources): monkeypatch.setattr(attention, "MIN_WORK_GROUPS", 3 * KV)


def check(version: str, case: str, tolerance: float, **options: Any) -> None:
  (sequences, num_tokens), dtype = CASES["options"][case], "float16" if version == "tensor cores" else "float32"
  check_attention(version, sequences, (KV, G, D), tolerance, dtype=dtype, num_tokens=num_tokens, **options)


@pytest.mark.parametrize(("case", "name"), [
  *[("decode and a chunk", name) for name in QUICK_OPTIONS],
  *slow(*[("decode and a chunk", name) for name in OPTIONS if name not in QUICK_OPTIONS]),
  *slow(*[("long chunk", name) for name in QUICK_OPTIONS])])
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
  def mean(*inputs: list[UOp]) -> None: raise AssertionError("split-KV")
  monkeypatch.setattr(attention, "mean", mean)
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
