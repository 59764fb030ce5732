"""Mixtures of experts: the kernel for chosen experts compared with numpy, and MXFP4; test_models.py has whole models.
Each comparison covers experts without tokens, and all tokens on the same experts."""
import functools

import numpy as np
import pytest
from helpers.engines import LogitsRecorder
from helpers.kernels import close, on_device, store
from helpers.record_models import OPTIONS, make_prompts, make_weights, read, write_model
from helpers.tensor_cores import run_on_cpu
from safetensors.numpy import save_file
from tinygrad import Device, TinyJit, dtypes
from tinygrad.uop.ops import Ops

from tinyvllm import LLM, Backend, InputError
from tinyvllm_extra.kernels.matmul import FastExperts
from tinyvllm_extra.models.matrices import reorder
from tinyvllm_extra.models.layers import choose_experts
from tinyvllm_extra.formats.quantization import E2M1, Quantized, dequantize, quantize

SLOW = Device.DEFAULT == "PYTHON"
KINDS = {"float32": 2e-5, "float16": 2e-3, "int8": 2e-3, "int4": 2e-3, "mxfp4": 2e-3}   # tolerance for rounding
SHAPES = [(4, 2, 64, 48), (8, 1, 64, 32), (60, 8, 32, 16)]   # experts, experts per token, inputs, outputs
if SLOW: SHAPES[2] = 12, 8, 32, 16


