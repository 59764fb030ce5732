"""One suite for every backend: `DEV=CL pytest -m backend`, or WEBGPU, CUDA, METAL, AMD. A tiny random model in
float32 and in float16 must say what a plain numpy LLaMA says in float64, so that all backends say the same; and each
captured kernel must keep within what the narrowest backend takes. Graphs are few and texts short: some backends take a
second to compile a kernel, and WebGPU half of one for a step. tests/benchmarks/backends.py runs this on several."""
import functools
import itertools
import logging
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from reference import (check_invariants, in_8_bits, reference_keep, reference_logits, run_to_end, same_outputs,
                       tiny_model)
from test_fields import changed
from test_quantization import quantized_model
from tinygrad import Device, dtypes
from tinygrad.engine.realize import get_call_arg_uops
from tinygrad.helpers import ansistrip
from tinygrad.uop.ops import Ops

from tinyvllm import LLM, SamplingParams
from tinyvllm.backend import Backend
from tinyvllm_extra import graphs

pytestmark = pytest.mark.backend
BS, BUDGET, BLOCKS = 4, 8, 16   # tokens of a block, tokens of a step, blocks of the pool
ENGINE = {"max_model_len": BS * BLOCKS, "block_size": BS, "max_num_seqs": BUDGET, "max_num_batched_tokens": BUDGET}
# Where logits are closer than this to each other, rounding may choose: such prompts are not taken. And what rounding
# may do to a log probability, far below half of it
DECIDED, ROUNDING = 0.05, {"float32": 1e-4, "float16": 0.02}
MOST_BUFFERS = 8   # of one kernel: what WebGPU promises
SAMPLED = {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.01}


@functools.cache
def device_takes(kind): return getattr(dtypes, kind) in Device[Device.DEFAULT].renderer.supported_dtypes()


# prompts, and what numpy says behind them

def params(size, **options):
  return SamplingParams(**{"temperature": 0.0, "max_tokens": size, "ignore_eos": True, **options})


def tokens(ids): return {"prompt_token_ids": list(ids)}
def ids_of(output): return output.outputs[0].token_ids


def mixed(x):
  """32 bits, each of which hangs on all of x's: lowbias32 of Wellons' hash-prospector."""
  x = np.atleast_1d(np.asarray(x, np.uint32))   # of scalars numpy tells an overflow
  for shift, factor in ((16, 0x7feb352d), (15, 0x846ca68b)): x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
  return x ^ (x >> np.uint32(16))


def noise(seed, position, size):
  """Gumbel noise of each token id: a function of seed, position and id alone."""
  low, high = np.uint32(seed % 2**32), np.uint32((seed >> 32) % 2**32)
  bits = mixed(mixed(np.arange(size)) ^ mixed(low ^ mixed(high ^ mixed(position)))) >> np.uint32(9)
  return -np.log(-np.log((bits + 0.5) / 2**23))


def said_by_numpy(folder, before, n, **options):
  """The n ids that follow a prompt under these options; None where rounding might choose others."""
  said, filters = [], [options.get(x, default) for x, default in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))]
  for _ in range(n):
    x = changed(reference_logits(folder, [*before, *said])[-1], before, said, options)
    if temperature := options.get("temperature", 0):
      finite = np.isfinite(x)
      keep = reference_keep(x, temperature, *filters) & finite
      for wobble in np.random.default_rng(0).standard_normal((8, len(x))) * 1e-3:
        if (reference_keep(x + wobble, temperature, *filters) & finite != keep).any(): return None
      x = np.where(keep, x / temperature + noise(options["seed"], len(before) + len(said) - 1, len(x)), -np.inf)
    second, best = np.sort(x)[-2:]
    if best - second < DECIDED: return None
    said.append(int(x.argmax()))
  return said


