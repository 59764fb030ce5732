"""Kernels for Metal, rendered by metal.py without a Mac: within Metal's limits, and accepted by clang."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import backends
from metal import Kernel, make_kernel, make_record, parse, violations

SCRIPT = Path(__file__).with_name("metal.py")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
  """All kernels. metal.py renders them in a new process with DEV=METAL."""
  path = tmp_path_factory.mktemp("metal") / "kernels.json"
  run = subprocess.run([sys.executable, SCRIPT, "--kernels", path], capture_output=True, text=True)
  assert path.exists(), run.stderr
  return [Kernel(*fields) for fields in json.loads(path.read_text())]


def test_all_kernels_are_within_limits_and_parse(kernels, print_at_end):
  assert [line for kernel in kernels for line in violations(kernel)] == []
  assert parse(kernels) == ""
  print_at_end(f"Metal: {backends.cells(make_record(kernels))[1]}")


def test_kernels_cover_all_parts_of_the_engine(kernels):
  names, text = {kernel.name for kernel in kernels}, "".join(kernel.source for kernel in kernels)
  assert {"linear", "rms_norm", "attend", "rope_and_write", "scatter", "adjust_logits"} <= names
  for word in ("half4", "float4", "simdgroup_multiply_accumulate", "threadgroup_barrier", "log2"): assert word in text
  assert len(kernels) > 100


@pytest.mark.parametrize(("old", "new"), [
  ("threadgroup_barrier(", "threadgroup_barier("), ("half4 ", "half5 "), ("= gid.x", "= gid.a.b"),
  ("  int lidx0", "  in lidx0"), ("device half*", "device float16*"), ("uint3 lid", "uint3 lid_")])
def test_parse_rejects_a_typo(kernels, old, new):
  kernel = next(kernel for kernel in kernels if old in kernel.source)
  broken = kernel._replace(source=kernel.source.replace(old, new, 1))
  assert parse([kernel]) == "" and "error:" in parse([broken])


def test_violations_name_each_exceeded_limit():
  source = """#include <metal_stdlib>
using namespace metal;
kernel void big(device half* data0_8, constant int& n, uint3 gid [[threadgroup_position_in_grid]]) {
  threadgroup __attribute__((aligned(16))) float buf0[8192];
  threadgroup __attribute__((aligned(16))) half buf1[1];
}"""
  kernel = make_kernel("big", source, (32, 64))
  assert kernel[2:] == (2**15 + 16, 2, 2048)
  assert violations(kernel) == ["big: threadgroup_memory=32784 must be at most 32768",
                                "big: threads=2048 must be at most 1024"]
  assert violations(kernel._replace(buffers=32, **dict.fromkeys(("threads", "threadgroup_memory"), 1))) == [
    "big: buffers=32 must be at most 31"]
