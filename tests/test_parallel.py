"""tensor_parallel_size: devices that share every layer say what one says, each holds its part and no more, and what
cannot be shared is refused. A CPU is as many devices as are asked for: CPU, CPU:1, CPU:2, …"""
import asyncio
import itertools
import logging
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from reference import (
  VOCAB,
  LogitsRecorder,
  check_invariants,
  load,
  random_weights,
  reference_greedy,
  reference_logits,
  run_to_end,
  same_outputs,
  slow,
  slow_but,
  tiny_config,
  tiny_model,
  write_safetensors,
)
from test_cli import process
from test_failed_steps import PLACES, break_steps, finish, once
from test_quantization import FORMATS, GPTQ, PROJECTIONS, SIZES, gptq, matrix, numbers_of, quantized_model
from test_speculation import NGRAM, Counts, hopeful
from test_weights import MEASURE
from safetensors.numpy import load_file, save_file
from tinygrad import Device, Tensor, UOp, dtypes, nn
from tinygrad.runtime.autogen import cuda

from tinyvllm import LLM, SamplingParams, StructuredOutputsParams
from tinyvllm.config import EngineConfig
from tinyvllm_extra.kernels import prepare_device as open_device
from tinyvllm_extra.cli import main
from tinyvllm_extra.kernels.matmul import Linear, Norm, pack
from tinyvllm_extra.parallel import check_peers, device_names
from tinyvllm_extra.quantization import Quantized, dequantize, quantize, split
from tinyvllm_extra.server import AsyncLLM

pytestmark = pytest.mark.skipif(Device.DEFAULT != "CPU", reason="others have as many devices as there are")

# Steps of four tokens: the longer prompts of JOBS come in chunks, beside the shorter ones' next tokens
SMALL = {"dtype": "float32", "max_model_len": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 4}
FLAGS = [x for name, value in SMALL.items() for x in ("--" + name.replace("_", "-"), str(value))]


def prompt(length, *salt):
  """Random words, which no other salt has."""
  rng = random.Random(str(salt))
  return [rng.randrange(259, 320) for _ in range(length)]


def tokens(ids): return {"prompt_token_ids": ids}
def ids_of(output): return output.outputs[0].token_ids
def greedy(n, **fields): return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, **fields)


JOBS = [prompt(n, "jobs") for n in (1, 11, 3, 6)]


def logprobs_of(logits):
  x = logits - logits.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def check(model, count, folder=None, close=False, **options):
  """Devices that share a model give the reference's greedy ids, and if asked, as that takes a second to capture, its
  log probabilities. folder: of a model in float32 that says the same. Returns the engine."""
  llm = LLM(model, **{**SMALL, **options}, tensor_parallel_size=count)
  outputs = llm.generate([tokens(ids) for ids in JOBS], greedy(5, logprobs=0 if close else None), use_tqdm=False)
  for job, output in zip(JOBS, outputs, strict=True):
    ids = ids_of(output)
    assert ids == reference_greedy(folder or model, job, 5)
    if not close: continue
    expected = logprobs_of(reference_logits(folder or model, [*job, *ids])[len(job) - 1:-1])
    got = [of[i].logprob for i, of in zip(ids, output.outputs[0].logprobs, strict=True)]
    np.testing.assert_allclose(got, expected[np.arange(5), ids], atol=1e-4)
  check_invariants(llm)
  return llm


# models of every kind

BIASES = {"attention_bias": True, "mlp_bias": True}
WIDE = {"hidden_size": 48, "head_dim": 8, "num_attention_heads": 12, "intermediate_size": 96, "vocab_size": 324}
MODELS = {
  "a K/V head of two each": ({}, 2), "two K/V heads each, of three": ({**WIDE, "num_key_value_heads": 4}, 2),
  "three devices": ({**WIDE, "num_key_value_heads": 6}, 3), "as many K/V heads": ({"num_key_value_heads": 4}, 4),
  "all biases": (BIASES, 2), "all biases, four devices": ({**BIASES, "num_key_value_heads": 4}, 4),
  "biases of q, k and v": ({"architectures": ["Qwen2ForCausalLM"]}, 2),
  "norms of q and k": ({"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "num_key_value_heads": None}, 2),
  "tied embeddings": ({"tie_word_embeddings": True}, 2),
  "an odd part of the vocabulary": ({"tie_word_embeddings": True, "vocab_size": 330}, 2),
  "an odd part of the vocabulary, not tied": ({**WIDE, "num_key_value_heads": 3, "vocab_size": 333}, 3),
  "an odd part of the MLP": ({"intermediate_size": 54, "mlp_bias": True}, 2)}


# Others have what these have, too
RARE = "all biases", "tied embeddings", "two K/V heads each, of three", "as many K/V heads"


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in RARE)) for x in MODELS])
def test_devices_that_share_a_model_say_what_numpy_says(tmp_path, name):
  config, count = MODELS[name]
  check(tiny_model(tmp_path, **config), count)