def job(folder, length, n, salt, begin=(), **options):
  """A prompt of `length` ids, `begin` and random ones, and the n ids that must follow, by no less than DECIDED. No two
  salts share a block but by `begin`: what one test leaves in the prefix cache, no other finds."""
  rng = random.Random(salt)
  for _ in range(200):
    ids = [*begin, *(rng.randrange(259, 320) for _ in range(length - len(begin)))]
    if (said := said_by_numpy(folder, ids, n, **options)) is not None:
      return SimpleNamespace(prompt=tokens(ids), ids=ids, said=said, params=params(n, **options))
  raise AssertionError(f"no prompt of {length} tokens is decided by {DECIDED}")


def log_softmax(x):
  x = x - x.max(1, keepdims=True)
  return x - np.log(np.exp(x).sum(1, keepdims=True))


# engines: one for each type, with a pool that all tests share

@pytest.fixture(scope="session")
def folder(tmp_path_factory):
  """Files in float16, so that neither type rounds the weights; greedy text of letters."""
  return tiny_model(tmp_path_factory.mktemp("backend"), words=True, dtype="float16")


def open_engine(folder, **options):
  """An engine, and what it logged as it was made."""
  told, handler, logger = [], logging.Handler(), logging.getLogger("tinyvllm")
  handler.emit = lambda record: told.append(record.getMessage())
  level = logger.level
  logger.addHandler(handler)
  logger.setLevel(logging.INFO)
  try: llm = LLM(folder, **{**ENGINE, **options})
  finally:
    logger.removeHandler(handler)
    logger.setLevel(level)
  return llm, told


def dtype_of(llm):
  """Of what is computed; the weights may stay in their files' narrower one."""
  kind, = {x.dtype for cache in llm.runner.kv_caches for x in cache}
  return next(name for name in ROUNDING if getattr(dtypes, name) == kind)


@pytest.fixture(scope="session")
def engines(folder):
  @functools.cache
  def engine(kind):
    llm, told = open_engine(folder, dtype=kind, num_gpu_blocks_override=BLOCKS + 1)
    return SimpleNamespace(llm=llm, told=told, asked=kind, dtype=dtype_of(llm))
  return engine


@pytest.fixture(scope="session", params=ROUNDING)
def engine(request, engines): return engines(request.param)


def idle_before_and_after(llm):
  """It has all of its blocks, too. Where one test fails, those behind it do not."""
  check_idle(llm)
  yield llm
  for name in (left := list(llm.requests)): llm.abort_request(name)
  check_idle(llm)
  assert not left, "a request did not end"


def check_idle(llm):
  assert not llm.has_unfinished_requests() and llm.get_metrics()["blocks_free"] == BLOCKS, "something is left behind"
  check_invariants(llm)


@pytest.fixture
def llm(engine): yield from idle_before_and_after(engine.llm)


@pytest.fixture
def exact(engines):
  """In float32 alone: what takes kernels of its own is compiled once."""
  yield from idle_before_and_after(engines("float32").llm)


run = functools.partial(run_to_end, limit=400)


def forget(llm):
  """Let nothing be found in the prefix cache."""
  assert not llm.has_unfinished_requests()
  llm.blocks.cached_blocks.clear()
  llm.blocks.reset()
  return llm


# the types

def test_an_engine_computes_in_the_type_asked_for_or_says_which_it_takes_instead(engine):
  expected = engine.asked if device_takes(engine.asked) else "float32"
  assert engine.dtype == expected
  told = [line for line in engine.told if engine.asked in line and expected in line and engine.asked != expected]
  assert len(told) == (engine.asked != expected), engine.told


@pytest.mark.parametrize("name", ["offsets", "compressed-tensors, int8 by group"])
def test_weights_of_4_and_8_bits_say_what_those_say_that_they_stand_for(tmp_path, name):
  quantized, plain = quantized_model(tmp_path, name)
  llm, _ = open_engine(quantized, dtype="float32", num_gpu_blocks_override=BLOCKS + 1)
  for length in (1, 2 * BS + 1):
    expected = job(plain, length, 5, length)
    assert ids_of(llm.generate(expected.prompt, expected.params)[0]) == expected.said


# greedy text, and what may not change it

@pytest.mark.parametrize("length", [1, 2 * BS + 1, 4 * BS])
def test_greedy_ids_are_the_references(llm, folder, length):
  want = job(folder, length, 6, length)
  output, = llm.generate(want.prompt, want.params)
  assert ids_of(output) == want.said and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("length", [BS - 1, BS, BS + 1])
