"""One suite for every backend: `DEV=CL pytest -m backend`, or WEBGPU, CUDA, METAL, AMD. A tiny random model in float32
and float16 must give the ids of a numpy LLaMA in float64, so that all backends agree, and each captured kernel must
stay within the limits of the most restricted backend. The tests use few graphs and short outputs: some backends take a
second to compile a kernel, and WebGPU half a second for a step. tests/benchmarks/backends.py runs several backends."""
import functools
import itertools
import random
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.data import read_data
from helpers.engines import (assert_all_blocks_freed, assert_same_outputs, check_invariants, greedy, ids_of, run_to_end,
                             tokens)
from helpers.models import tiny_model
from helpers.prefix_cache import restart
from helpers.quantized_models import quantized_model
from helpers.reference import log_softmax, quantize_kv, reference_ids, reference_logits
from helpers.speculation import check_same
from tinygrad import Device, Tensor, dtypes
from tinygrad.engine.realize import get_call_arg_uops
from tinygrad.helpers import ansistrip
from tinygrad.uop.ops import Ops

from tinyvllm import LLM
from tinyvllm_extra import graph_policy
from tinyvllm_extra.kernels import make_backend

BS, BUDGET, BLOCKS = 4, 8, 16   # block size, token budget of a step, blocks in the pool
ENGINE = {"max_model_len": BS * BLOCKS, "block_size": BS, "max_num_seqs": BUDGET, "max_num_batched_tokens": BUDGET}
MIN_MARGIN = 0.05   # between the two best logits: below it, rounding could choose the other token
LOGPROB_ERROR = {"float32": 1e-4, "float16": 0.02}   # largest rounding error, less than half of MIN_MARGIN
MAX_BUFFERS = 8   # per kernel, WebGPU's guaranteed minimum
SAMPLED = {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.01}


# Prompts and the reference's output

def make_job(folder, length, n, salt, **options):
  """Return a prompt of `length` random ids and its n output ids, each by a margin of MIN_MARGIN. Prompts of different
  salts share no block, so that no test hits another test's prefix cache."""
  rng = random.Random(salt)
  for _ in range(200):
    ids = [rng.randrange(259, 320) for _ in range(length)]
    if (output_ids := reference_ids(folder, ids, n, MIN_MARGIN, **options)) is not None:
      return SimpleNamespace(prompt=tokens(ids), prompt_ids=ids, output_ids=output_ids, params=greedy(n, **options))
  raise AssertionError(f"no prompt of {length} tokens has a margin of {MIN_MARGIN}")


def generate(llm, *jobs):
  """Return the ids of each job's output, in one batch."""
  return [ids_of(output) for output in llm.generate([job.prompt for job in jobs], [job.params for job in jobs])]


# Engines: one per dtype, shared by all tests

@pytest.fixture(scope="session")
def folder(tmp_path_factory):
  """A model in float16, so that neither dtype rounds the weights. Its greedy text consists of letters."""
  return tiny_model(tmp_path_factory.mktemp("backend"), words=True, dtype="float16")


def open_engine(folder, **options): return LLM(folder, **{**ENGINE, **options})


@pytest.fixture(scope="session")
def engines(folder):
  return functools.cache(lambda kind: open_engine(folder, dtype=kind, num_gpu_blocks_override=BLOCKS + 1))


@pytest.fixture(params=LOGPROB_ERROR)
def llm(request, engines):
  with assert_all_blocks_freed(engines(request.param)): yield engines(request.param)


@pytest.fixture
def llm_float32(engines):
  """The float32 engine only: tests with extra kernels compile them once."""
  with assert_all_blocks_freed(engines("float32")): yield engines("float32")


# Greedy ids do not depend on scheduling

@pytest.mark.parametrize("length", [1, 2 * BS + 1, 4 * BS])
def test_greedy_ids_equal_reference_with_kernels_within_device_limits(llm, folder, length):
  job = make_job(folder, length, 6, length)
  assert generate(llm, job) == [job.output_ids]
  assert limit_violations(llm, llm.backend.memory.largest_tensor()) == []


@pytest.mark.parametrize("name", ["compressed-tensors, zero points", "compressed-tensors, int8 per group"])
def test_quantized_weights_equal_dequantized_reference(tmp_path, name):
  quantized, plain = quantized_model(tmp_path, name)
  llm = open_engine(quantized, dtype="float32", num_gpu_blocks_override=BLOCKS + 1, activation_quantization="none")
  for length in (1, 2 * BS + 1):
    job = make_job(plain, length, 5, length)
    assert generate(llm, job) == [job.output_ids]


