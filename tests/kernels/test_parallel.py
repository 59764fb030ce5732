"""tensor_parallel_size: several devices give the outputs of one, each holds only its shard, and models that cannot be
split are refused. A CPU provides any number of devices: CPU, CPU:1, CPU:2, …"""
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.commands import process
from helpers.engines import assert_same_outputs, check_invariants
from helpers.faults import break_steps, fail_once, finish
from helpers.models import random_weights, tiny_config, tiny_model, write_safetensors
from helpers.parameters import slow
from helpers.quantized_models import (FORMATS, PROJECTIONS, SIZES, quantized_model)
from helpers.reference import reference_greedy, reference_logits
from helpers.requests import greedy, ids_of, prompt, tokens
from helpers.speculation import Counts, NGRAM, always_draft
from tinygrad import Device, Tensor, UOp, dtypes, nn
from tinygrad.runtime.autogen import cuda

from tinyvllm import LLM, SamplingParams, StructuredOutputsParams
from tinyvllm_extra.kernels import prepare_device as open_device
from tinyvllm_extra.cli import main
from tinyvllm_extra.kernels.matmul import Linear, Norm
from tinyvllm_extra.options import LLMConfig
from tinyvllm_extra.parallel import check_peers, device_names
from tinyvllm_extra.quantization import Quantized, dequantize, quantize, split

pytestmark = pytest.mark.skipif(Device.DEFAULT != "CPU", reason="the number of other devices is fixed")

# Steps of four tokens: longer prompts of PROMPTS are prefilled in chunks, together with decodes of shorter ones
SMALL = {"dtype": "float32", "max_model_len": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 4}
FLAGS = [x for name, value in SMALL.items() for x in ("--" + name.replace("_", "-"), str(value))]


PROMPTS = [prompt(n, "jobs") for n in (1, 11, 3, 6)]


def logprobs_of(logits):
  x = logits - logits.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def check(model, count, folder=None, logprobs=False, **options):
  """Check that `count` devices give the reference's greedy ids, and return the engine. logprobs: also check the log
  probabilities, which take a second to capture. folder: a float32 model with the same outputs."""
  llm = LLM(model, **{**SMALL, **options}, tensor_parallel_size=count)
  params = greedy(5, logprobs=0 if logprobs else None)
  outputs = llm.generate([tokens(ids) for ids in PROMPTS], params, use_tqdm=False)
  for ids, output in zip(PROMPTS, outputs, strict=True):
    output_ids = ids_of(output)
    assert output_ids == reference_greedy(folder or model, ids, 5)
    if not logprobs: continue
    expected = logprobs_of(reference_logits(folder or model, [*ids, *output_ids])[len(ids) - 1:-1])
    actual = [x[i].logprob for i, x in zip(output_ids, output.outputs[0].logprobs, strict=True)]
    np.testing.assert_allclose(actual, expected[np.arange(5), output_ids], atol=1e-4)
  check_invariants(llm)
  return llm


# model variants