def test_decode_equals_prefill(llm, folder, length):
  want = job(folder, length, 4, 100 + length)
  assert ids_of(llm.generate(want.prompt, want.params)[0]) == want.said
  for i, token in enumerate(want.said):
    assert ids_of(forget(llm).generate(tokens([*want.ids, *want.said[:i]]), params(1))[0]) == [token], i


def test_batched_equals_alone_in_any_order_of_arrival(llm, folder):
  jobs = {str(i): job(folder, 1 + 2 * i, 6 - i, 200 + i) for i in range(6)}
  alone = {name: ids_of(llm.generate(want.prompt, want.params)[0]) for name, want in jobs.items()}
  assert alone == {name: want.said for name, want in jobs.items()}
  for rng in map(random.Random, range(2)):
    order, last = rng.sample(sorted(jobs), len(jobs)), {}
    forget(llm)
    while order or llm.has_unfinished_requests():
      for name in [order.pop() for _ in range(min(len(order), rng.randrange(4)))]:
        llm.add_request(name, jobs[name].prompt, jobs[name].params)
      last |= {output.request_id: output for output in llm.step()}
      check_invariants(llm)
    assert {name: ids_of(output) for name, output in last.items()} == alone


def test_chunked_equals_whole(llm, folder):
  """A prompt of a whole step beside decodes that leave it three tokens of each, and one of two steps and a half."""
  whole, long, others = job(folder, 8, 3, 300), job(folder, 20, 3, 301), [job(folder, 2, 7, 310 + i) for i in range(5)]
  assert ids_of(forget(llm).generate(whole.prompt, whole.params)[0]) == whole.said
  assert ids_of(llm.generate(long.prompt, long.params)[0]) == long.said
  forget(llm)
  for i, other in enumerate(others): llm.add_request(str(i), other.prompt, other.params)
  for _ in range(3): llm.step()
  llm.add_request("chunks", whole.prompt, whole.params)
  last = run(llm)
  assert last["chunks"].num_cached_tokens == 0 and ids_of(last["chunks"]) == whole.said
  assert [ids_of(last[str(i)]) for i in range(5)] == [other.said for other in others]


@pytest.mark.parametrize(("length", "found"), [(2 * BS - 1, BS), (2 * BS, BS), (2 * BS + 1, 2 * BS)])
def test_cached_equals_uncached(llm, folder, length, found):
  want = job(folder, length, 3, 400 + length)
  outputs = [forget(llm).generate(want.prompt, want.params)[0], llm.generate(want.prompt, want.params)[0]]
  assert [o.num_cached_tokens for o in outputs] == [0, found] and [ids_of(o) for o in outputs] == [want.said] * 2


def test_what_a_file_has_kept_is_found(llm, folder, tmp_path):
  """In blocks that have held something else meanwhile."""
  want, other = job(folder, 2 * BS + 1, 3, 450), job(folder, 4 * BS, 3, 451)
  forget(llm).generate(want.prompt, want.params)
  count = llm.save_prefix_cache(tmp_path / "cache")
  forget(llm).generate(other.prompt, other.params)
  assert forget(llm).load_prefix_cache(tmp_path / "cache") == count == 2
  output, = llm.generate(want.prompt, want.params)
  assert output.num_cached_tokens == 2 * BS and ids_of(output) == want.said


@pytest.mark.parametrize("length", [BS, BS + 2])
def test_two_of_one_prefix_in_one_step_do_not_read_what_it_is_still_writing(llm, folder, length):
  """The longer ones have a tail of their own, and the second begins in the same step."""
  begin = job(folder, BS, 1, 500).ids
  jobs = [job(folder, length, 3, 500 + 10 * i, begin) for i in range(2)]
  forget(llm)
  for i, want in enumerate(jobs): llm.add_request(str(i), want.prompt, want.params)
  last = run(llm)
  assert [last[str(i)].num_cached_tokens for i in range(2)] == [0, 0]
  assert [ids_of(last[str(i)]) for i in range(2)] == [want.said for want in jobs]