def random_model(rng):
  """A config, and by how many devices it can be shared."""
  count, D = rng.choice((2, 3, 4)), rng.choice((4, 8, 16))
  KV = count * rng.randint(1, 2)
  kind = rng.choice(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"))
  return {"architectures": [kind], "head_dim": D, "num_key_value_heads": KV,
          "num_attention_heads": KV * rng.randint(1, 3), "hidden_size": 8 * rng.randint(2, 6),
          "intermediate_size": count * rng.randint(5, 40), "num_hidden_layers": rng.randint(1, 3),
          "vocab_size": count * rng.randint(-(-VOCAB // count), 400 // count), "mlp_bias": rng.random() < 0.5,
          "tie_word_embeddings": rng.random() < 0.5, "attention_bias": kind[0] == "L" and rng.random() < 0.7}, count


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 6))])
def test_models_of_random_sizes_say_what_numpy_says(tmp_path, seed):
  config, count = random_model(random.Random(seed))
  check(tiny_model(tmp_path, seed, **config), count, close=True)


@pytest.mark.slow
def test_eight_devices_are_the_most(tmp_path):
  check(tiny_model(tmp_path, num_attention_heads=8, num_key_value_heads=8), 8)


@pytest.mark.parametrize("dtype,shards", [("float16", 3), ("bfloat16", 1)])
def test_files_of_16_bits_stay_so_whole_or_sharded(tmp_path, dtype, shards):
  folder = tiny_model(tmp_path, dtype=dtype, shards=shards, attention_bias=True)
  llm = check(folder, 2)
  assert {x.dtype for x in nn.state.get_parameters(llm.runner.model.modules())} == {getattr(dtypes, dtype)}


def test_devices_may_compute_in_half_precision(tmp_path):
  folder = tiny_model(tmp_path)
  ids, logits = LogitsRecorder(LLM(folder, **{**SMALL, "dtype": "float16"}, tensor_parallel_size=2)).generate([3], 4)
  np.testing.assert_allclose(logits, reference_logits(folder, [3, *ids])[:-1], atol=0.05)


@pytest.mark.slow
def test_the_shipped_model_can_be_shared():
  texts = [LLM(**SMALL, tensor_parallel_size=n).generate("Once upon a time", greedy(8), use_tqdm=False) for n in (1, 2)]
  same_outputs(*texts)


# quantized

def dequantized_by_parts(weights, count, bits):
  """What a device makes of its part of each matrix."""
  for key, w in weights.items():
    if not key.endswith(tuple(f"{x}.weight" for x in PROJECTIONS)): continue
    axis = int(key.endswith(("o_proj.weight", "down_proj.weight")))
    made = [quantize(part, bits if part.shape[1] % 8 == 0 else 8) for part in np.split(w, count, axis)]
    weights[key] = np.concatenate([in_float32(x) for x in made], axis)