BIASES = {"attention_bias": True, "mlp_bias": True}
WIDE = {"hidden_size": 48, "head_dim": 8, "num_attention_heads": 12, "intermediate_size": 96, "vocab_size": 324}
MODELS = {
  "one KV head per device": ({}, 2),
  "three devices": ({**WIDE, "num_key_value_heads": 6}, 3), "KV heads equal heads": ({"num_key_value_heads": 4}, 4),
  "all biases, four devices": ({**BIASES, "num_key_value_heads": 4}, 4),
  "QKV biases": ({"architectures": ["Qwen2ForCausalLM"]}, 2),
  "QK norms": ({"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "num_key_value_heads": None}, 2),
  "odd vocabulary shard": ({"tie_word_embeddings": True, "vocab_size": 330}, 2),
  "odd vocabulary shard, untied": ({**WIDE, "num_key_value_heads": 3, "vocab_size": 333}, 3),
  "odd MLP shard": ({"intermediate_size": 54, "mlp_bias": True}, 2)}


@pytest.mark.parametrize("name", MODELS)
def test_model_split_over_devices_equals_reference(tmp_path, name):
  config, count = MODELS[name]
  check(tiny_model(tmp_path, **config), count, logprobs=name == "three devices")


@pytest.mark.parametrize("dtype,shards", [("float16", 3), ("bfloat16", 1)])
def test_16_bit_weights_keep_their_dtype(tmp_path, dtype, shards):
  folder = tiny_model(tmp_path, dtype=dtype, shards=shards, attention_bias=True)
  llm = check(folder, 2)
  assert {x.dtype for x in nn.state.get_parameters(llm.runner.model.modules())} == {getattr(dtypes, dtype)}


# quantized

def quantize_shards(weights, count, bits):
  """Quantize and dequantize each device's shard of each matrix, in place."""
  for key, w in weights.items():
    if not key.endswith(tuple(f"{x}.weight" for x in PROJECTIONS)): continue
    axis = int(key.endswith(("o_proj.weight", "down_proj.weight")))
    quantized = [quantize(part, bits if part.shape[1] % 8 == 0 else 8) for part in np.split(w, count, axis)]
    weights[key] = np.concatenate([dequantize_to_float32(x) for x in quantized], axis)


def dequantize_to_float32(w):
  scale, offset = [0 if x is None else np.repeat(x.astype(np.float32), w.q.shape[1] // x.shape[1], 1)
                   for x in (w.scale, w.offset)]
  return (w.q * scale + offset)[:, np.argsort(w.order)]


@pytest.mark.parametrize("bits", [8, 4])
def test_quantization_at_load_quantizes_each_shard(tmp_path, bits):
  sizes = {**SIZES, "intermediate_size": 128}   # 64 inputs per device
  weights = random_weights(tiny_config(**sizes))
  quantize_shards(weights, 2, bits)
  by_hand = tiny_model(tmp_path / "by hand", **sizes)
  write_safetensors(by_hand / "model.safetensors", weights)
  check(tiny_model(tmp_path / "float", **sizes), 2, by_hand, quantization=f"int{bits}")


@pytest.mark.parametrize("name", ["gptq, act-order", "compressed-tensors, zero points", *slow("awq", "offsets")])
def test_prequantized_matrix_is_split_or_dequantized_with_warning(tmp_path, caplog, name):
  """Matrices have 64 and 96 inputs: 2 and 3 groups of 32, or 4 and 6 groups of 16."""
  quantized, plain = quantized_model(tmp_path, name)
  group = FORMATS[name][3]
  unquantized = ["o_proj", "down_proj"] if "act-order" in name else ["down_proj"] if group == 32 else []
  with caplog.at_level("WARNING", "tinyvllm"): llm = check(quantized, 2, plain, logprobs=True)
  warnings = [x.getMessage() for x in caplog.records if "is dequantized" in x.getMessage()]
  assert len(warnings) == 2 * len(unquantized) and all("tensor_parallel_size=2" in x for x in warnings), warnings
  for layer in llm.runner.model.layers:
    kinds = {name for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if not getattr(layer, name).scales}
    assert kinds == {*unquantized}


# requests

@pytest.fixture(scope="module")
def folder(words_folder): return words_folder


def captured_llm(folder, **options):
  """An engine with one graph for all optional features."""
  llm = LLM(folder, **SMALL, **options)
  for _ in llm.capture([4], optional=True): pass
  return llm


@pytest.fixture(scope="module")
def one_device(folder): return captured_llm(folder)


@pytest.fixture(scope="module")
def module_two_devices(folder): return captured_llm(folder, tensor_parallel_size=2)


@pytest.fixture
def two_devices(module_two_devices):
  yield module_two_devices
  for name in list(module_two_devices.requests):   # so that later tests do not fail, too
    module_two_devices.abort_request(name)
  check_invariants(module_two_devices)


CASES = {"greedy": {"temperature": 0.0}, "seeded": {}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.6, "min_p": 0.02},
         "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
         "biases": {"logit_bias": {i: 4.0 for i in range(270, 290)}, "allowed_token_ids": [*range(262, 318)]},
         "bad words": {"bad_words": ["the", "dog", "house"]}, "n": {"n": 3}, "stop": {"stop": ["e", "a"]},
         "regex": {"structured_outputs": StructuredOutputsParams(regex="[a-f]{3,5} (the|cat)")},
         "choice": {"structured_outputs": StructuredOutputsParams(choice=["yes indeed", "no"])}}


@pytest.mark.parametrize("case", CASES)
def test_sampling_params_on_two_devices_equal_one_device(one_device, two_devices, case):
  prompts = [tokens(prompt(n, case)) for n in (1, 9, 4)]
  params = [SamplingParams(**{"temperature": 0.9, "seed": i, "max_tokens": 8, **CASES[case]}) for i in range(3)]
  expected, actual = [llm.generate(prompts, params, use_tqdm=False) for llm in (one_device, two_devices)]
  assert_same_outputs(actual, expected)
  texts = [[(c.token_ids, c.text) for output in outputs for c in output.outputs] for outputs in (expected, actual)]
  assert texts[0] == texts[1] and len(texts[0]) == 3 * params[0].n


def test_split_k_partial_sums_give_reference_ids(folder, monkeypatch):
  """Kernels for tensor cores give several partial sums per device; a norm adds them."""
  call = Linear.__call__
  def call_in_parts(self, x, dtype=None):
    out = call(self, x, dtype)
    return out if self.axis == 0 else (out * 0.25).cat(out * 0.75).contiguous()
  monkeypatch.setattr(Linear, "__call__", call_in_parts)
  llm = LLM(folder, **SMALL, tensor_parallel_size=2)
  assert [ids_of(x) for x in llm.generate([tokens(x) for x in PROMPTS], greedy(5), use_tqdm=False)] == [
    reference_greedy(folder, ids, 5) for ids in PROMPTS]


def test_interleaved_engines_with_one_and_two_devices_equal_reference(one_device, two_devices, folder):
  prompts = [prompt(7, "turns", i) for i in range(3)]
  streams = [llm.generate_stream(tokens(ids), greedy(5)) for llm in (one_device, two_devices) for ids in prompts]
  output_ids = [[] for _ in streams]
  for outputs in itertools.zip_longest(*streams):
    for stream_ids, output in zip(output_ids, outputs, strict=True): stream_ids += ids_of(output) if output else []
  assert output_ids == 2 * [reference_greedy(folder, ids, 5) for ids in prompts]


# vocabularies whose rows are padded


def test_padded_vocabulary_outputs_equal_one_device(tmp_path):
  """At temperature 100 all tokens are equally probable: padding would be sampled, or change log probabilities."""
  config, count = {**WIDE, "num_key_value_heads": 6, "vocab_size": 350}, 3   # padded to 384
  folder = tiny_model(tmp_path, **config)
  engines = [captured_llm(folder, tensor_parallel_size=n) for n in (1, count)]
  last = config["vocab_size"] - 1
  fields = {"logprobs": 20, "prompt_logprobs": 2, "max_tokens": 12, "ignore_eos": True}
  cases = [{"temperature": 0.0}, {"temperature": 100.0}, {"temperature": 9.0, "logit_bias": {last: 100.0}},
           {"temperature": 100.0, "allowed_token_ids": [3, last - 1, last]},
           {"temperature": 100.0, "ignore_eos": False, "structured_outputs": StructuredOutputsParams(regex="[a-f]{9}")}]
  params = [SamplingParams(**{"seed": i, **fields, **case}) for i, case in enumerate(cases)]
  prompts = [tokens([*ids, last]) for ids in [*PROMPTS, PROMPTS[0]]]
  expected, actual = [llm.generate(prompts, params, use_tqdm=False) for llm in engines]
  assert_same_outputs(actual, expected)
  assert last in ids_of(actual[2]) and {*ids_of(actual[3])} <= {3, last - 1, last}
  for a, b in zip(actual, expected, strict=True):
    for x, y in zip([*a.prompt_logprobs[1:], *a.outputs[0].logprobs], [*b.prompt_logprobs[1:], *b.outputs[0].logprobs],
                    strict=True):
      assert x.keys() == y.keys() and max(x) <= last
      np.testing.assert_allclose([x[i].logprob for i in y], [y[i].logprob for i in y], atol=1e-4)


def test_padded_vocabulary_draft_model_is_always_accepted(tmp_path):
  folder = tiny_model(tmp_path, vocab_size=323)
  llm = LLM(folder, **SMALL, speculative_config={"model": str(folder), "num_speculative_tokens": 2},
            tensor_parallel_size=2)
  counts = Counts(llm)
  params = SamplingParams(temperature=100.0, seed=3, max_tokens=40, ignore_eos=True)
  output, = llm.generate([tokens(PROMPTS[1])], params, use_tqdm=False)
  expected, = LLM(folder, **SMALL).generate([tokens(PROMPTS[1])], params, use_tqdm=False)
  _, proposed, accepted = counts()
  assert ids_of(output) == ids_of(expected) and accepted == proposed > 4


# speculative decoding

def test_ngram_drafts_on_two_devices_equal_reference(folder, monkeypatch):
  always_draft(monkeypatch)
  llm = LLM(folder, **SMALL, speculative_config=NGRAM, tensor_parallel_size=2)
  counts, ids = Counts(llm), prompt(5, "ngram")
  ids = [*ids, *reference_greedy(folder, ids, 12)]
  ids = [*ids, *ids[:5]]   # the drafts continue as after the first occurrence
  output, = llm.generate(tokens(ids), greedy(12), use_tqdm=False)
  assert ids_of(output) == reference_greedy(folder, ids, 12)
  assert counts()[1] > 0


def test_draft_model_is_unsplit_on_first_device(folder, tmp_path):
  """It has one KV head, which two devices could not split."""
  draft_folder = tiny_model(tmp_path, 1, num_key_value_heads=1, num_hidden_layers=1)
  config = {"model": str(draft_folder), "num_speculative_tokens": 2}
  llm = LLM(folder, **SMALL, speculative_config=config, tensor_parallel_size=2)
  target, draft = llm.runners
  tensors = [*nn.state.get_parameters(draft.model.modules()), *itertools.chain(*draft.kv_caches)]
  assert {x.device for x in tensors} == {"CPU"}
  assert {x.device for x in itertools.chain(*target.kv_caches)} == {("CPU", "CPU:1")}
  counts = Counts(llm)
  outputs = llm.generate([tokens(ids) for ids in PROMPTS], greedy(8), use_tqdm=False)
  assert [ids_of(x) for x in outputs] == [reference_greedy(folder, ids, 8) for ids in PROMPTS]
  assert counts()[1] > 0


# failed steps

@pytest.mark.parametrize("place", ["launch", "compute", "read", "amid update"])
def test_failed_step_on_two_devices_loses_and_repeats_no_token(two_devices, folder, monkeypatch, place):
  prompts = {name: prompt(n, place, name) for name, n in (("a", 3), ("b", 10), ("c", 1))}
  for number in (1, 3):
    for name, ids in prompts.items(): two_devices.add_request(name, tokens(ids), greedy(4))
    with monkeypatch.context() as patch:
      break_steps(two_devices, patch, fail_once(place, number))
      last, failures = finish(two_devices)
    assert failures == 1
    assert {name: ids_of(output) for name, output in last.items()} == {
      name: reference_greedy(folder, ids, 4) for name, ids in prompts.items()}


# shards and memory

def shards_of(tensor):
  """Return each device's shard of a tensor."""
  return [Tensor(tensor.uop.mselect(i)).numpy() for i in range(len(tensor.device))]


def test_matrices_are_split_and_norms_replicated(tmp_path):
  """Shards consist of whole tiles of 16: nothing is padded."""
  folder = tiny_model(tmp_path, num_key_value_heads=4, **BIASES)
  models = {n: LLM(folder, **SMALL, tensor_parallel_size=n).runner.model for n in (1, 2, 4)}
  for n in (2, 4):
    for whole, part in zip(models[1].modules(), models[n].modules(), strict=True):
      assert whole.sources.keys() == part.sources.keys()
      tensors = [nn.state.get_state_dict(x) for x in (whole, part)]
      for kind, tensor in tensors[1].items():
        assert tensor.device == device_names(n)
        split = isinstance(part, Linear) and (kind == "weight" or part.axis == 0)
        assert tensor.nbytes() * (n if split else 1) == tensors[0][kind].nbytes(), (part.sources, kind)
        buffers = tensor.uop.buffer.bufs
        assert [(x.device, x.nbytes) for x in buffers] == [(name, tensor.nbytes()) for name in device_names(n)]


def test_two_devices_hold_twice_the_blocks_of_one(folder, monkeypatch):
  """Each device also holds half the weights. All devices of a CPU share the host's memory."""
  plain = LLM(folder, **SMALL)
  one_sequence = SMALL["max_model_len"] // SMALL["block_size"]
  block = sum(x.nbytes() for cache in plain.runner.kv_caches for x in cache) // plain.runner.num_blocks
  def weights(llm): return sum(x.nbytes() for part in llm.runner.model.modules() for x in nn.state.get_parameters(part))
  half_weights = weights(LLM(folder, **SMALL, tensor_parallel_size=2))
  assert weights(plain) / 2 < half_weights < 0.52 * weights(plain), "norms are whole"
  blocks = {}
  for count, weights_per_device in ((1, weights(plain)), (2, half_weights)):
    free = count * (weights_per_device + (one_sequence + 4) * block)   # one_sequence + 4 whole blocks per device
    monkeypatch.setattr("tinyvllm_extra.kernels.FastBackend.free_memory", lambda self, name, free=free: free)
    llm = LLM(folder, **SMALL, gpu_memory_utilization=1.0, tensor_parallel_size=count)
    blocks[count] = llm.runner.num_blocks
    num_bytes = [x.nbytes() for cache in llm.runner.kv_caches for x in cache]
    assert sum(num_bytes) == blocks[count] * block // count
  assert blocks == {1: one_sequence + 4, 2: 2 * (one_sequence + 4)}


# errors

def check_refused(*parts, model=None, **options):
  with pytest.raises(ValueError) as error: LLM(model, **SMALL, **options)
  message = str(error.value)
  for part in parts: assert part in message, f"{part} is not in: {message}"
  assert len(message.splitlines()) == 1


@pytest.mark.parametrize("config,count,valid_counts", [
  ({"num_key_value_heads": 1}, 2, "1"), ({"num_key_value_heads": 2}, 4, "1 or 2"),
  ({"num_key_value_heads": 4, "intermediate_size": 66}, 4, "1 or 2"),
  ({"num_attention_heads": 8, "num_key_value_heads": 8}, 3, "1 or 2 or 4 or 8")],
  ids=["MQA", "KV heads", "MLP", "heads"])
def test_indivisible_model_size_raises_with_valid_counts(tmp_path, config, count, valid_counts):
  config = tiny_config(**config)
  names = "num_attention_heads", "num_key_value_heads", "intermediate_size"
  check_refused(f"tensor_parallel_size={count} must divide", *[f"'{x}': {config[x]}" for x in names],
                f": use {valid_counts}", model=tiny_model(tmp_path, **config), tensor_parallel_size=count)


@pytest.mark.parametrize("count,limit", [
  (0, "must be between 1 and 8"), (-1, "must be between 1 and 8"), (9, "must be between 1 and 8"),
  (True, "must be of type int"), ("2", "must be of type int"), (2.0, "must be of type int"),
  (None, "must be of type int")], ids=repr)
def test_invalid_tensor_parallel_size_raises(count, limit):
  check_refused(f"tensor_parallel_size={count!r} {limit}", tensor_parallel_size=count)


def test_enforce_eager_on_two_devices_raises():
  check_refused("tensor_parallel_size=2", "enforce_eager=False", enforce_eager=True, tensor_parallel_size=2)
  assert LLMConfig(enforce_eager=True, tensor_parallel_size=1).enforce_eager


class FakeCuda:
  """A stub of tinygrad's Device with `number` GPUs."""
  DEFAULT = "CUDA"
  default = property(lambda self: SimpleNamespace(count=lambda: self.number))
  canonicalize = staticmethod(Device.canonicalize)
  def __init__(self, number): self.number = number
  def __getitem__(self, name): return SimpleNamespace(device=name, cu_device=int((name + ":0").split(":")[1]))


def test_check_peers_too_few_gpus_or_no_peer_access_raises(monkeypatch):
  """The driver reports access for each ordered pair of GPUs."""
  monkeypatch.setattr("tinyvllm_extra.parallel.Device", FakeCuda(3))
  queries, unreadable = [], {(1, 0)}

  def can_access(result, reader, owner):
    queries.append((reader, owner))
    result._obj.value = (reader, owner) not in unreadable
    return 0
  monkeypatch.setattr(cuda, "cuDeviceCanAccessPeer", can_access)
  with pytest.raises(ValueError, match=r"^tensor_parallel_size=4 must be at most 3\b"):
    check_peers(4)
  with pytest.raises(ValueError, match="^tensor_parallel_size=2 must be 1: CUDA:1 cannot read CUDA's"):
    check_peers(2)
  unreadable.clear()
  queries.clear()
  check_peers(3)
  assert sorted(queries) == sorted(itertools.permutations(range(3), 2))


def test_backend_of_one_device_refuses_two(folder):
  run = process("generate", "a", "--model", folder, *FLAGS, "--tensor-parallel-size", "2", DEV="PYTHON")
  assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
  assert run.stderr.splitlines()[-1].startswith("tinyvllm: tensor_parallel_size=2 must be 1 on PYTHON")


# the command line

def test_generate_command_on_two_devices_gives_same_output(folder, capsys):
  texts = []
  for count in ("1", "2"):
    flags = ["--model", str(folder), *FLAGS, "--max-tokens", "6", "--tensor-parallel-size", count]
    assert main(["generate", "the cat", *flags]) == 0
    texts.append(capsys.readouterr().out)
  assert texts[0] == texts[1] and len(texts[0]) > len("the cat\n")


# units

def multi_device_tensor(arrays):
  """Return a tensor with one of the arrays on each device."""
  names = device_names(len(arrays))
  open_device()
  tensors = [Tensor(np.ascontiguousarray(x), device=name).contiguous().realize()
             for name, x in zip(names, arrays, strict=True)]
  return Tensor(UOp.mstack(*[x.uop for x in tensors])).clone().realize()


def normal(*shape, seed): return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("rows,size", [(1, 48), (5, 100)])
def test_norm_adds_partial_sums_of_all_devices(count, rows, size):
  x, weight = normal(rows, size, seed=0), normal(size, seed=1)
  deltas = [normal(rows, size, seed=2 + i) for i in range(count)]
  norm = Norm("norm", size, 1e-5, dtypes.float32)
  norm.weight = multi_device_tensor([weight] * count)
  summed, normed = norm.add(multi_device_tensor([x] * count), multi_device_tensor(deltas))
  Tensor.realize(summed, normed)
  total = x + sum(deltas)
  expected = total / np.sqrt((total * total).mean(-1, keepdims=True) + 1e-5) * weight
  for part in shards_of(summed): np.testing.assert_allclose(part.reshape(total.shape), total, atol=1e-5)
  for part in shards_of(normed): np.testing.assert_allclose(part, expected, atol=1e-5)


def random_quantized(rng, out, inputs, groups, bits, offset, ordered=True):
  high = 16 if bits == 4 else 128
  q = rng.integers(0, high, (out, inputs)).astype(np.uint8 if bits == 4 else np.int8)
  scale, zero = [rng.random((out, groups)).astype(np.float16) for _ in range(2)]
  order = np.arange(inputs) if ordered else rng.permutation(inputs)
  return Quantized(q, scale, zero if offset else None, order)


@pytest.mark.parametrize("bits,offset", [(8, False), (4, True)])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("groups", [1, 12])
@pytest.mark.parametrize("axis", [0, 1])
def test_split_quantized_parts_concatenate_to_whole_matrix(bits, offset, count, groups, axis):
  w = random_quantized(np.random.default_rng(0), 48, 96, groups, bits, offset)
  parts = split(w, count, axis)
  assert all(isinstance(x, Quantized) and (x.offset is None) != offset and x.q.dtype == w.q.dtype for x in parts)
  assert {x.q.shape for x in parts} == {(48 // count, 96) if axis == 0 else (48, 96 // count)}
  assert all(np.array_equal(x.order, np.arange(x.q.shape[1])) for x in parts)
  np.testing.assert_array_equal(np.concatenate([dequantize(x) for x in parts], axis), dequantize(w))