def test_preempted_equals_not_preempted_and_a_prefix_is_found_right_after(llm, folder):
  before, jobs = llm.get_metrics()["num_preemptions"], [job(folder, 6, 10, 600 + i) for i in range(6)]
  for i, want in enumerate(jobs): llm.add_request(str(i), want.prompt, want.params)
  last = run(llm)
  assert llm.get_metrics()["num_preemptions"] > before, "the pool was meant to be too small for all at once"
  assert [ids_of(last[str(i)]) for i in range(6)] == [want.said for want in jobs]
  again, = llm.generate(jobs[5].prompt, jobs[5].params)
  assert ids_of(again) == jobs[5].said and again.num_cached_tokens == BS


def test_a_stream_is_the_text_and_stops_at_a_string_split_over_tokens(llm, folder):
  want = job(folder, 3, 9, 700)
  whole, parts = llm.generate(want.prompt, want.params)[0], [*llm.generate_stream(want.prompt, want.params)]
  pieces = [part.outputs[0].text for part in parts]
  assert "".join(pieces) == whole.outputs[0].text and [i for part in parts for i in ids_of(part)] == want.said
  text, splits = whole.outputs[0].text, list[tuple]()
  for i in range(1, 7):   # from the end of a token's piece to the start of that after the next
    at, stop = len("".join(pieces[:i])) - 1, pieces[i - 1][-1:] + pieces[i] + pieces[i + 1][:1]
    if pieces[i] and len(stop) > 2 and text.find(stop) == at: splits.append((at, stop, i + 2))
  at, stop, n = splits[-1]
  stopped = params(9, stop=[stop])
  whole, parts = llm.generate(want.prompt, stopped)[0], [*llm.generate_stream(want.prompt, stopped)]
  assert whole.outputs[0].text == "".join(part.outputs[0].text for part in parts) == text[:at]
  assert ids_of(whole) == [i for part in parts for i in ids_of(part)] == want.said[:n]
  assert (whole.outputs[0].finish_reason, whole.outputs[0].stop_reason) == ("stop", stop)


def test_every_request_ends_and_gives_its_blocks_back_and_no_new_graph_is_needed(llm, folder):
  jobs, last, rng = {str(i): job(folder, 1 + 3 * i % 11, 1 + i % 5, 800 + i) for i in range(10)}, {}, random.Random(0)
  order, aborted = rng.sample(sorted(jobs), len(jobs)), {"3", "4", "8"}
  for length in (1, 2, 4, 8): llm.generate(tokens([260 + length] * length), params(1))   # all that greedy steps need
  graphs = len(llm.runner.graphs)
  while order or llm.has_unfinished_requests():
    for name in [order.pop() for _ in range(min(len(order), rng.randrange(4)))]:
      llm.add_request(name, jobs[name].prompt, jobs[name].params)
    last |= {output.request_id: output for output in llm.step()}
    for name in aborted & {*llm.requests} if rng.random() < 0.3 else (): llm.abort_request(name)
    check_invariants(llm)
  for name, want in jobs.items():
    got = ids_of(last[name]) if name in last else []
    assert got == want.said[:len(got)] and (name in aborted or len(got) == len(want.said)), name
  assert len(llm.runner.graphs) == graphs


# the numbers

def errors(folder, ids, told):
  """How far the log probabilities of ids[1:] are from numpy's, those of the best tokens beside them included."""
  out, expected = [], log_softmax(reference_logits(folder, ids)[:-1])
  for found, x, token in zip(told, expected, ids[1:], strict=True):
    best = {p.rank: p.logprob for p in found.values()}
    assert {token, int(x.argmax())} <= {*found} and found[int(x.argmax())].rank == 1
    out += [abs(p.logprob - x[i]) for i, p in found.items()]
    out += [abs(best[k] - value) for k, value in enumerate(np.sort(x)[::-1][:len(found) - 1], 1)]
  return out


