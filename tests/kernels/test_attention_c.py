"""attention.c with each instruction set that this CPU has."""
import numpy as np
import pytest
from helpers.engines import token_rows
from helpers.kernels import check_attention, each_cpu, on_device, use_cpu
from helpers.parameters import slow

from tinyvllm_extra.kernels import generic
from tinyvllm_extra.kernels.cuda_source import speaks_c
from tinyvllm_extra.kernels.schedule import ScoreOptions

pytestmark = pytest.mark.skipif(not speaks_c(), reason="other devices do not compile C")


@each_cpu
@pytest.mark.parametrize(("shape", "block_size", "kind"), [
  ((3, 3, 64), 16, "auto"), ((1, 5, 80), 4, "int8"), *slow(((2, 1, 12), 10, "auto"), ((1, 60, 128), 256, "fp8"))])
def test_attention_equals_numpy(monkeypatch, cpu, shape, block_size, kind):
  use_cpu(monkeypatch, cpu)
  check_attention("C", [(69, 1), (0, 1), (140, 70), (63, 3)], shape, 2e-5, kind, num_tokens=80, block_size=block_size)


@each_cpu
@pytest.mark.parametrize("options", [{}, {"window": 70, "cap": 1.5}])
def test_rows_do_not_depend_on_batch_or_chunks(monkeypatch, cpu, options):
  """Tokens of two sequences, at once, in steps of 7, and one at a time."""
  use_cpu(monkeypatch, cpu)
  rng, (KV, G, D), n = np.random.default_rng(0), (2, 3, 40), 130
  cache = [on_device(rng.standard_normal((27, KV, *size), np.float32)) for size in ((D, 16), (16, D))]
  q, table = rng.standard_normal((2 * n, KV, G, D), np.float32), on_device(np.arange(27, dtype=np.int32).reshape(3, 9))
  tokens = token_rows([*range(n)] * 2, [0] * n + [1] * n, [0] * 2 * n)
  def attend(i: int, size: int) -> np.ndarray:
    x = on_device(q[i:i + size])
    return generic.read({"out": x.empty_like(), "q": x, "keys": cache[0], "values": cache[1], "table": table,
                         "tokens": on_device(tokens[:, i:i + size])}, ScoreOptions(**options)).numpy()
  together = attend(0, 2 * n)
  for size in (7, 1):
    np.testing.assert_array_equal(np.concatenate([attend(i, size) for i in range(0, 2 * n, size)]), together)
