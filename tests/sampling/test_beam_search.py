"""LLM.beam_search, compared with a naive beam search on a plain numpy LLaMA."""
import numpy as np
import pytest
from helpers.data import read_data
from helpers.engines import BS, ENGINE, assert_all_blocks_freed, greedy, prompt, tokens
from helpers.models import tiny_model
from helpers.reference import log_softmax, reference_greedy, reference_logits

from tinyvllm import LLM, BeamSearchParams

# The vocabulary has 7 tokens: a beam of ten exceeds it
BEAM = {**ENGINE, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 4}   # few graphs
ENDS = {"end token": {2}, "no end token": set()}
# Prompts for which some of the best sequences are finished, and for which it does not matter when a search removes
# finished sequences from the beam. Compared scores differ by at least 2e-3. One of the two best tokens after the last
# prompt is the end token
NARROW_PROMPTS = read_data("beam_search.json")["prompts"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  path = tmp_path_factory.mktemp("beam")
  folders = {name: tiny_model(path / name, seed=3, vocab_size=7, eos_token_id=2 if ends else None)
             for name, ends in ENDS.items()}
  (folders["no end token"] / "tokenizer_config.json").write_text('{"eos_token": null}')
  return folders


@pytest.fixture(scope="module")
def llms(folders): return {name: LLM(path, **BEAM) for name, path in folders.items()}


@pytest.fixture(scope="module")
def words_llm(words_folder): return LLM(words_folder, **BEAM)


def search(llm, ids, width, length, **options):
  output, = llm.beam_search([tokens(ids)], BeamSearchParams(width, length, **options))
  return output.sequences


def best(sequences, width, penalty):
  """Return the pairs of (ids, sum of log probabilities) with the highest scores, best first."""
  return sorted(sequences, key=lambda x: x[1] / len(x[0]) ** penalty, reverse=True)[:width]


def naive_beam_search(folder, ids, width, length, penalty, ends):
  """Keep the best `width` unfinished sequences in each step, and collect the finished ones. If `width` is at least the
  size of the vocabulary, and the length is 2, these are all sequences."""
  beams, finished = [([], 0.0)], []
  for _ in range(length):
    longer = [([*out, token], total + logprob) for out, total in beams
              for token, logprob in enumerate(log_softmax(reference_logits(folder, [*ids, *out])[-1]))]
    finished += [beam for beam in longer if beam[0][-1] in ends]
    beams = best([beam for beam in longer if beam[0][-1] not in ends], width, 0)
  return best(finished + beams, width, penalty)


def check_beams(sequences, folder, ids, width, length, ends=(), penalty=1.0):
  """Check that the results of a search from `ids` equal the naive search's."""
  expected = naive_beam_search(folder, ids, width, length, penalty, ends)
  assert [x.tokens for x in sequences] == [[*ids, *out] for out, _ in expected]
  np.testing.assert_allclose([x.cum_logprob for x in sequences], [total for _, total in expected], atol=1e-4)
  assert [x.finish_reason for x in sequences] == ["stop" if out[-1] in ends else "length" for out, _ in expected]
  for x in sequences:
    logprobs = [entry[token].logprob for entry, token in zip(x.logprobs, x.tokens[len(ids):], strict=True)]
    assert sum(logprobs) == pytest.approx(x.cum_logprob)


@pytest.mark.parametrize("penalty", [None, 0.0, 2.0])
@pytest.mark.parametrize("ends", ENDS)
def test_beam_search_equals_naive_search(llms, folders, ends, penalty):
  """Prompt lengths around block boundaries, outputs of several blocks, several prompts in one call."""
  llm, options = llms[ends], {} if penalty is None else {"length_penalty": penalty}
  for prompts, width, length in ((NARROW_PROMPTS[ends], 2, 7), ([[6, 1, 4]], 7, 2), ([[6, 1, 4]], 10, 2)):
    params = BeamSearchParams(width, length, **options)
    with assert_all_blocks_freed(llm): outputs = llm.beam_search([tokens(ids) for ids in prompts], params)
    for ids, output in zip(prompts, outputs, strict=True):
      check_beams(output.sequences, folders[ends], ids, width, length, ENDS[ends], options.get("length_penalty", 1.0))
    assert {x.finish_reason for o in outputs for x in o.sequences} == ({"stop", "length"} if ENDS[ends] else {"length"})


def test_beam_search_vocabulary_of_320_equals_naive(words_llm, words_folder):
  """Prompts around block boundaries. The second search of the first prompt hits the prefix cache."""
  with assert_all_blocks_freed(words_llm):
    for ids in (prompt(2 * BS - 1, 2600), prompt(2 * BS, 2601), prompt(2 * BS - 1, 2600)):
      check_beams(search(words_llm, ids, 3, 2 * BS + 1), words_folder, ids, 3, 2 * BS + 1, {2})


def test_beams_hit_prefix_cache(words_llm):
  with assert_all_blocks_freed(words_llm) as before: search(words_llm, prompt(10 * BS, 2610), 3, 5)
  after = words_llm.get_metrics()
  queries, hits = (after[name] - before[name] for name in ("prefix_cache_queries", "prefix_cache_hits"))
  assert hits == 4 * 3 * 10 * BS and queries - hits < 10 * BS + 4 * 3 * BS, "the prompt must be computed only once"


def test_ignore_eos_continues_after_end_token(llms, folders):
  ids = NARROW_PROMPTS["end token"][0]
  check_beams(search(llms["end token"], ids, 2, 7, ignore_eos=True), folders["end token"], ids, 2, 7)


def test_beam_ends_at_max_model_len(llms, folders):
  ids = [3 + i % 4 for i in range(BEAM["max_model_len"] - 3)]
  check_beams(search(llms["no end token"], ids, 2, 20), folders["no end token"], ids, 2, 3)


def test_text_includes_prompt(words_llm):
  """Also checks a single prompt that is not in a list."""
  output, = words_llm.beam_search("the cat", BeamSearchParams(2, 4))
  greedy_text = words_llm.generate("the cat", greedy(4))[0].outputs[0].text
  greedy_output, = words_llm.beam_search([{"prompt": "the cat"}], BeamSearchParams(1, 4))
  assert greedy_output.sequences[0].text == "the cat" + greedy_text
  assert len(output.sequences) == 2 and all(x.text.startswith("the cat") for x in output.sequences)


def test_beam_search_within_stream_is_equal(llms, folders):
  folder, llm, ids, stream_prompt = folders["no end token"], llms["no end token"], [3, 1, 4, 1, 5], [3, 6, 4, 5]
  with assert_all_blocks_freed(llm):
    stream, output_ids = llm.generate_stream(tokens(stream_prompt), greedy(20)), []
    for i, output in enumerate(stream):
      output_ids += output.outputs[0].token_ids
      if i < 3: check_beams(search(llm, ids, 4, 7), folder, ids, 4, 7)
  assert output_ids == reference_greedy(folder, stream_prompt, 20)


def test_no_prompts_gives_no_outputs(words_llm): assert words_llm.beam_search([], BeamSearchParams(2, 3)) == []


def test_invalid_prompt_raises_before_any_prompt_runs(words_llm):
  with assert_all_blocks_freed(words_llm) as before:
    with pytest.raises(ValueError, match="320"):
      words_llm.beam_search([tokens([5]), tokens([5, 320])], BeamSearchParams(2, 3))
    assert words_llm.get_metrics() == before