def test_log_probabilities_are_the_references(llm, engine, folder):
  prompt, text = job(folder, 8, 1, 900), job(folder, 1, 3, 901)
  output, = forget(llm).generate(prompt.prompt, params(1, prompt_logprobs=3))
  assert ids_of(output) == prompt.said and output.prompt_logprobs[0] is None
  worst = max(errors(folder, prompt.ids, output.prompt_logprobs[1:]))
  output, = llm.generate(text.prompt, params(3, logprobs=3))
  assert ids_of(output) == text.said
  worst = max(worst, *errors(folder, [*text.ids, *text.said], output.outputs[0].logprobs))
  assert worst < ROUNDING[engine.dtype] < DECIDED / 2


def test_of_a_prompt_each_token_and_the_20_best_ones_have_the_references_log_probabilities(exact, folder):
  want = job(folder, 8, 1, 910)
  output, = forget(exact).generate(want.prompt, params(1, prompt_logprobs=20, logprobs=20))
  told = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
  assert output.prompt_logprobs[0] is None and {len(found) for found in told} <= {20, 21}
  assert max(errors(folder, [*want.ids, *want.said], told)) < ROUNDING["float32"]


# what a request may ask for: other kernels

FIELDS = {
  "sampled": {**SAMPLED, "seed": 7}, "sampled of all": {"temperature": 0.7, "min_p": 0.02, "seed": 2**40 + 5},
  "bias": {"logit_bias": {300: 3.5, 306: -100.0, 270: 2.0}}, "allowed": {"allowed_token_ids": [*range(259, 320, 4), 6]},
  "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.6, "frequency_penalty": 0.4},
  "penalties of negative logits": {
    "repetition_penalty": 1.3, "allowed_token_ids": [*range(259, 320)],
    "logit_bias": {i: -10 for i in range(259, 320)}}}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_changes_the_text_as_it_does_in_numpy(exact, folder, field):
  """Sampled text, too, is the same everywhere: the noise is a function of the seed."""
  want = job(folder, 1, 4, 1000, **FIELDS[field])
  assert ids_of(exact.generate(want.prompt, want.params)[0]) == want.said
  assert want.said != said_by_numpy(folder, want.ids, 4), "that was meant to matter"


BIAS = {"logit_bias": {265: 1.0, 266: -1.0}}


def in_one_batch(llm, folder, asked):
  """Eight requests of one token, by their salts, whose steps are eight tokens and all of one kind: each has a bias, so
  that a GPU lets all of them wait for their last token, and log probabilities, which are of the model's own logits."""
  asked = {salt: {**BIAS, **options} for salt, options in asked.items()}
  jobs = [job(folder, 1, 4, salt, **options) for salt, options in asked.items()]
  outputs = llm.generate([want.prompt for want in jobs], [params(4, **x, logprobs=3) for x in asked.values()])
  for want, output in zip(jobs, outputs, strict=True):
    assert ids_of(output) == want.said
    assert max(errors(folder, [*want.ids, *want.said], output.outputs[0].logprobs)) < ROUNDING["float32"]
  return dict(zip(asked, jobs, strict=True))


def all_fields(llm, folder):
  few = [options for options in FIELDS.values() if len(options.get("logit_bias", ())) < 8]   # or the graph is another
  return in_one_batch(llm, folder, dict(enumerate([
    *few, {**FIELDS["sampled"], **FIELDS["penalties"]}, {"allowed_token_ids": [*range(259, 320, 3)]},
    {**SAMPLED, "seed": -3}], 1100)))


def test_fields_of_a_batch_do_not_mix(exact, folder): all_fields(exact, folder)


def test_seeded_text_does_not_depend_on_the_batch(exact, folder):
  """Others, other places among them, alone. One of each batch asks for a mask: its steps are those of all fields."""
  mine, masked = {**SAMPLED, "seed": 5}, {"allowed_token_ids": [*range(259, 320, 5)]}
  others = [{salt: {**SAMPLED, "seed": salt} for salt in range(first, first + 6)} for first in (1210, 1220)]
  together = [in_one_batch(exact, folder, asked)[1200].said for asked in (
    {1200: mine, **others[0], 1230: masked}, {**others[1], 1231: masked, 1200: mine})]
  want = job(folder, 1, 4, 1200, **mine, **BIAS)
  assert together == [ids_of(exact.generate(want.prompt, want.params)[0])] * 2


