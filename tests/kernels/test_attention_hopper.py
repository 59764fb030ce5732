"""Attention of prefill chunks on Hopper, compared with numpy: on a card, or with attention_hopper.cu on the CPU."""
import pytest
from helpers.kernels import check_attention
from helpers.parameters import mark_slow_except
from helpers.tensor_cores import run_on_cpu
from tinygrad import Device

from tinyvllm_extra.kernels import cuda_source

# (first position, number of tokens) of each sequence, tokens with padding, (K/V heads, query heads of each, head_dim)
CHUNKS: dict[str, tuple[list[tuple[int, int]], int, tuple[int, int, int]]] = {
  "mixed step": ([(131, 100), (69, 1), (500, 27), (15, 1)], 192, (2, 2, 128)),
  "decodes": ([(69, 1), (1, 1), (500, 1), (3, 70), (15, 1)], 128, (2, 2, 128)),
  "two tiles": ([(33, 190)], 256, (2, 2, 64)),
  "whole blocks": ([(0, 64), (0, 128)], 192, (1, 3, 64)), "long context": ([(1300, 66)], 128, (1, 1, 128)),
  "one more than a stage": ([(0, 129), (126, 3)], 192, (1, 2, 128)),
  "short": ([(0, 1), (5, 40), (64, 17)], 80, (2, 3, 64)), "one query head": ([(700, 50), (3, 70)], 128, (3, 1, 64))}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
  run_on_cpu(monkeypatch)
  if Device.DEFAULT != "CUDA": monkeypatch.setattr(cuda_source, "has_wgmma", lambda: True)


@pytest.mark.parametrize("case", mark_slow_except(["mixed step", "decodes"], CHUNKS))
@pytest.mark.parametrize("scale", [None, *mark_slow_except([], [0.4])])
def test_attention_of_chunks_equals_numpy(case, scale):
  sequences, num_tokens, shape = CHUNKS[case]
  options = {} if scale is None else {"scale": scale}
  check_attention("tensor cores", sequences, shape, 3e-3, dtype="float16", num_tokens=num_tokens, **options)
