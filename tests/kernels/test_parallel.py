"""tensor_parallel_size and pipeline_parallel_size: several devices give the outputs of one, each holds only its shard
or its layers, and models that cannot be split are refused. A CPU provides any number of devices: CPU, CPU:1, …"""
import itertools
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.commands import error_line, flags, process
from helpers.data import read_data
from helpers.engines import check_invariants, greedy, ids_of, ids_of_batch, prompt, set_overlap, tokens
from helpers.faults import break_steps, finish_broken, run_random
from helpers.models import random_weights, tiny_config, tiny_model
from helpers.parameters import slow
from helpers.quantized_models import FORMATS, SIZES, is_projection, quantized_model
from helpers.reference import log_softmax, reference_greedy, reference_logits
from helpers.speculation import CASES as SPECULATION_CASES, NGRAM, always_draft, check_same
from tinygrad import Device, dtypes, nn
from tinygrad.device import DepsTracker
from tinygrad.engine.jit import get_call_outs_ins, resolve_params, unwrap_multi
from tinygrad.runtime.autogen import cuda
from tinygrad.uop.ops import Ops

from tinyvllm import LLM, Backend, InputError, SamplingParams, StructuredOutputsParams
from tinyvllm_extra.kernels import drivers, parallel
from tinyvllm_extra.kernels.matmul import FastLinear
from tinyvllm_extra.kernels.parallel import ShardedDevices, Stages, check_devices, device_names
from tinyvllm_extra.formats.quantization import dequantize, quantize

KERNEL_CASES = read_data("kernel_cases.json")

pytestmark = pytest.mark.skipif(Device.DEFAULT != "CPU", reason="the number of other devices is fixed")

# Steps of four tokens: longer prompts of PROMPTS are prefilled in chunks, together with decodes of shorter ones
SMALL = {"dtype": "float32", "max_model_len": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 4}
PROMPTS = [prompt(n, "jobs") for n in (1, 11, 3, 6)]