@pytest.mark.parametrize("drafts", ["ngram", "itself"])
def test_the_text_with_drafts_is_that_without(exact, folder, drafts, monkeypatch):
  """By what was said before, and by the model itself, which is always right. Greedy, drawn, and one that repeats. How
  many drafts are worth their time hangs on the CPU: here it has AVX-512's registers, whatever this one has."""
  monkeypatch.setattr("tinyvllm_extra.speculation.cpu_sums", lambda: 8)
  config = {"num_speculative_tokens": 3, **({"model": str(folder)} if drafts == "itself" else {"method": "ngram"})}
  drafting, _ = open_engine(folder, dtype="float32", num_gpu_blocks_override=BLOCKS + 1, speculative_config=config)
  jobs = [tokens([*range(260, 266)] * 2), tokens(range(270, 276)), tokens(range(280, 283))]
  asked = [params(16), params(16, **SAMPLED, seed=7), params(16, logit_bias={300: 100})]
  same_outputs(drafting.generate(jobs, asked, False), exact.generate(jobs, asked, False))
  check_invariants(drafting)
  found = drafting.get_metrics()
  drafted, accepted = (found[f"spec_decode_num_{name}_tokens"] for name in ("draft", "accepted"))
  assert (accepted == drafted > 10 if drafts == "itself" else drafted >= accepted > 5), (accepted, drafted)


# limits, by construction

def kernels_of(llm):
  """Of all captured steps: the step's key, the kernel's name, its buffers as the device gets them and which of
  them it writes."""
  for key, (_, graph) in llm.runner.graphs.items():
    calls = [*graph.captured.linear.src]
    while calls:
      call = calls.pop()
      kernel = call.src[0]
      if kernel.op is Ops.CUSTOM_FUNCTION and kernel.arg == "graph": calls += kernel.src[0].src
      else:
        buffers = [u.buffer for u in get_call_arg_uops(call)]
        if kernel.op is Ops.PROGRAM:
          yield key, ansistrip(kernel.arg.name), [(buffers[i], i in kernel.arg.outs) for i in kernel.arg.globals]
        else:
          assert kernel.op is Ops.COPY, f"what is {kernel.op}?"
          yield key, "copy", [(b, not i) for i, b in enumerate(buffers)]


def beyond_limits(llm, largest):
  """What a narrow device would refuse, or get wrong in silence: a line for each kernel."""
  found, steps = set(), Counter()
  for key, name, buffers in kernels_of(llm):
    steps[key] += 1
    twice = [a for (a, one), (b, other) in itertools.combinations(buffers, 2) if a.base is b.base and (
      (a.offset, a.nbytes) == (b.offset, b.nbytes)
      or (one or other) and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes)]
    if len(buffers) > MOST_BUFFERS: found.add(f"{key} {name}: {len(buffers)} buffers")
    if twice: found.add(f"{key} {name}: the same memory twice")
    if (size := max(b.nbytes for b, _ in buffers)) > largest: found.add(f"{key} {name}: {size} bytes")
    if {b.device for b, _ in buffers} != {Device.DEFAULT}: found.add(f"{key} {name}: not on {Device.DEFAULT}")
  assert steps.keys() == llm.runner.graphs.keys() and min(steps.values()) > 10, "kernels that nobody has looked at"
  return sorted(found)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_with_a_cache_of_8_bits_ids_are_those_of_numpy_with_k_and_v_rounded_alike(folder, kind):
  """But for places where two tokens are nearly as likely; alone as in a batch, in chunks and found in the cache."""
  if kind == "fp8" and dtypes.half not in Device.default.renderer.supported_dtypes():
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8' needs float16, which this device lacks; use 'int8'"):
      open_engine(folder, kv_cache_dtype=kind)
    return
  llm, _ = open_engine(folder, dtype="float32", kv_cache_dtype=kind)
  rng = random.Random(kind)
  prompts = [[rng.randrange(3, 320) for _ in range(n)] for n in (1, 7, 2 * BS, 2 * BUDGET + 3)]
  said = [ids_of(output) for output in llm.generate([tokens(ids) for ids in prompts], params(6))]
  same = 0
  for ids, new in zip(prompts, said, strict=True):
    logits = reference_logits(folder, [*ids, *new], lambda x: in_8_bits(x, kind)[0])[len(ids) - 1:-1]
    behind = logits.max(1) - logits[range(6), new]
    assert (behind < DECIDED).all(), behind
    same += sum(behind == 0)
    assert ids_of(llm.generate(tokens(ids), params(6))[0]) == new
  assert same >= 22, same
  assert beyond_limits(llm, Backend().largest_tensor()) == []