@functools.cache
def make_experts(count: int, inputs: int, outputs: int, kind: str) -> tuple[FastExperts, np.ndarray]:
  """Return random Experts with biases, and their matrices, (experts, out, in)."""
  rng = np.random.default_rng(1)
  dtype = dtypes.float32 if kind == "float32" else dtypes.float16
  layer = FastExperts(inputs, {f"{i}": outputs for i in range(count)}, True, dtype, num_experts=count)
  weight = rng.standard_normal((count * outputs, inputs)).astype(np.float32)
  if kind.startswith("float"):
    weight = weight.astype(kind)
    layer.weight = on_device(reorder(weight, layer.weight.shape))
  else:
    codes = rng.integers(0, 16, weight.shape).astype(np.uint8).view(E2M1)
    scale = 2.0 ** rng.integers(-6, 0, (len(weight), inputs // 32)).astype(np.float32)
    matrix = Quantized(codes, scale, None, np.arange(inputs)) if kind == "mxfp4" else quantize(weight, int(kind[3:]))
    store(layer, matrix)
    weight = dequantize(matrix, np.float32)
  layer.bias = on_device(rng.standard_normal(count * outputs).astype(np.float32))
  return layer, weight.reshape(count, outputs, inputs).astype(np.float32)


def choose(tokens: int, k: int, count: int, case: str) -> np.ndarray:
  """Return distinct experts of each token, (tokens, k): of all experts, of half of them, or the same of all tokens."""
  rng = np.random.default_rng(tokens)
  choices = rng.permutation(count)[:{"all": count, "half": max(k, count // 2), "same": k}[case]]
  return np.array([rng.permutation(choices)[:k] for _ in range(tokens)], np.int32)


def check(experts, weight: np.ndarray, ids: np.ndarray, kind: str = "float32", chosen=None, route=None) -> None:
  """Compare the products of experts, (tokens * k, out), with numpy. ids: of each token's experts, (tokens, k). chosen:
  numpy's, by default ids. route: computes the products of x and ids."""
  x = np.random.default_rng(ids.sum()).standard_normal((len(ids), weight.shape[2]))
  x, chosen = x.astype("float32" if kind == "float32" else "float16"), ids if chosen is None else chosen
  products = np.einsum("ti,tkoi->tko", x.astype(np.float32), weight[chosen])
  expected = (products + experts.bias.numpy().reshape(len(weight), -1)[chosen]).reshape(ids.size, -1)
  route = route or (lambda x, ids: experts.multiply(x, row_groups=experts.group_rows(ids), count=ids.numel()))
  close(route(on_device(x), on_device(ids)), expected, KINDS[kind])


@pytest.mark.parametrize("tokens", [1, 7, *[pytest.param(n, marks=pytest.mark.slow) for n in (2, 64, 130)]])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_chosen_experts_equal_numpy(kind, shape, tokens):
  count, k, inputs, outputs = shape
  for case in ("all", "half", "same"):
    ids = choose(min(tokens, 20) if SLOW else tokens, k, count, case)
    check(*make_experts(count, inputs, outputs, kind), ids, kind)


@pytest.mark.parametrize(("kind", "tokens"), [("float16", 1), ("float16", 40), ("int4", 7), ("mxfp4", 40)])
def test_experts_on_tensor_cores_equal_numpy(monkeypatch, kind, tokens):
  run_on_cpu(monkeypatch)
  for case in ("all", "same"): check(*make_experts.__wrapped__(8, 96, 48, kind), choose(tokens, 2, 8, case), kind)


@pytest.mark.parametrize("tokens", [2, 20])
def test_row_groups_list_each_pair_once_in_a_group_of_its_expert(tokens):
  layer, _ = make_experts(8, 64, 32, "float32")
  for case in ("all", "half", "same"):
    ids = choose(tokens, 5, 8, case).flatten()
    groups = layer.group_rows(on_device(ids.reshape(tokens, 5))).numpy()
    pairs = groups[:, 1:]
    assert sorted(pairs[pairs < ids.size]) == [*range(ids.size)] and pairs.max() <= ids.size
    for expert, *rows in groups: assert all(ids[row] == expert for row in rows if row < ids.size)


def test_a_captured_call_follows_the_ids_of_each_run():
  experts, weight = make_experts(8, 64, 32, "float32")
  step = TinyJit(lambda x, ids: experts.multiply(x, row_groups=experts.group_rows(ids), count=14).realize())
  for seed in range(5):
    check(experts, weight, np.random.default_rng(seed).integers(0, 8, (7, 2)).astype(np.int32), route=step)


def test_an_expert_out_of_range_reads_no_other_memory():
  ids = np.array([[9], [3]], np.int32)
  check(*make_experts(8, 64, 32, "float32"), ids, chosen=ids % 8)


def test_backend_without_experts_is_refused(tmp_path):
  with pytest.raises(InputError, match="backend: Backend has no experts"):
    LLM(write_model(tmp_path, "gpt_oss"), **OPTIONS, backend=Backend())


@pytest.mark.parametrize("is_normalized", [True, False])
def test_choose_experts_equals_sorting_and_takes_the_first_of_equal_logits(is_normalized):
  logits = np.random.default_rng(0).integers(-3, 4, (20, 12)).astype(np.float32)   # many are equal
  ids, weights = choose_experts(on_device(logits), 5, is_normalized)
  expected = np.argsort(-logits, 1, kind="stable")[:, :5]
  np.testing.assert_array_equal(ids.numpy(), expected)
  p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
  p = np.take_along_axis(p, expected, 1)
  np.testing.assert_allclose(weights.numpy(), p / p.sum(1, keepdims=True) if is_normalized else p, rtol=1e-5)


def test_one_token_reads_only_its_experts():
  """The kernel's loops cover k of the 60 experts; weights are loaded once per output and input in them."""
  layer, weight = make_experts(60, 32, 16, "float32")
  k = 8
  groups = layer.group_rows(on_device(choose(1, k, 60, "all")))
  x = on_device(np.zeros((1, 32), np.float16))   # linear.c needs float32
  kernels = [u.src[0] for u in layer.multiply(x, row_groups=groups, count=k).schedule_linear().toposort()
             if u.op is Ops.CALL and u.src[0].op is Ops.SINK]
  sizes = [np.prod([int(r.vmax) + 1 for r in kernel.toposort() if r.op is Ops.RANGE]) for kernel in kernels]
  assert max(sizes) <= 1.3 * k * weight[0].size


@pytest.mark.slow
def test_mxfp4_equals_its_dequantized_checkpoint(tmp_path):
  values = np.outer([1, -1], [0, 0.5, 1, 1.5, 2, 3, 4, 6]).ravel().astype(np.float32)
  rng, weights = np.random.default_rng(0), make_weights(read("gpt_oss")["shapes"], False)
  plain = {name: x for name, x in weights.items() if x.ndim < 3}
  packed = dict(plain)
  for name in [name for name in weights if name not in plain]:
    experts, inputs, outputs = weights[name].shape
    codes = rng.integers(0, 16, (experts, outputs, inputs // 32, 32)).astype(np.uint8)
    scales = rng.integers(122, 126, codes.shape[:3]).astype(np.uint8)
    packed |= {f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4, f"{name}_scales": scales}
    weight = values[codes] * 2.0 ** (scales[..., None].astype(np.float32) - 127)
    plain[name] = np.ascontiguousarray(weight.reshape(experts, outputs, inputs).swapaxes(1, 2))
  method = {"quant_method": "mxfp4", "modules_to_not_convert": []}
  folders = [write_model(tmp_path / "plain", "gpt_oss", weights=plain),
             write_model(tmp_path / "packed", "gpt_oss", quantization_config=method)]
  save_file(packed, folders[1] / "model.safetensors")
  models = [LLM(folder, **OPTIONS) for folder in folders]
  plain_weight, packed_weight = [llm.runner.model.layers[0].gate_up.weight for llm in models]
  assert packed_weight.nbytes() * 8 == plain_weight.numel() * 4   # 4 bits each
  recorders = [*map(LogitsRecorder, models)]
  for ids in make_prompts("gpt_oss")[::3]:
    results = [recorder.generate(ids, 4) for recorder in recorders]
    assert results[0][0] == results[1][0]
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-4)
  with pytest.raises(InputError, match="quantization='int8'"): LLM(folders[1], **OPTIONS, quantization="int8")
