"""SamplingParams fields implemented by a LogitsProcessor: penalties, logit bias, allowed and banned tokens, log
probabilities. The engine is compared with plain numpy."""
import numpy as np
import pytest
from helpers.data import read_data
from helpers.engines import ENGINE, greedy, ids_of, sampled, tokens
from helpers.models import tiny_model
from helpers.reference import END, N, SPM, encodings, log_softmax, reference_ids, reference_logits
from helpers.tokenizers import byte_level_bpe

from tinyvllm import LLM, Logprob


# The engine, compared with each step's adjusted reference logits

def prompt(length, salt=0): return [259 + (7 * i + 5 * salt + i * i) % 61 for i in range(length)]


def naive_greedy(folder, prompt_ids, n, **options):
  """Return the greedy ids after a prompt."""
  ids = reference_ids(folder, prompt_ids, n, 1e-4, **options)
  assert ids, "rounding may break a tie: choose another prompt"
  return ids


W, M = SPM.EncodeAsIds("wm")
CASES = {name: (prompt(3 + salt % 7, salt), options) for name, (salt, options) in
         read_data("sampling_fields.json")["greedy"].items()}
CASES |= {f"bad word that starts in the prompt, {name}": (
  [*prompt(4, 1), W], {"bad_words": ["wm"], "allowed_token_ids": [W, M], "logit_bias": bias})
  for name, bias in {"allowed": {M: 8.0}, "then banned": {W: 1.0}}.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tiny_model(tmp_path_factory.mktemp("fields"), words=True, eos_token_id=[2, END])


@pytest.fixture(scope="module")
def llm(folder): return LLM(folder, **{**ENGINE, "max_num_seqs": 16})


@pytest.fixture(scope="module")
def small(folder):   # two sequences, 10 blocks of 4 tokens
  return LLM(folder, num_gpu_blocks_override=11, **{**ENGINE, "max_num_seqs": 2, "max_num_batched_tokens": 2})


@pytest.fixture(scope="module")
def expected(folder):   # by the case's name and whether its options are set
  return {(name, is_set): naive_greedy(folder, ids, N, **options if is_set else {})
          for is_set in (True, False) for name, (ids, options) in CASES.items()}


def generate(engine, jobs):
  options = [greedy(N, **CASES[name][1] if is_set else {}) for name, is_set in jobs]
  return [ids_of(o) for o in engine.generate([tokens(CASES[name][0]) for name, _ in jobs], options)]


@pytest.mark.parametrize("name", CASES)
def test_greedy_ids_equal_argmax_of_adjusted_logits(llm, expected, name):
  assert expected[name, True] != expected[name, False][:len(expected[name, True])], "the options must have an effect"
  for job in ((name, True), (name, False), (name, True)): assert generate(llm, [job]) == [expected[job]]


def test_mixed_batch_equals_single_also_after_preemption(llm, small, expected):
  jobs, before = [(name, True) for name in CASES], small.get_metrics()["num_preemptions"]
  mixed = [(name, i % 3 > 0) for i, name in enumerate([*CASES] * 3)]   # 48 requests in 16 slots, or in 2
  for engine, batch in ((llm, jobs), (llm, mixed), (small, mixed)):
    assert generate(engine, batch) == [expected[job] for job in batch]
  assert small.get_metrics()["num_preemptions"] > before + 3, "the KV cache must be too small"


def test_penalties_count_chunked_and_cached_prompts(llm, folder):
  options = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "bad_words": ["n", "no"], "logit_bias": {306: -2}}
  for salt in (31, 32, 33):
    prompt_ids = prompt(45, salt)   # chunks of 16 tokens
    ids = naive_greedy(folder, prompt_ids, N, **options)
    last_chunk = naive_greedy(folder, prompt_ids, N, penalized=prompt_ids[-13:], **options)
    assert ids != last_chunk, "the first chunks must have an effect"
    outputs = [llm.generate(tokens(prompt_ids), greedy(N, **options))[0] for _ in range(2)]
    assert [ids_of(o) for o in outputs] == [ids, ids] and [o.num_cached_tokens for o in outputs] == [0, 44]


def test_bad_word_with_leading_space_is_banned(tmp_path):
  """In a byte-level tokenizer a leading space is part of the token."""
  model = byte_level_bpe()
  model.save(str(tmp_path / "tokenizer.json"))
  folder = tiny_model(tmp_path, tokenizer=False, vocab_size=model.get_vocab_size())
  def encode(text): return model.encode(text).ids
  forms = encode("the") + encode(" the")
  options = {"bad_words": ["the"], "logit_bias": dict.fromkeys(forms, 9.0)}
  assert len(forms) == 2 and encodings(["the"], encode) == [[i] for i in forms]
  unbanned = naive_greedy(folder, [5, 6, 7], 1, **{**options, "bad_words": []})
  assert unbanned == forms[1:], "without bad_words, the form with a space must come first"
  ids = ids_of(LLM(folder, **ENGINE).generate(tokens([5, 6, 7]), greedy(4, **options))[0])
  assert ids == naive_greedy(folder, [5, 6, 7], 4, encode=encode, **options) and not {*ids} & {*forms}