def test_kernels_of_every_kind_of_step_keep_within_what_the_narrowest_device_takes(exact, folder, monkeypatch):
  """Each kind is run here, should this test run alone: greedy, sampled, changed, masked, with log probabilities."""
  monkeypatch.setattr(graphs, "OFTEN", 0)   # none in the place of another
  for length in (1, 2, 4, 8): exact.generate(tokens([270 + length] * length), params(1))
  for options in (*FIELDS.values(), {"logprobs": 3}): exact.generate(tokens([260]), params(1, **options))
  exact.generate(tokens([*range(260, 268)]), params(1, logprobs=20, prompt_logprobs=20))
  all_fields(exact, folder)
  kinds = {(mode, *map(bool, features)) for _, _, mode, *features in map(graphs.sizes_of, exact.runner.graphs)}
  assert {(0, False, False, False), (1, False, False, False), (2, False, False, False), (0, True, False, False),
          (0, False, True, False), (0, False, False, True), (2, True, True, True)} <= kinds
  assert beyond_limits(exact, Backend().largest_tensor()) == []


def test_kernels_in_any_type_keep_within_limits(llm):
  for length in (1, 8): llm.generate(tokens([280 + length] * length), params(1))
  assert beyond_limits(llm, Backend().largest_tensor()) == []


# a device that takes no large tensors

LARGEST = 40 * 1024   # bytes: 32 rows of logits, 160 blocks of the 257 that 16 sequences could use, the embeddings


def take_no_more(monkeypatch, largest): monkeypatch.setattr(Backend, "largest_tensor", lambda backend: largest)


def test_a_step_and_a_pool_are_no_larger_than_one_tensor_may_be_and_it_is_said(folder, monkeypatch, exact):
  take_no_more(monkeypatch, LARGEST)
  small, told = open_engine(folder, dtype="float32", max_num_batched_tokens=512, max_num_seqs=16)
  assert small.config.max_num_batched_tokens == 32 and 32 * 320 * 4 <= LARGEST < 64 * 320 * 4, "logits of its tokens"
  assert [line for line in told if "a step takes 32 tokens" in line]
  with pytest.raises(ValueError, match="num_gpu_blocks_override=161 must be at most 160"):
    open_engine(folder, dtype="float32", num_gpu_blocks_override=161)
  blocks = [x for cache in small.runner.kv_caches for x in cache]
  assert LARGEST / 2 < max(x.nbytes() for x in blocks) <= LARGEST and small.runner.num_blocks == small.blocks.num_blocks
  want = job(folder, 8, 3, 1300)
  output, = small.generate(want.prompt, asked := params(3, prompt_logprobs=3))
  assert beyond_limits(small, LARGEST) == []
  same_outputs([output], plain := forget(exact).generate(want.prompt, asked))
  assert ids_of(output) == want.said
  for a, b in zip(output.prompt_logprobs[1:], plain[0].prompt_logprobs[1:], strict=True):
    assert {*a} == {*b} and max(abs(a[i].logprob - b[i].logprob) for i in a) < 1e-5


def test_a_weight_larger_than_the_device_takes_is_refused_by_name_with_both_sizes(folder, monkeypatch):
  take_no_more(monkeypatch, LARGEST // 4)
  with pytest.raises(ValueError, match=f"{folder}: model.embed_tokens: .* may have {LARGEST // 4} .*DEV=CPU"):
    open_engine(folder, dtype="float32")