def in_float32(w):
  scale, offset = [0 if x is None else np.repeat(x.astype(np.float32), w.q.shape[1] // x.shape[1], 1)
                   for x in (w.scale, w.offset)]
  return (w.q * scale + offset)[:, np.argsort(w.order)]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("intermediate", [128, *slow(72)])   # 64 or 36 inputs each
def test_what_is_quantized_while_it_loads_is_so_by_parts(tmp_path, bits, intermediate):
  sizes = {**SIZES, "intermediate_size": intermediate}
  weights = random_weights(tiny_config(**sizes))
  dequantized_by_parts(weights, 2, bits)
  by_hand = tiny_model(tmp_path / "by hand", **sizes)
  write_safetensors(by_hand / "model.safetensors", weights)
  check(tiny_model(tmp_path / "float", **sizes), 2, by_hand, quantization=f"int{bits}")


def in_16_bits(folder, kinds):
  """A model's matrices of these kinds rounded as dequantized ones are."""
  weights = load_file(folder / "model.safetensors")
  for key, w in weights.items():
    if any(kind in key for kind in kinds): weights[key] = w.astype(np.float16).astype(np.float32)
  write_safetensors(folder / "model.safetensors", weights)


USUAL = "gptq, act-order", "compressed-tensors, zero points"


@pytest.mark.parametrize("name", slow_but(USUAL, FORMATS))
def test_a_published_format_is_split_or_said_to_stay_in_16_bits(tmp_path, caplog, name):
  """Of 64 and 96 inputs: 2 and 3 groups of 32, or 4 and 6 of 16."""
  quantized, plain = quantized_model(tmp_path, name)
  group = FORMATS[name][3]
  whole = ["o_proj", "down_proj"] if "act-order" in name else ["down_proj"] if group == 32 else []
  in_16_bits(plain, whole)
  with caplog.at_level("WARNING", "tinyvllm"): llm = check(quantized, 2, plain, close=True)
  said = [x.getMessage() for x in caplog.records if "stays in float16" in x.getMessage()]
  assert len(said) == 2 * len(whole) and all("tensor_parallel_size=2" in x for x in said), said
  for layer in llm.runner.model.layers:
    kinds = {name for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if not getattr(layer, name).scales}
    assert kinds == {*whole}


def test_three_devices_share_three_groups(tmp_path, caplog):
  """And 12 heads of 8, so that the o_proj's 96 inputs are as many."""
  sizes = {**SIZES, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8, "vocab_size": 321}
  quantized, plain = gptq_model(tmp_path, 32, **sizes)
  check(quantized, 3, plain)
  assert "float16" not in caplog.text


def test_a_matrix_whose_parts_end_within_a_word_of_8_inputs_stays_in_16_bits(tmp_path, caplog):
  """24 inputs with one scale, 12 for each device."""
  quantized, plain = gptq_model(tmp_path, 0, **{**SIZES, "intermediate_size": 24})
  in_16_bits(plain, ["down_proj"])
  check(quantized, 2, plain)
  assert caplog.text.count("stays in float16") == 2


def gptq_model(folder, group, symmetric=False, **sizes):
  """A model of these sizes in GPTQ's format, 4 bits, and the same in float32. group: inputs; 0: all."""
  rng = np.random.default_rng(0)
  weights, tensors = random_weights(tiny_config(**sizes)), {}
  for key, w in list(weights.items()):
    if not key.endswith(tuple(f"{x}.weight" for x in PROJECTIONS)):
      tensors[key] = w
      continue
    group_of = np.arange(w.shape[1]) // (group or w.shape[1])
    numbers = numbers_of(rng, *w.shape, group or w.shape[1], 4, symmetric)
    tensors |= gptq(key.removesuffix(".weight"), *numbers, group_of, 4)
    weights[key] = matrix(*numbers, group_of)
  tiny_model(folder / "float", **sizes)
  write_safetensors(folder / "float" / "model.safetensors", weights)
  tiny_model(folder / "quantized", **sizes, quantization_config={**GPTQ, "group_size": group or -1})
  save_file(tensors, folder / "quantized" / "model.safetensors")
  return folder / "quantized", folder / "float"


# whatever is asked for

@pytest.fixture(scope="module")
def folder(words_folder): return words_folder


def captured(folder, **options):
  """An engine with one graph for all that can be asked for."""
  llm = LLM(folder, **SMALL, **options)
  for _ in llm.capture([4], optional=True): pass
  return llm


@pytest.fixture(scope="module")
def one(folder): return captured(folder)


@pytest.fixture(scope="module")
def two_devices(folder): return captured(folder, tensor_parallel_size=2)


@pytest.fixture
def two(two_devices):
  yield two_devices
  for name in list(two_devices.requests): two_devices.abort_request(name)   # one test fails, not all behind it
  check_invariants(two_devices)


CASES = {"greedy": {"temperature": 0.0}, "seeded": {}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.6, "min_p": 0.02},
         "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
         "biases": {"logit_bias": {i: 4.0 for i in range(270, 290)}, "allowed_token_ids": [*range(262, 318)]},
         "bad words": {"bad_words": ["the", "dog", "house"]}, "n": {"n": 3}, "stop": {"stop": ["e", "a"]},
         "regex": {"structured_outputs": StructuredOutputsParams(regex="[a-f]{3,5} (the|cat)")},
         "choice": {"structured_outputs": StructuredOutputsParams(choice=["yes indeed", "no"])}}