def test_batch_any_arrival_order_equals_single_requests(llm, folder):
  jobs = {str(i): make_job(folder, 1 + 2 * i, 6 - i, 200 + i) for i in range(6)}
  for job in jobs.values(): assert generate(llm, job) == [job.output_ids]
  for rng in map(random.Random, range(2)):
    order, outputs = rng.sample(sorted(jobs), len(jobs)), {}
    restart(llm)
    while order or llm.has_unfinished_requests():
      for name in [order.pop() for _ in range(min(len(order), rng.randrange(4)))]:
        llm.add_request(name, jobs[name].prompt, jobs[name].params)
      outputs |= {output.request_id: output for output in llm.step()}
      check_invariants(llm)
    assert {name: ids_of(outputs[name]) for name in jobs} == {name: job.output_ids for name, job in jobs.items()}


def test_chunked_prefill_equals_whole_prefill(llm, folder):
  """A prompt of one step, which five decodes divide into chunks of three tokens, and one of two and a half steps."""
  whole, long = make_job(folder, 8, 3, 300), make_job(folder, 20, 3, 301)
  jobs = {str(i): make_job(folder, 2, 7, 310 + i) for i in range(5)}
  for job in (whole, long): assert generate(restart(llm), job) == [job.output_ids]
  restart(llm)
  for name, job in jobs.items(): llm.add_request(name, job.prompt, job.params)
  for _ in range(3): llm.step()
  llm.add_request("chunks", whole.prompt, whole.params)
  outputs, jobs["chunks"] = run_to_end(llm, 400), whole
  assert {name: ids_of(outputs[name]) for name in jobs} == {name: job.output_ids for name, job in jobs.items()}
  assert outputs["chunks"].num_cached_tokens == 0


@pytest.mark.parametrize(("length", "num_cached"), [(2 * BS - 1, BS), (2 * BS, BS), (2 * BS + 1, 2 * BS)])
def test_prefix_cache_hit_equals_uncached(llm, folder, length, num_cached):
  job = make_job(folder, length, 3, 400 + length)
  outputs = [restart(llm).generate(job.prompt, job.params)[0], llm.generate(job.prompt, job.params)[0]]
  assert [output.num_cached_tokens for output in outputs] == [0, num_cached]
  assert [ids_of(output) for output in outputs] == [job.output_ids] * 2


def test_preemption_keeps_ids_and_prefix_cache_hits(llm, folder):
  before, jobs = llm.get_metrics()["num_preemptions"], [make_job(folder, 6, 10, 600 + i) for i in range(6)]
  assert generate(llm, *jobs) == [job.output_ids for job in jobs]
  assert llm.get_metrics()["num_preemptions"] > before, "the pool must be too small for all requests"
  again, = llm.generate(jobs[5].prompt, jobs[5].params)
  assert ids_of(again) == jobs[5].output_ids and again.num_cached_tokens == BS


# Log probabilities

def errors(folder, ids, logprobs):
  """Return the absolute errors of the log probabilities of ids[1:] and of the best tokens at each position."""
  differences, expected = [], log_softmax(reference_logits(folder, ids)[:-1])
  for entries, x, token in zip(logprobs, expected, ids[1:], strict=True):
    best = {p.rank: p.logprob for p in entries.values()}
    assert {token, int(x.argmax())} <= {*entries} and entries[int(x.argmax())].rank == 1
    differences += [abs(p.logprob - x[i]) for i, p in entries.items()]
    differences += [abs(best[k] - value) for k, value in enumerate(np.sort(x)[::-1][:len(entries) - 1], 1)]
  return differences


@pytest.mark.parametrize(("length", "n"), [(8, 1), (1, 3)])
def test_top_20_logprobs_of_prompt_and_output_equal_reference(llm, folder, length, n):
  job = make_job(folder, length, n, 900 + n)
  output, = restart(llm).generate(job.prompt, greedy(n, prompt_logprobs=20, logprobs=20))
  logprobs = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
  assert ids_of(output) == job.output_ids and output.prompt_logprobs[0] is None
  assert {len(entries) for entries in logprobs} <= {20, 21}
  assert max(errors(folder, [*job.prompt_ids, *job.output_ids], logprobs)) < LOGPROB_ERROR[llm.config.dtype]


# Sampling fields, which need other kernels

FIELDS = read_data("sampling_fields.json")["backends"]


@pytest.mark.parametrize("field", FIELDS)
def test_sampling_field_changes_ids_as_in_reference(llm_float32, folder, field):
  """Seeded ids are equal on all devices too, because the noise depends on the seed."""
  job = make_job(folder, 1, 4, 1000, **FIELDS[field])
  assert generate(llm_float32, job) == [job.output_ids]
  assert job.output_ids != reference_ids(folder, job.prompt_ids, 4, MIN_MARGIN), "the field must change the ids"