def test_allowed_ids_all_banned_by_min_tokens_are_sampled(llm, folder):
  options = {"allowed_token_ids": [300, 301], "stop_token_ids": [*range(320)], "min_tokens": 3}
  ids = ids_of(llm.generate(tokens(prompt(5, 3)), greedy(6, **options))[0])
  assert ids[:1] == naive_greedy(folder, prompt(5, 3), 1, **options) and {*ids} <= {300, 301}


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 1}], ids=["greedy", "sampled"])
def test_batch_without_processors_uses_plain_graphs(llm, monkeypatch, options):
  jobs = [tokens(prompt(9, 60 + i)) for i in range(3)]
  llm.generate(jobs, greedy(2))   # caches the prompts

  def graphs(**fields):
    monkeypatch.setattr(llm.runner, "graphs", {})
    llm.generate(jobs, greedy(3, **options, **fields))
    return {*llm.runner.graphs}
  plain = graphs()
  assert graphs(repetition_penalty=1.5, logit_bias={5: 1.0}, allowed_token_ids=[*range(99)]) - plain
  assert graphs(repetition_penalty=1.0) == plain, "the default value"


# Seeds

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}


def test_different_seeds_of_request_or_engine_give_different_outputs(llm, folder):
  def outputs(engine, seeds):
    return [tuple(ids_of(o)) for o in engine.generate([tokens([5])] * len(seeds), [sampled(16, x) for x in seeds])]
  assert len({*outputs(llm, [*range(12), 1 + 2**32, -1])}) == 14, "all 64 bits of a seed matter"
  first, same, *others = (outputs(LLM(folder, seed=seed, **ENGINE), [None] * 4) for seed in (1, 1, 2, None, None))
  assert first == same and len({*first, *sum(others, [])}) == 16, "without a seed, each engine chooses one"


# Log probabilities

def check_entries(folder, entries, prefix, ids, k):
  """Check that the log probabilities of `ids` after `prefix` equal the reference's."""
  rows = log_softmax(reference_logits(folder, [*prefix, *ids])[len(prefix) - 1:-1])
  for entry, token, row in zip(entries, ids, rows, strict=True):
    best = np.argsort(-row, kind="stable")[:k].tolist()
    assert [*entry] == [token, *[i for i in best if i != token]] and len(entry) in (k, k + 1)
    for i, logprob in entry.items():
      assert isinstance(logprob, Logprob) and type(logprob.rank) is int and abs(logprob.logprob - row[i]) < 1e-4
      assert logprob.rank == (best.index(i) if i in best else (row > row[i]).sum()) + 1
      assert i < 259 or logprob.decoded_token == SPM.DecodeIds([i])   # lower ids are bytes or special tokens


def check(output, folder, k=None, prompt_k=None, n=1):
  """Check that an output of n samples has the requested log probabilities and no others."""
  ids, entries = output.prompt_token_ids, output.prompt_logprobs
  assert (entries is None if prompt_k is None else entries[0] is None) and len(output.outputs) == n
  if prompt_k is not None: check_entries(folder, entries[1:], ids[:1], ids[1:], prompt_k)
  for c in output.outputs:
    assert k is not None or c.logprobs is c.cumulative_logprob is None
    if k is None: continue
    check_entries(folder, c.logprobs, ids, c.token_ids, k)
    logprobs = [entry[token].logprob for entry, token in zip(c.logprobs, c.token_ids, strict=True)]
    assert abs(c.cumulative_logprob - sum(logprobs)) < 1e-4


def test_logprobs_in_mixed_batch_equal_raw_logits_also_after_preemption(llm, small, folder):
  kinds = [{}, {"temperature": 1.7, "seed": 3, **PENALTIES}, {"repetition_penalty": 1.8, "logit_bias": {300: 3.0}}]
  requests = [(k, prompt_k, kind) for k, prompt_k in ((0, None), (1, 3), (5, None), (20, 4), (None, 2), (None, None))
              for kind in kinds]
  jobs, before = [tokens(prompt(13 + i % 5, 70 + i)) for i in range(18)], small.get_metrics()["num_preemptions"]
  plain = [ids_of(o) for o in llm.generate(jobs, [greedy(16, **kind) for *_, kind in requests])]
  for engine in (llm, small):
    outputs = engine.generate(jobs, [greedy(16, logprobs=k, prompt_logprobs=p, **kind) for k, p, kind in requests])
    assert [ids_of(o) for o in outputs] == plain, "logprobs must not change the output"
    for output, (k, prompt_k, _) in zip(outputs, requests, strict=True): check(output, folder, k, prompt_k)
  assert small.get_metrics()["num_preemptions"] > before, "the KV cache must be too small"
  assert any(len(entry) == 6 for entry in outputs[7].outputs[0].logprobs), "a token must be outside the best five"


def test_logprobs_of_vocabulary_of_7_have_7_entries(tmp_path):
  small = tiny_model(tmp_path, vocab_size=7, eos_token_id=None)
  output, = LLM(small, **ENGINE).generate(tokens([3, 6, 4]), greedy(3, logprobs=20))
  check(output, small, 7)