@pytest.mark.parametrize("case", CASES)
def test_every_field_of_a_request_does_what_it_does_on_one_device(one, two, case):
  jobs = [tokens(prompt(n, case)) for n in (1, 9, 4)]
  params = [SamplingParams(**{"temperature": 0.9, "seed": i, "max_tokens": 8, **CASES[case]}) for i in range(3)]
  expected, got = [llm.generate(jobs, params, use_tqdm=False) for llm in (one, two)]
  same_outputs(got, expected)
  texts = [[(c.token_ids, c.text) for output in outputs for c in output.outputs] for outputs in (expected, got)]
  assert texts[0] == texts[1] and len(texts[0]) == 3 * params[0].n


def test_log_probabilities_are_close_to_those_of_one_device(one, two):
  fields = SamplingParams(temperature=0.8, seed=7, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
  jobs = [tokens(prompt(n, "logprobs")) for n in (9, 2)]
  for expected, got in zip(*[llm.generate(jobs, fields, use_tqdm=False) for llm in (one, two)], strict=True):
    assert ids_of(got) == ids_of(expected)
    rows = [[*output.prompt_logprobs[1:], *output.outputs[0].logprobs] for output in (expected, got)]
    for a, b in zip(*rows, strict=True):
      assert [(i, x.rank) for i, x in a.items()] == [(i, x.rank) for i, x in b.items()]
      np.testing.assert_allclose([x.logprob for x in b.values()], [x.logprob for x in a.values()], atol=1e-4)


@pytest.mark.parametrize("devices", [1, 2])
def test_each_device_may_have_parts_of_a_sum_below_each_other(folder, monkeypatch, devices):
  """As of many rows on tensor cores: a norm adds them."""
  whole = Linear.__call__
  def in_parts(self, x, dtype=None):
    out = whole(self, x, dtype)
    return out if self.axis == 0 else (out * 0.25).cat(out * 0.75).contiguous()
  monkeypatch.setattr(Linear, "__call__", in_parts)
  llm = LLM(folder, **SMALL, tensor_parallel_size=devices)
  assert [ids_of(x) for x in llm.generate([tokens(x) for x in JOBS], greedy(5), use_tqdm=False)] == [
    reference_greedy(folder, ids, 5) for ids in JOBS]


def test_a_prompt_met_again_is_found_on_all_devices(two, folder):
  ids = prompt(18, "found")
  found = []
  for n in (0, 0, 3):   # the same twice, and then with some of its answer
    output, = two.generate(tokens([*ids, *reference_greedy(folder, ids, n)]), greedy(6), use_tqdm=False)
    assert ids_of(output) == reference_greedy(folder, ids, 6 + n)[n:]
    found.append(output.num_cached_tokens)
  assert found == [0, 16, 20]


def test_in_a_small_pool_what_is_preempted_goes_on_as_before(folder):
  small = LLM(folder, **SMALL, num_gpu_blocks_override=13, tensor_parallel_size=2)
  jobs = {str(i): prompt(3 + 4 * i, "small") for i in range(4)}
  for name, ids in jobs.items(): small.add_request(name, tokens(ids), greedy(14))
  last = run_to_end(small, 500)
  assert {name: ids_of(last[name]) for name in jobs} == {
    name: reference_greedy(folder, ids, 14) for name, ids in jobs.items()}
  assert small.get_metrics()["num_preemptions"] > 0


@pytest.mark.parametrize("job", [JOBS[0], JOBS[1]], ids=["steps of one token", "chunks"])
def test_the_logits_are_numpys(tmp_path, job):
  folder = tiny_model(tmp_path, **BIASES)
  recorder = LogitsRecorder(LLM(folder, **SMALL, tensor_parallel_size=2))
  ids, logits = recorder.generate(job, 6)
  np.testing.assert_allclose(logits, reference_logits(folder, [*job, *ids])[len(job) - 1:-1], atol=1e-4)


def test_engines_of_several_sizes_take_turns(one, two, folder):
  jobs = [tokens(prompt(7, "turns", i)) for i in range(3)]
  streams = [llm.generate_stream(job, greedy(5)) for llm in (one, two) for job in jobs]
  ids = [[] for _ in streams]
  for outputs in itertools.zip_longest(*streams):
    for so_far, output in zip(ids, outputs, strict=True): so_far += ids_of(output) if output else []
  assert ids == 2 * [reference_greedy(folder, job["prompt_token_ids"], 5) for job in jobs]


@pytest.mark.slow
def test_steps_that_are_captured_at_start_serve(folder):
  llm = LLM(folder, **SMALL, cudagraph_capture_sizes=[4], tensor_parallel_size=2)
  steps = {*llm.runner.graphs}
  outputs = llm.generate([tokens(ids) for ids in JOBS], greedy(5), use_tqdm=False)
  assert [ids_of(x) for x in outputs] == [reference_greedy(folder, ids, 5) for ids in JOBS]
  assert {*llm.runner.graphs} == steps and len(steps) == 2


@pytest.mark.slow
def test_in_a_servers_thread_it_is_the_same(folder):
  llm = AsyncLLM(folder, **SMALL, tensor_parallel_size=2)
  async def text(ids): return [i async for o in llm.generate(tokens(ids), greedy(6)) for i in ids_of(o)]
  async def all_of(): return await asyncio.gather(*map(text, JOBS))
  assert asyncio.run(all_of()) == [reference_greedy(folder, ids, 6) for ids in JOBS]


# drafts

def test_drafts_from_the_text_are_checked(folder, monkeypatch):
  hopeful(monkeypatch)
  llm = LLM(folder, **SMALL, speculative_config=NGRAM, tensor_parallel_size=2)
  count, ids = Counts(llm), prompt(5, "ngram")
  ids = [*ids, *reference_greedy(folder, ids, 12)]
  ids = [*ids, *ids[:5]]   # what follows the second time may be what followed the first time
  output, = llm.generate(tokens(ids), greedy(12), use_tqdm=False)
  assert ids_of(output) == reference_greedy(folder, ids, 12)
  assert count()[1] > 0


def test_a_draft_model_is_not_split_and_lies_on_the_first_device(folder, tmp_path):
  """It has one K/V head, which no two devices could share."""
  other = tiny_model(tmp_path, 1, num_key_value_heads=1, num_hidden_layers=1)
  config = {"model": str(other), "num_speculative_tokens": 2}
  llm = LLM(folder, **SMALL, speculative_config=config, tensor_parallel_size=2)
  target, draft = llm.runners
  tensors = [*nn.state.get_parameters(draft.model.modules()), *itertools.chain(*draft.kv_caches)]
  assert {x.device for x in tensors} == {"CPU"}
  assert {x.device for x in itertools.chain(*target.kv_caches)} == {("CPU", "CPU:1")}
  count = Counts(llm)
  outputs = llm.generate([tokens(ids) for ids in JOBS], greedy(8), use_tqdm=False)
  assert [ids_of(x) for x in outputs] == [reference_greedy(folder, ids, 8) for ids in JOBS]
  assert count()[1] > 0


def test_a_draft_model_that_is_the_same_is_always_right(folder):
  """What it computes is what the devices do together."""
  config = {"model": str(folder), "num_speculative_tokens": 2}
  llm = LLM(folder, **SMALL, speculative_config=config, tensor_parallel_size=2)
  count = Counts(llm)
  params = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)
  llm.generate([tokens(JOBS[1])], params, use_tqdm=False)
  _, proposed, accepted = count()
  assert accepted == proposed > 4