def check_all_fields(llm, folder):
  """Check eight one-token prompts in one batch. All use one kind of graph. Each has a bias, so that on a GPU it waits
  for its previous token, and log probabilities, which come from the model's raw logits."""
  small = [options for options in FIELDS.values() if len(options.get("logit_bias", ())) < 8]   # larger: another graph
  rows = [{"logit_bias": {265: 1.0, 266: -1.0}, **options} for options in (
    *small, {**FIELDS["sampled"], **FIELDS["penalties"]}, {"allowed_token_ids": [*range(259, 320, 3)]},
    {**SAMPLED, "seed": -3})]
  jobs = [make_job(folder, 1, 4, 1100 + i, **options) for i, options in enumerate(rows)]
  outputs = llm.generate([job.prompt for job in jobs], [greedy(4, **options, logprobs=3) for options in rows])
  for job, output in zip(jobs, outputs, strict=True):
    assert ids_of(output) == job.output_ids
    worst = max(errors(folder, [*job.prompt_ids, *job.output_ids], output.outputs[0].logprobs))
    assert worst < LOGPROB_ERROR["float32"]


def test_sampling_fields_in_one_batch_do_not_mix(llm_float32, folder): check_all_fields(llm_float32, folder)


@pytest.mark.parametrize("method", ["ngram", "draft model"])
def test_speculative_decoding_keeps_outputs(llm_float32, folder, method, monkeypatch):
  """Greedy, sampled and repeating outputs. The draft model is the model itself, so all its draft tokens are accepted.
  The number of draft tokens depends on the CPU's registers: the test assumes AVX-512 on every machine."""
  monkeypatch.setattr("tinyvllm_extra.sampling.speculation.SUMS", 8)
  config = {"num_speculative_tokens": 3, **({"method": "ngram"} if method == "ngram" else {"model": str(folder)})}
  drafting = open_engine(folder, dtype="float32", num_gpu_blocks_override=BLOCKS + 1, speculative_config=config)
  prompts = [tokens([*range(260, 266)] * 2), tokens(range(270, 276)), tokens(range(280, 283))]
  params = [greedy(16), greedy(16, **SAMPLED, seed=7), greedy(16, logit_bias={300: 100})]
  assert_same_outputs(drafting.generate(prompts, params, False), llm_float32.generate(prompts, params, False))
  check_invariants(drafting)
  metrics = drafting.get_metrics()
  num_drafts, num_accepted = (metrics[f"spec_decode_num_{name}_tokens"] for name in ("draft", "accepted"))
  if method == "ngram": assert num_drafts >= num_accepted > 5
  else: assert num_accepted == num_drafts > 10


# Device limits

def kernels_of(llm):
  """Yield (graph key, kernel name, [(buffer, is written)]) for each kernel of all captured graphs."""
  for key, (_, graph) in llm.runner.graphs.items():
    calls = [*graph.captured.linear.src]
    while calls:
      call = calls.pop()
      kernel, buffers = call.src[0], [u.buffer for u in get_call_arg_uops(call)]
      if kernel.op is Ops.CUSTOM_FUNCTION and kernel.arg == "graph": calls += kernel.src[0].src
      elif kernel.op is Ops.COPY: yield key, "copy", [(b, not i) for i, b in enumerate(buffers)]
      else: yield key, ansistrip(kernel.arg.name), [(buffers[i], i in kernel.arg.outs) for i in kernel.arg.globals]


def limit_violations(llm, largest):
  """Return one line for each kernel that a restricted device would refuse or compute wrongly."""
  violations, num_kernels = set(), Counter()
  for key, name, buffers in kernels_of(llm):
    num_kernels[key] += 1
    aliases = [a for (a, one), (b, other) in itertools.combinations(buffers, 2) if a.base is b.base and (
      (a.offset, a.nbytes) == (b.offset, b.nbytes)
      or (one or other) and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes)]
    if len(buffers) > MAX_BUFFERS: violations.add(f"{key} {name}: {len(buffers)} buffers")
    if aliases: violations.add(f"{key} {name}: two buffers share memory")
    if (size := max(b.nbytes for b, _ in buffers)) > largest: violations.add(f"{key} {name}: {size} bytes")
    if {b.device for b, _ in buffers} != {Device.DEFAULT}: violations.add(f"{key} {name}: not on {Device.DEFAULT}")
  assert num_kernels.keys() == llm.runner.graphs.keys() and min(num_kernels.values()) > 10, "unchecked kernels"
  return sorted(violations)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_kv_cache_equals_reference_with_rounded_k_and_v(folder, kind):
  """In a batch, in chunks, and alone from the prefix cache. Ids may differ only where two logits are nearly equal."""
  if kind == "fp8" and dtypes.half not in Device.default.renderer.supported_dtypes():
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8'.*float16.*'int8'"):
      open_engine(folder, kv_cache_dtype=kind)
    return
  llm = open_engine(folder, dtype="float32", kv_cache_dtype=kind)
  rng = random.Random(kind)
  prompts = [[rng.randrange(3, 320) for _ in range(n)] for n in (1, 7, 2 * BS, 2 * BUDGET + 3)]
  outputs = [ids_of(output) for output in llm.generate([tokens(ids) for ids in prompts], greedy(6))]
  num_equal = 0
  for ids, output_ids in zip(prompts, outputs, strict=True):
    logits = reference_logits(folder, [*ids, *output_ids], lambda x: quantize_kv(x, kind)[0])[len(ids) - 1:-1]
    margins = logits.max(1) - logits[range(6), output_ids]
    assert (margins < MIN_MARGIN).all(), margins
    num_equal += sum(margins == 0)
    assert ids_of(llm.generate(tokens(ids), greedy(6))[0]) == output_ids
  assert num_equal >= 22, num_equal
  assert limit_violations(llm, llm.backend.memory.largest_tensor()) == []