@pytest.fixture(scope="module", autouse=True)
def micro_batches():
  """Layers on several devices get the tokens of a step in two micro-batches."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(parallel, "MICRO_BATCH", SMALL["max_num_batched_tokens"] // 2)
    yield


def check(model, count, reference=None, prompts=PROMPTS, **options):
  """Check that `count` devices give the reference's greedy ids and log probabilities, and return the engine.
  reference: a float32 model with the same outputs."""
  options = {**SMALL, "activation_quantization": "none", "tensor_parallel_size": count, **options}
  llm, reference = LLM(model, **options), reference or model
  outputs = llm.generate([tokens(ids) for ids in prompts], greedy(8, logprobs=0), use_tqdm=False)
  for ids, output in zip(prompts, outputs, strict=True):
    output_ids = ids_of(output)
    assert output_ids == reference_greedy(reference, ids, 8)
    expected = log_softmax(reference_logits(reference, [*ids, *output_ids])[len(ids) - 1:-1])
    logprobs = [entry.logprob for entries in output.outputs[0].logprobs for entry in entries.values()]
    np.testing.assert_allclose(logprobs, expected.max(1), atol=1e-4)
  check_invariants(llm)
  return llm


# model variants

MODELS = KERNEL_CASES["split models"]   # config, number of devices


@pytest.mark.parametrize("name", MODELS)
def test_model_split_over_devices_equals_reference(tmp_path, name):
  config, count = MODELS[name]
  llm = check(tiny_model(tmp_path, **config), count)
  parameters = nn.state.get_state_dict([*llm.runner.model.modules()])
  kinds = {x.dtype for name, x in parameters.items() if not name.endswith("bias")}
  assert kinds == {getattr(dtypes, config.get("dtype", "float32"))}, "weights keep the dtype of their files"


@pytest.mark.parametrize("count", [2, 3, 4])
def test_layers_of_several_devices_equal_reference(tmp_path, count):
  """A prompt in steps of up to 8 micro-batches, whose tokens read the keys and values of the earlier ones."""
  prompts = [prompt(n, "layers") for n in (1, 37, 20)]
  options = {"pipeline_parallel_size": count, "max_num_batched_tokens": 16}
  runner = check(tiny_model(tmp_path, num_hidden_layers=6), 1, prompts=prompts, **options).runner
  for part in zip(runner.model.layers, runner.kv_caches, strict=True):
    assert len({x.device for x in nn.state.get_parameters(part)}) == 1


@pytest.mark.parametrize("count", [2, 3, 4])
def test_decoding_in_groups_equals_reference(tmp_path, monkeypatch, count):
  """Few blocks, so that sequences are preempted while their groups are in flight; steps fail."""
  rng = random.Random(count)
  folder = tiny_model(tmp_path, num_hidden_layers=5)
  llm = LLM(folder, **{**SMALL, "max_num_seqs": 9, "max_num_batched_tokens": 16}, num_gpu_blocks_override=26,
            pipeline_parallel_size=count)
  set_overlap(monkeypatch, llm.runner, "early")
  break_steps(llm, monkeypatch, lambda place: rng.random() < 0.01)
  def make_request(): return prompt(rng.randint(1, 20), "groups"), greedy(rng.randint(1, 40))
  requests, last, failures = run_random(llm, rng, 250, make_request)
  assert failures and llm.get_metrics()["num_preemptions"] and llm.runner.slots.next > 200
  for name, (ids, params) in requests.items():
    assert ids_of(last[name]) == reference_greedy(folder, ids, params.max_tokens)


def calls(linear):
  """Yield the kernels and copies of a captured step."""
  for call in linear.src:
    if call.src[0].op is Ops.CUSTOM_FUNCTION: yield from calls(call.src[0].src[0])   # a graph
    else: yield call


@pytest.mark.parametrize("count", [2, 3])
def test_stages_of_a_slot_do_not_wait_for_each_other(tmp_path, monkeypatch, count):
  """The longest chain of kernels that need each other's results is little more than a stage's kernels."""
  llm = LLM(tiny_model(tmp_path, num_hidden_layers=4 * count), **SMALL, pipeline_parallel_size=count)
  set_overlap(monkeypatch, llm.runner, "early")
  llm.generate([tokens(ids) for ids in PROMPTS], greedy(4), use_tqdm=False)
  (_, graph), = llm.runner.slots.graphs.values()
  tracker, ends, devices = DepsTracker(), {}, []   # ends: by kernel: its place in the longest chain
  for call in calls(graph.captured._linear):
    for buffers, _ in unwrap_multi(call, resolve_params(call, ())):
      kernel = object()
      waits = tracker.access_resources([x.ensure_allocated() for x in buffers], [*get_call_outs_ins(call)[0]], kernel)
      ends[kernel] = 1 + max([ends[x] for x in waits], default=0)
      devices.append(buffers[0].device)
  assert max(ends.values()) < 10 + max(map(devices.count, llm.devices)) < len(devices)


# quantized

@pytest.mark.parametrize("bits", [8, 4])
def test_quantization_at_load_quantizes_each_shard(tmp_path, bits):
  sizes = {**SIZES, "intermediate_size": 128}   # 64 inputs per device
  weights = random_weights(tiny_config(**sizes))
  for key in filter(is_projection, weights):
    axis = int(key.endswith(("o_proj.weight", "down_proj.weight")))
    shards = [dequantize(quantize(x, bits), np.float32) for x in np.split(weights[key], 2, axis)]
    weights[key] = np.concatenate(shards, axis)
  by_hand = tiny_model(tmp_path / "by hand", weights=weights, **sizes)
  check(tiny_model(tmp_path / "float", **sizes), 2, by_hand, quantization=f"int{bits}")


@pytest.mark.parametrize("name", ["gptq, act-order", "compressed-tensors, zero points", *slow("awq")])
def test_prequantized_matrix_is_split_or_dequantized_with_warning(tmp_path, caplog, name):
  """Matrices have 64 and 96 inputs: 2 and 3 groups of 32, or 4 and 6 groups of 16."""
  quantized, plain = quantized_model(tmp_path, name)
  unquantized = ["o_proj", "down_proj"] if "act-order" in name else ["down_proj"] if FORMATS[name][3] == 32 else []
  with caplog.at_level("WARNING", "tinyvllm"): llm = check(quantized, 2, plain)
  warnings = [x.getMessage() for x in caplog.records if "is dequantized" in x.getMessage()]
  assert len(warnings) == 2 * len(unquantized) and all("tensor_parallel_size=2" in x for x in warnings), warnings
  for layer in llm.runner.model.layers:
    kinds = {name for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if not getattr(layer, name).scales}
    assert kinds == {*unquantized}


# requests

def captured_llm(folder, **options):
  """An engine with one graph for all optional features."""
  llm = LLM(folder, **SMALL, **options)
  for _ in llm.capture([4], optional=True): pass
  return llm


@pytest.fixture(scope="module")
def one_device(words_folder): return captured_llm(words_folder)


@pytest.fixture(scope="module", params=["tensor", "pipeline", "pipeline, early"])
def two_devices(request, words_folder):
  kind, _, overlaps = request.param.partition(", ")
  llm = captured_llm(words_folder, **{f"{kind}_parallel_size": 2})
  with pytest.MonkeyPatch.context() as patch:
    set_overlap(patch, llm.runner, overlaps)
    yield llm


CASES = {**SPECULATION_CASES, "stop": {"stop": ["e", "a"]},
         "choice": {"structured_outputs": StructuredOutputsParams(choice=["yes indeed", "no"])}}


@pytest.mark.parametrize("case", CASES)
def test_sampling_params_on_two_devices_equal_one_device(one_device, two_devices, case):
  prompts = [tokens(prompt(n, case)) for n in (1, 9, 4)]
  params = [SamplingParams(**{"temperature": 0.9, "seed": i, "max_tokens": 20, **CASES[case]}) for i in range(3)]
  expected, actual = [llm.generate(prompts, params, use_tqdm=False) for llm in (one_device, two_devices)]
  check_same(actual, expected)
  assert [len(output.outputs) for output in actual] == [params[0].n] * 3
  check_invariants(two_devices)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}], ids=str)
def test_split_k_partial_sums_give_reference_ids(words_folder, monkeypatch, options):
  """Kernels for tensor cores give several partial sums per device; a norm adds them."""
  call = FastLinear.__call__
  def call_in_parts(self, *arguments, **options):
    out = call(self, *arguments, **options)
    return out if self.axis == 0 else (out * 0.25).cat(out * 0.75).contiguous()
  monkeypatch.setattr(FastLinear, "__call__", call_in_parts)
  llm = check(words_folder, 2, **options)
  set_overlap(monkeypatch, llm.runner, "early")
  assert ids_of_batch(llm, PROMPTS, greedy(8)) == [reference_greedy(words_folder, ids, 8) for ids in PROMPTS]


def test_interleaved_engines_with_one_and_two_devices_equal_reference(one_device, two_devices, words_folder):
  prompts = [prompt(7, "turns", i) for i in range(3)]
  streams = [llm.generate_stream(tokens(ids), greedy(5)) for llm in (one_device, two_devices) for ids in prompts]
  outputs_by_stream = zip(*itertools.zip_longest(*streams), strict=True)
  output_ids = [[i for output in outputs if output for i in ids_of(output)] for outputs in outputs_by_stream]
  assert output_ids == 2 * [reference_greedy(words_folder, ids, 5) for ids in prompts]


# vocabularies whose rows are padded

def test_padded_vocabulary_outputs_equal_one_device(tmp_path):
  """At temperature 100 all tokens are equally probable: padding would be sampled, or change log probabilities."""
  folder, last = tiny_model(tmp_path, hidden_size=48, head_dim=8, num_attention_heads=12, num_key_value_heads=6,
                            intermediate_size=96, vocab_size=350), 349   # padded to 384
  fields = {"logprobs": 20, "prompt_logprobs": 2, "max_tokens": 12, "ignore_eos": True}
  cases = [{"temperature": 0.0}, {"temperature": 100.0}, {"temperature": 9.0, "logit_bias": {last: 100.0}},
           {"temperature": 100.0, "allowed_token_ids": [3, last - 1, last]},
           {"temperature": 100.0, "ignore_eos": False, "structured_outputs": StructuredOutputsParams(regex="[a-f]{9}")}]
  params = [SamplingParams(**{"seed": i, **fields, **case}) for i, case in enumerate(cases)]
  prompts = [tokens([*ids, last]) for ids in [*PROMPTS, PROMPTS[0]]]
  expected, actual = [captured_llm(folder, tensor_parallel_size=n).generate(prompts, params, use_tqdm=False)
                      for n in (1, 3)]
  check_same(actual, expected)
  assert last in ids_of(actual[2]) and {*ids_of(actual[3])} <= {3, last - 1, last}
  for output in actual:
    assert max(map(max, [*output.prompt_logprobs[1:], *output.outputs[0].logprobs])) <= last


def test_padded_vocabulary_draft_model_is_always_accepted(tmp_path):
  folder = tiny_model(tmp_path, vocab_size=323)
  llm = LLM(folder, **SMALL, speculative_config={"model": str(folder), "num_speculative_tokens": 2},
            tensor_parallel_size=2)
  params = SamplingParams(temperature=100.0, seed=3, max_tokens=40, ignore_eos=True)
  check_same(*[x.generate(tokens(PROMPTS[1]), params, use_tqdm=False) for x in (llm, LLM(folder, **SMALL))])
  assert num_drafts(llm, "accepted") == num_drafts(llm, "draft") > 4


# speculative decoding

def num_drafts(llm, kind): return llm.get_metrics()[f"spec_decode_num_{kind}_tokens"]


def test_ngram_drafts_on_two_devices_equal_reference(words_folder, monkeypatch):
  always_draft(monkeypatch)
  ids = prompt(5, "ngram")
  ids = [*ids, *reference_greedy(words_folder, ids, 12), *ids]   # the drafts continue as after the first occurrence
  assert num_drafts(check(words_folder, 2, prompts=[ids], speculative_config=NGRAM), "draft") > 0


def test_draft_model_is_unsplit_on_first_device(words_folder, tmp_path):
  """It has one KV head, which two devices could not split."""
  draft_folder = tiny_model(tmp_path, 1, num_key_value_heads=1, num_hidden_layers=1)
  llm = check(words_folder, 2, speculative_config={"model": str(draft_folder), "num_speculative_tokens": 2})
  target, draft = llm.runners
  tensors = [*nn.state.get_parameters(draft.model.modules()), *itertools.chain(*draft.kv_caches)]
  assert {x.device for x in tensors} == {"CPU"}
  assert {x.device for x in itertools.chain(*target.kv_caches)} == {("CPU", "CPU:1")}
  assert num_drafts(llm, "draft") > 0


# failed steps

@pytest.mark.parametrize("place", ["launch", "compute", "read", "amid update"])
def test_failed_step_on_two_devices_loses_and_repeats_no_token(two_devices, words_folder, place):
  prompts = {name: prompt(n, place, name) for name, n in (("a", 3), ("b", 10), ("c", 1))}
  for number in (1, 3):
    last = finish_broken(two_devices, place, number, {name: (tokens(ids), greedy(4)) for name, ids in prompts.items()})
    assert {name: ids_of(output) for name, output in last.items()} == {
      name: reference_greedy(words_folder, ids, 4) for name, ids in prompts.items()}


# shards and memory

def test_matrices_are_split_and_norms_replicated(tmp_path):
  """Shards consist of whole tiles of 16: nothing is padded."""
  folder = tiny_model(tmp_path, num_key_value_heads=4, attention_bias=True, mlp_bias=True)
  whole, *models = [LLM(folder, **SMALL, tensor_parallel_size=n).runner.model for n in (1, 2, 4)]
  for n, model in zip((2, 4), models, strict=True):
    for one, part in zip(whole.modules(), model.modules(), strict=True):
      assert one.sources.keys() == part.sources.keys()
      tensors = nn.state.get_state_dict(one)
      for kind, tensor in nn.state.get_state_dict(part).items():
        is_split = isinstance(part, FastLinear) and (kind == "weight" or part.axis == 0)
        size = tensors[kind].nbytes() // (n if is_split else 1)
        assert [(x.device, x.nbytes) for x in tensor.uop.buffer.bufs] == [(name, size) for name in device_names(n)]


def test_two_devices_hold_twice_the_blocks_of_one(words_folder, monkeypatch):
  """Each device also holds half the weights. All devices of a CPU share the host's memory."""
  def kv_bytes(llm): return sum(x.nbytes() for x in itertools.chain(*llm.runner.kv_caches))
  engines = [LLM(words_folder, **SMALL, tensor_parallel_size=count) for count in (1, 2)]
  weights = [sum(x.nbytes() for x in nn.state.get_parameters(llm.runner.model.modules())) for llm in engines]
  assert weights[0] / 2 < weights[1] < 0.52 * weights[0], "norms are whole"
  num_blocks = SMALL["max_model_len"] // SMALL["block_size"] + 4   # one sequence and 4 blocks
  size = num_blocks * kv_bytes(engines[0]) // engines[0].runner.num_blocks
  for count, weight in enumerate(weights, 1):
    free = count * (weight + size)
    report = drivers.MemoryReport(free + drivers.RESERVE, free + drivers.RESERVE)
    monkeypatch.setattr(drivers, "host_memory", lambda report=report: report)
    llm = LLM(words_folder, **SMALL, gpu_memory_utilization=1.0, tensor_parallel_size=count)
    assert llm.runner.num_blocks == count * num_blocks and kv_bytes(llm) == size