# steps that fail

@pytest.mark.parametrize("place", PLACES)
def test_a_step_of_two_devices_that_fails_loses_and_doubles_no_token(two, folder, monkeypatch, place):
  jobs = {name: prompt(n, place, name) for name, n in (("a", 3), ("b", 10), ("c", 1))}
  for number in (1, 3):
    for name, ids in jobs.items(): two.add_request(name, tokens(ids), greedy(4))
    with monkeypatch.context() as patched:
      break_steps(two, patched, once(place, number))
      last, failures = finish(two)
    assert failures == 1
    assert {name: ids_of(output) for name, output in last.items()} == {
      name: reference_greedy(folder, ids, 4) for name, ids in jobs.items()}


def test_a_capture_that_fails_midway_is_made_again(folder, monkeypatch):
  llm = LLM(folder, **SMALL, tensor_parallel_size=2)
  def fail(*_): raise KeyboardInterrupt   # as the devices' logits are there
  with monkeypatch.context() as patched:
    patched.setattr("tinyvllm.backend.Sampler.argmax", fail)
    for _ in range(2):
      with pytest.raises(KeyboardInterrupt): llm.generate(tokens(JOBS[0]), greedy(4), use_tqdm=False)
  output, = llm.generate(tokens(JOBS[0]), greedy(4), use_tqdm=False)
  assert ids_of(output) == reference_greedy(folder, JOBS[0], 4)