def test_kernels_of_each_graph_kind_stay_within_device_limits(llm_float32, folder, monkeypatch):
  """Runs each kind itself, so that the test passes alone: greedy, sampled, logit_bias, masked, log probabilities."""
  monkeypatch.setattr(graph_policy, "CAPTURE_THRESHOLD", 0)   # capture each graph instead of running a larger one
  for length in (1, 2, 4, 8): llm_float32.generate(tokens([270 + length] * length), greedy(1))
  for options in (*FIELDS.values(), {"logprobs": 3}): llm_float32.generate(tokens([260]), greedy(1, **options))
  llm_float32.generate(tokens([*range(260, 268)]), greedy(1, logprobs=20, prompt_logprobs=20))
  check_all_fields(llm_float32, folder)
  sizes = map(graph_policy.sizes_of, llm_float32.runner.graphs)
  kinds = {(mode, *map(bool, features)) for _, _, mode, *features, _, _ in sizes}   # without the last two
  assert {(0, False, False, False), (1, False, False, False), (2, False, False, False), (0, True, False, False),
          (0, False, True, False), (0, False, False, True), (2, True, True, True)} <= kinds
  assert limit_violations(llm_float32, llm_float32.backend.memory.largest_tensor()) == []


# Devices with a limit on tensor sizes

LARGEST = 40 * 1024   # bytes: 32 rows of logits, 160 of the 257 blocks that 16 sequences could use, or the embeddings


def test_largest_tensor_limits_step_and_pool_with_message(folder, monkeypatch, caplog, llm_float32):
  monkeypatch.setattr(make_backend().memory, "largest_tensor", lambda: LARGEST)
  with caplog.at_level("INFO", "tinyvllm"):
    small = open_engine(folder, dtype="float32", max_num_batched_tokens=512, max_num_seqs=16)
  assert small.config.max_num_batched_tokens == 32 and 32 * 320 * 4 <= LARGEST < 64 * 320 * 4, "the step's logits"
  assert re.search(r"\b32 tokens", caplog.text)
  with pytest.raises(ValueError, match="num_gpu_blocks_override=161 .*160"):
    open_engine(folder, dtype="float32", num_gpu_blocks_override=161)
  blocks = [x for cache in small.runner.kv_caches for x in cache]
  assert LARGEST / 2 < max(x.nbytes() for x in blocks) <= LARGEST and small.runner.num_blocks == small.blocks.num_blocks
  job = make_job(folder, 8, 3, 1300)
  outputs, plain = [llm.generate(job.prompt, greedy(3, prompt_logprobs=3)) for llm in (small, restart(llm_float32))]
  check_same(outputs, plain)
  assert ids_of(outputs[0]) == job.output_ids
  assert limit_violations(small, LARGEST) == []


# Memory and the default device

def test_tensor_of_the_largest_reported_size_holds_values():
  backend = make_backend()
  free, largest = backend.memory.free((Device.DEFAULT,)), backend.memory.largest_tensor()
  assert free > 2**30 and largest >= 2**27
  size = min(largest, free // 4, 2**28) // 4   # elements; 2**28 bytes are above the limit that OpenCL guarantees
  x = (Tensor.arange(size // 2**16).reshape(-1, 1) + Tensor.zeros(2**16, dtype=dtypes.int32)).contiguous().realize()
  assert x.nbytes() == size // 2**16 * 2**18 > 2**26
  assert x[:, -1].numpy().tolist() == [*range(size // 2**16)]