def test_layers_are_on_devices_by_memory(tmp_path, monkeypatch):
  """The layers of a model that is larger than one device's memory; each device has room for the blocks of its own."""
  folder = tiny_model(tmp_path, num_hidden_layers=7, tie_word_embeddings=True)
  def used(llm):
    tensors = [*nn.state.get_parameters(llm.runner.model.modules()), *itertools.chain(*llm.runner.kv_caches)]
    return [sum(x.nbytes() for x in tensors if x.device == name) for name in llm.devices]
  whole, = used(LLM(folder, **SMALL, num_gpu_blocks_override=17))
  free = int(0.62 * whole)
  report = drivers.MemoryReport(2 * free + drivers.RESERVE, 2 * free + drivers.RESERVE)
  monkeypatch.setattr(drivers, "host_memory", lambda: report)
  llm = LLM(folder, **SMALL, gpu_memory_utilization=1.0, pipeline_parallel_size=2)
  assert 0.9 * free < max(used(llm)) <= free < whole and min(used(llm)) > 0.4 * whole
  assert 17 < llm.runner.num_blocks < 60


# errors

@pytest.mark.parametrize("config,count,valid_counts", KERNEL_CASES["indivisible models"])
def test_indivisible_model_size_raises_with_valid_counts(tmp_path, config, count, valid_counts):
  config = tiny_config(**config)
  sizes = {x: config[x] for x in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
  message = f"tensor_parallel_size={count} must divide each of {sizes}: use {valid_counts}"
  with pytest.raises(InputError, match=f"{re.escape(message)}$"):
    LLM(tiny_model(tmp_path, **config), **SMALL, tensor_parallel_size=count)


@pytest.mark.parametrize("options,message", [({"enable_lora": True}, " with enable_lora"),
                                             ({"backend": Backend()}, ": Backend's Linear, ")])
def test_option_on_two_devices_raises(words_folder, options, message):
  with pytest.raises(InputError, match=f"^pipeline_parallel_size=2 must be 1{message}"):
    LLM(words_folder, **SMALL, **options, pipeline_parallel_size=2)


class FakeCuda:
  """A stub of tinygrad's Device with three GPUs."""
  DEFAULT, default, canonicalize = "CUDA", SimpleNamespace(count=lambda: 3), Device.canonicalize
  def __class_getitem__(cls, name): return SimpleNamespace(device=name, cu_device=int(f"{name}:0".split(":")[1]))


def test_too_few_gpus_or_no_peer_access_raises(monkeypatch):
  """The driver reports access for each ordered pair of GPUs."""
  for module in (parallel, drivers): monkeypatch.setattr(module, "Device", FakeCuda)
  queries, unreadable = [], {(1, 0)}

  def can_access(result, reader, owner):
    queries.append((reader, owner))
    result._obj.value = (reader, owner) not in unreadable
    return 0
  monkeypatch.setattr(cuda, "cuDeviceCanAccessPeer", can_access)
  def check(devices, count): check_devices(devices(device_names(count)))
  with pytest.raises(InputError, match=r"^tensor_parallel_size=4 must be at most 3\b"): check(ShardedDevices, 4)
  with pytest.raises(InputError, match="^tensor_parallel_size=2 must be 1: CUDA:1 cannot read CUDA's"):
    check(ShardedDevices, 2)
  with pytest.raises(InputError, match=r"^pipeline_parallel_size=4 must be at most 3\b"): check(Stages, 4)
  unreadable.clear()
  queries.clear()
  check(Stages, 3)   # they need no access
  check(ShardedDevices, 3)
  assert sorted(queries) == sorted(itertools.permutations(range(3), 2))


def test_backend_of_one_device_refuses_two(words_folder):
  """On the command line."""
  run = process("generate", "a", "--model", words_folder, *flags(**SMALL, tensor_parallel_size=2), DEV="PYTHON")
  assert error_line(run).startswith("tinyvllm: tensor_parallel_size=2 must be 1 on PYTHON")