# what each device holds

def parts_by_device(tensor):
  """What each device has of a tensor."""
  return [Tensor(tensor.uop.mselect(i)).numpy() for i in range(len(tensor.device))]


def test_each_device_has_its_part_of_each_matrix_and_all_norms(tmp_path):
  """Sizes of which tiles of 16 make up the parts, so that nothing is padded."""
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


def test_a_bias_of_what_is_summed_is_on_one_device_alone(tmp_path):
  folder = tiny_model(tmp_path, **BIASES)
  layer = LLM(folder, **SMALL, tensor_parallel_size=2).runner.model.layers[0]
  for matrix_of, name in ((layer.o_proj, "self_attn.o_proj"), (layer.down_proj, "mlp.down_proj")):
    first, second = parts_by_device(matrix_of.bias)
    np.testing.assert_array_equal(first, load(folder)[1][f"model.layers.0.{name}.bias"].astype(np.float32))
    assert not second.any()


def test_each_device_has_its_heads_rows_and_columns(tmp_path):
  """By the file: q, k and v of a device follow each other, and so do gate and up."""
  folder = tiny_model(tmp_path, num_key_value_heads=4)
  model, weights = LLM(folder, **SMALL, tensor_parallel_size=4).runner.model, load(folder)[1]
  def parts(name, axis=0): return np.split(weights[f"{name}.weight"].astype(np.float32), 4, axis)
  def joined(*names): return [np.concatenate(x) for x in zip(*map(parts, names), strict=True)]
  layer, name = model.layers[1], "model.layers.1."
  attention, mlp = f"{name}self_attn.", f"{name}mlp."
  expected = {layer.qkv_proj: joined(*[f"{attention}{x}_proj" for x in "qkv"]), model.lm_head: parts("lm_head"),
              layer.o_proj: parts(f"{attention}o_proj", 1), layer.down_proj: parts(f"{mlp}down_proj", 1),
              layer.gate_up_proj: joined(f"{mlp}gate_proj", f"{mlp}up_proj")}
  for linear, wanted in expected.items():
    for got, w in zip(parts_by_device(linear.weight), wanted, strict=True):
      np.testing.assert_array_equal(got, pack(w, linear.weight.shape))


def test_as_much_memory_each_holds_twice_the_tokens(folder, monkeypatch):
  """Behind the weights, of which each has half. The host's memory is that of all its devices."""
  plain = LLM(folder, **SMALL)
  one_text = SMALL["max_model_len"] // SMALL["block_size"]
  block = sum(x.nbytes() for cache in plain.runner.kv_caches for x in cache) // plain.runner.num_blocks
  def weights(llm): return sum(x.nbytes() for part in llm.runner.model.modules() for x in nn.state.get_parameters(part))
  halves = weights(LLM(folder, **SMALL, tensor_parallel_size=2))
  assert weights(plain) / 2 < halves < 0.52 * weights(plain), "norms are whole"
  blocks = {}
  for count, of_one in ((1, weights(plain)), (2, halves)):
    free = count * (of_one + (one_text + 4) * block)   # each has room for so many whole blocks
    monkeypatch.setattr("tinyvllm.backend.Backend.free_memory", lambda self, name, free=free: free)
    llm = LLM(folder, **SMALL, gpu_memory_utilization=1.0, tensor_parallel_size=count)
    blocks[count] = llm.runner.num_blocks
    held = [x.nbytes() for cache in llm.runner.kv_caches for x in cache]
    assert sum(held) == blocks[count] * block // count
  assert blocks == {1: one_text + 4, 2: 2 * (one_text + 4)}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_loading_for_two_devices_takes_little_more_memory_than_the_model(tmp_path):
  sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8,
           "num_key_value_heads": 2, "vocab_size": 1024}
  small, big = tiny_model(tmp_path / "small"), tiny_model(tmp_path / "big", **sizes)
  size = (big / "model.safetensors").stat().st_size
  code = MEASURE.replace("max_num_seqs=1)", "max_num_seqs=1, tensor_parallel_size=2)")
  assert code != MEASURE
  run = subprocess.run([sys.executable, "-c", code, small, big], capture_output=True, text=True, check=False,
                       cwd=Path(__file__).parents[1], timeout=120)
  assert run.returncode == 0, run.stderr
  assert 0.9 * size < int(run.stdout) <= 1.3 * size, f"{int(run.stdout) / size:.2f} times the model's bytes"


# what is refused

def refused(*words, model=None, **options):
  with pytest.raises(ValueError) as e: LLM(model, **SMALL, **options)
  message = str(e.value)
  for word in words: assert word in message, f"{word} is not in: {message}"
  assert len(message.splitlines()) == 1


@pytest.mark.parametrize("config,count,fit", [
  ({"num_key_value_heads": 1}, 2, "1"), ({"num_key_value_heads": 2}, 4, "1 or 2"),
  ({"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8, "intermediate_size": 96}, 3, "1 or 2"),
  ({"num_key_value_heads": 4, "intermediate_size": 66}, 4, "1 or 2"),
  ({"num_attention_heads": 8, "num_key_value_heads": 8}, 3, "1 or 2 or 4 or 8"), ({"vocab_size": 321}, 2, "1")],
  ids=["MQA", "K/V heads", "the vocabulary", "the MLP", "heads", "an odd vocabulary"])
def test_a_size_that_does_not_divide_is_named_with_what_would_do(tmp_path, config, count, fit):
  config = tiny_config(**config)
  names = "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"
  refused(f"tensor_parallel_size={count} must divide", *[f"'{x}': {config[x]}" for x in names], f": use {fit}",
          model=tiny_model(tmp_path, **config), tensor_parallel_size=count)


@pytest.mark.parametrize("count,said", [
  (0, "must be between 1 and 8"), (-1, "must be between 1 and 8"), (9, "must be between 1 and 8"),
  (True, "must be of type int"), ("2", "must be of type int"), (2.0, "must be of type int"),
  (None, "must be of type int")], ids=repr)
def test_a_number_of_devices_that_will_not_do_is_named(count, said):
  refused(f"tensor_parallel_size={count!r} {said}", tensor_parallel_size=count)


def test_steps_that_are_not_captured_are_for_one_device():
  refused("tensor_parallel_size=2", "enforce_eager=False", enforce_eager=True, tensor_parallel_size=2)
  assert EngineConfig(enforce_eager=True, tensor_parallel_size=1).enforce_eager


class Cards:
  """Stands for tinygrad's Device: so many GPUs."""
  DEFAULT = "CUDA"
  default = property(lambda self: SimpleNamespace(count=lambda: self.number))
  canonicalize = staticmethod(Device.canonicalize)
  def __init__(self, number): self.number = number
  def __getitem__(self, name): return SimpleNamespace(device=name, cu_device=int((name + ":0").split(":")[1]))


def test_more_gpus_than_there_are_are_refused_and_so_are_those_that_cannot_read_each_other(monkeypatch):
  """As the driver says it of each pair, in this direction."""
  monkeypatch.setattr("tinyvllm_extra.parallel.Device", Cards(3))
  asked, cannot = [], {(1, 0)}

  def can_access(able, reader, read):
    asked.append((reader, read))
    able._obj.value = (reader, read) not in cannot
    return 0
  monkeypatch.setattr(cuda, "cuDeviceCanAccessPeer", can_access)
  with pytest.raises(ValueError, match="^tensor_parallel_size=4 must be at most 3, the number of CUDA devices"):
    check_peers(4)
  with pytest.raises(ValueError, match="^tensor_parallel_size=2 must be 1: CUDA:1 cannot read CUDA's memory "):
    check_peers(2)
  cannot.clear()
  asked.clear()
  check_peers(3)
  assert sorted(asked) == sorted(itertools.permutations(range(3), 2))


def test_a_backend_that_takes_one_device_says_so(folder):
  run = process("generate", "a", "--model", folder, *FLAGS, "--tensor-parallel-size", "2", DEV="PYTHON")
  assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
  assert run.stderr.splitlines()[-1].startswith("tinyvllm: tensor_parallel_size=2 must be 1 on PYTHON")


# the command line

def test_generate_says_the_same(folder, capsys):
  texts = []
  for count in ("1", "2"):
    flags = ["--model", str(folder), *FLAGS, "--max-tokens", "6", "--tensor-parallel-size", count]
    assert main(["generate", "the cat", *flags]) == 0
    texts.append(capsys.readouterr().out)
  assert texts[0] == texts[1] and len(texts[0]) > len("the cat\n")


def test_a_process_ends_when_its_devices_are_done(folder):
  run = process("generate", "the cat", "--model", folder, *FLAGS, "--max-tokens", "2", "--tensor-parallel-size", "2")
  assert run.returncode == 0 and run.stdout.startswith("the cat"), run.stderr
  assert "in float32 on CPU, CPU:1 in" in run.stderr


@pytest.mark.parametrize("command", ["generate", "serve", "chat"])
def test_help_shows_it(command, capsys):
  with pytest.raises(SystemExit) as e: main([command, "--help"])
  assert e.value.code == 0
  assert "--tensor-parallel-size INT" in capsys.readouterr().out


# units

def on_devices(arrays):
  """A tensor of which each device has one of the arrays."""
  names = device_names(len(arrays))
  open_device()
  tensors = [Tensor(np.ascontiguousarray(x), device=name).contiguous().realize()
             for name, x in zip(names, arrays, strict=True)]
  return Tensor(UOp.mstack(*[x.uop for x in tensors])).clone().realize()


def normal(*shape, seed): return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("rows,size", [(1, 48), (5, 100)])
def test_a_norm_adds_what_each_device_has_of_a_sum(count, rows, size):
  x, weight = normal(rows, size, seed=0), normal(size, seed=1)
  deltas = [normal(rows, size, seed=2 + i) for i in range(count)]
  norm = Norm("norm", size, 1e-5, dtypes.float32)
  norm.weight = on_devices([weight] * count)
  summed, normed = norm.add(on_devices([x] * count), on_devices(deltas))
  Tensor.realize(summed, normed)
  total = x + sum(deltas)
  expected = total / np.sqrt((total * total).mean(-1, keepdims=True) + 1e-5) * weight
  for got in parts_by_device(summed): np.testing.assert_allclose(got.reshape(total.shape), total, atol=1e-5)
  for got in parts_by_device(normed): np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("count,rows", [(2, 32), (3, 17), (4, 40)])
def test_a_row_is_on_the_device_that_has_it_and_zeros_are_on_the_others(count, rows):
  weight = normal(count * rows, 24, seed=0)
  linear = Linear(24, {"w": rows}, False, dtypes.float32)
  linear.weight = on_devices([pack(part, linear.weight.shape) for part in np.split(weight, count)])
  ids = np.array([0, rows - 1, rows, count * rows - 1, count * rows - rows, 5], np.int32)
  found = linear.rows(on_devices([ids] * count), dtypes.float32).realize()
  for i, got in enumerate(parts_by_device(found)):
    np.testing.assert_array_equal(got.reshape(len(ids), 24), weight[ids] * (ids // rows == i)[:, None])


def numbers(rng, out, inputs, groups, bits, offset, ordered=True):
  high = 16 if bits == 4 else 128
  q = rng.integers(0, high, (out, inputs)).astype(np.uint8 if bits == 4 else np.int8)
  scale, zero = [rng.random((out, groups)).astype(np.float16) for _ in range(2)]
  order = np.arange(inputs) if ordered else rng.permutation(inputs)
  return Quantized(q, scale, zero if offset else None, order)


@pytest.mark.parametrize("bits,offset", [(8, False), (8, True), (4, True)])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 12])
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_a_quantized_matrix_joined_again_are_the_matrix(bits, offset, count, groups, axis):
  w = numbers(np.random.default_rng(0), 48, 96, groups, bits, offset)
  parts = split(w, count, axis)
  assert all(isinstance(x, Quantized) and (x.offset is None) != offset and x.q.dtype == w.q.dtype for x in parts)
  assert {x.q.shape for x in parts} == {(48 // count, 96) if axis == 0 else (48, 96 // count)}
  assert all(np.array_equal(x.order, np.arange(x.q.shape[1])) for x in parts)
  np.testing.assert_array_equal(np.concatenate([dequantize(x) for x in parts], axis), dequantize(w))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("inputs,groups,ordered", [(48, 3, True), (64, 4, False), (64, 1, False), (24, 1, True)])
def test_what_cannot_be_split_by_inputs_is_split_in_16_bits_with_a_warning(caplog, axis, inputs, groups, ordered):
  w = numbers(np.random.default_rng(0), 32, inputs, groups, 4, True, ordered)
  with caplog.at_level(logging.WARNING, "tinyvllm"): parts = split(w, 2, axis)
  assert [isinstance(x, Quantized) for x in parts] == [axis == 0] * 2
  assert ("stays in float16" in caplog.text) == (axis == 1)
  made = [dequantize(x) if axis == 0 else x for x in parts]
  assert {x.dtype for x in made} == {np.dtype(np.float16)}
  np.testing.assert_array_equal(np.concatenate(made, axis), dequantize(w))
