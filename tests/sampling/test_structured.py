"""Structured outputs: the output of a random model follows its JSON schema, regular expression, choices or grammar.
Checked with json, jsonschema, re and, token by token, with a list of the tokens' texts."""
import json
import re

import jsonschema
import numpy as np
import pytest
from helpers.data import read_data
from helpers.engines import ENGINE, assert_same_outputs, tokens
from helpers.models import VOCAB, tiny_model
from helpers.reference import SPM, changed, reference_logits
from helpers.tokenizers import byte_level_bpe

from tinyvllm import LLM, SamplingParams, StructuredOutputsParams

GUIDED = {**ENGINE, "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 4}
DATA = read_data("structured_outputs.json")
FORMATS = DATA["formats"]
VALUES = {name: (kind, value) for name, (kind, value, *_) in FORMATS.items()}
PIECES = [chr(int(piece[3:5], 16)) if SPM.IsByte(i) else piece.replace("\u2581", " ")
          for i, piece in enumerate(SPM.IdToPiece([*range(VOCAB)]))]


def structured(kind, value, seed=0, **options):
  common = {"temperature": 1.5, "seed": seed, "max_tokens": 900}
  return SamplingParams(**{**common, **options}, structured_outputs=StructuredOutputsParams(**{kind: value}))


def free(seed=0, **options): return SamplingParams(**{"temperature": 1.5, "seed": seed, "max_tokens": 40, **options})
def prompts(n): return [tokens([3 + 7 * i % 300, 5 + i, 300 - i]) for i in range(n)]
def ids_of_texts(*texts): return [i for i, piece in enumerate(PIECES) if piece in texts]   # a character may have two


# A bias that makes JSON end soon: against white space and other control characters
END_SOON = dict.fromkeys(range(3, 36), -9) | dict.fromkeys(ids_of_texts("}", '"', ","), 4)


def run(llm, n, kind, value, **options):
  """Return the outputs of `n` prompts with seeds 0 to n-1. Each must end because it is complete."""
  params = [structured(kind, value, seed, **options) for seed in range(n)]
  outputs = [o.outputs[0] for o in llm.generate(prompts(n), params, use_tqdm=False)]
  assert {(o.finish_reason, o.stop_reason) for o in outputs} == {("stop", None)}
  return [o.text for o in outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tiny_model(tmp_path_factory.mktemp("long"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def llm(folder): return LLM(folder, **GUIDED)


# JSON schemas that zod, zod-to-json-schema, openai, LangChain and pydantic write: outside/record_schemas.py
GENERATED = read_data("generated_schemas.json")


@pytest.mark.parametrize("name", GENERATED)
def test_schema_of_a_generator_is_followed_or_refused_by_its_keyword(llm, name):
  schema = GENERATED[name]
  if "uniqueItems" in json.dumps(schema):
    with pytest.raises(ValueError, match="uniqueItems"): run(llm, 1, "json", schema)
  else:
    bias = END_SOON | dict.fromkeys(ids_of_texts("]"), 8)
    for text in run(llm, 1, "json", schema, logit_bias=bias): jsonschema.validate(json.loads(text), schema)


# Parameters

@pytest.mark.parametrize("options", [*DATA["invalid_params"], {"regex": b"a"}, {"choice": ("a",)}], ids=str)
def test_params_without_exactly_one_valid_field_raise(options):
  with pytest.raises(ValueError): StructuredOutputsParams(**options)
  with pytest.raises(ValueError): SamplingParams(structured_outputs=options)


@pytest.mark.parametrize("kind, value, word", DATA["invalid_formats"], ids=str)
def test_invalid_format_raises(llm, kind, value, word):
  with pytest.raises(ValueError, match=f"structured_outputs.*{word}"): llm.generate("the cat", structured(kind, value))


# Outputs

@pytest.mark.parametrize("name", FORMATS)
def test_outputs_follow_the_format(llm, name):
  kind, value, num_runs, num_different, *pattern = FORMATS[name]
  texts = run(llm, num_runs, kind, value, logit_bias=END_SOON if "long" in name else None)
  if "json" in kind:
    texts, schema = [*map(json.loads, texts)], json.loads(value) if isinstance(value, str) else value
    if kind == "json_object": schema = {"type": "object"}
    for x in texts: jsonschema.validate(x, schema, format_checker=jsonschema.FormatChecker())
  elif kind == "choice": assert {*texts} <= {*value}
  else: assert all(re.fullmatch(*pattern or [value], text) for text in texts), texts
  assert len({*map(repr, texts)}) >= num_different, texts


@pytest.mark.parametrize("kind, value, n", [
  (*VALUES["nested object"], 12), ("regex", "(ab|cd){30}", 25), (*VALUES["Lark"], 5),
  ("choice", ["a long choice", "another one"], 1)], ids=["json", "regex", "grammar", "choice"])
def test_output_truncated_by_max_tokens_is_valid_prefix(llm, kind, value, n):
  for result in llm.generate(prompts(8), [structured(kind, value, seed, max_tokens=n) for seed in range(8)]):
    output = result.outputs[0]
    assert output.finish_reason == "length" and len(output.token_ids) == n
    constraint = StructuredOutputsParams(**{kind: value}).constraint(llm.tokenizer, VOCAB, (2,))
    assert constraint.matcher.validate_tokens(output.token_ids) == n
    if kind == "regex": assert re.fullmatch("(ab|cd)*[ac]?", output.text)
  assert run(llm, 1, "regex", "x{4}", max_tokens=4) == ["xxxx"], "complete at max_tokens"


@pytest.mark.parametrize("options", DATA["penalties"], ids=str)
@pytest.mark.parametrize("kind, value, start, whole", DATA["greedy"])
def test_greedy_ids_equal_best_allowed_tokens(llm, folder, kind, value, start, whole, options):
  """start: regular expression of a text that may become a whole one."""
  for job in prompts(4):
    output = llm.generate(job, structured(kind, value, temperature=0.0, **options))[0].outputs[0]
    ids, text = [], ""
    while allowed := [i for i, piece in enumerate(PIECES) if re.fullmatch(start, text + piece)]:
      if re.fullmatch(whole, text): allowed.append(2)
      logits = reference_logits(folder, [*job["prompt_token_ids"], *ids])[-1]
      x = changed(logits, job["prompt_token_ids"], ids, {**options, "allowed_token_ids": allowed})
      ids.append(int(x.argmax()))
      if ids[-1] == 2: break
      text += PIECES[ids[-1]]
    assert output.token_ids == ids and output.finish_reason == "stop"


def test_mixed_batch_equals_single_requests(llm):
  """One prompt takes several prefill chunks. Every second request is unconstrained."""
  constraints = [VALUES["integers"], ("regex", "[a-z]{20,40}"), ("choice", ["yes", "no"]), VALUES["Lark"],
                 ("regex", "[0-9]{9}"), VALUES["enum"]]
  pairs = [(structured(*constraint, i, temperature=1.5 * (i % 3 > 0)), free(i, temperature=i % 2, min_p=i / 50))
           for i, constraint in enumerate(constraints)]
  jobs, params = [*prompts(11), tokens(range(3, 36))], [params for pair in pairs for params in pair]
  together = llm.generate(jobs, params)
  assert_same_outputs(together, [llm.generate(*job)[0] for job in zip(jobs, params, strict=True)])
  assert {o.outputs[0].finish_reason for o in together[::2]} == {"stop"}


def test_text_after_preemption_is_equal(llm, folder):
  small = LLM(folder, num_gpu_blocks_override=17, **{**GUIDED, "max_num_seqs": 2, "max_num_batched_tokens": 2})
  params = [structured("regex", "[a-z ]{30,50}x", i) if i % 4 else free(i) for i in range(8)]
  assert_same_outputs(small.generate(prompts(8), params), llm.generate(prompts(8), params))
  assert small.get_metrics()["num_preemptions"] > 0


@pytest.mark.parametrize("kind, value", [VALUES["nested object"], ("regex", "[a-z]{5,20}")], ids=["json", "regex"])
def test_samples_equal_single_requests_with_next_seeds(llm, kind, value):
  samples = llm.generate(prompts(1), structured(kind, value, 7, n=4))[0].outputs
  single = [llm.generate(prompts(1), structured(kind, value, 7 + i))[0].outputs[0] for i in range(4)]
  assert [(c.text, c.token_ids) for c in samples] == [(c.text, c.token_ids) for c in single]
  assert {c.finish_reason for c in samples} == {"stop"} and len({c.text for c in samples}) == 4


def test_stop_string_or_id_ends_incomplete_output(llm):
  for seed in range(8):
    output = llm.generate("the cat", structured("regex", "[a-e]{60}", seed, stop=["e", "dd"]))[0].outputs[0]
    assert output.finish_reason == "stop" and output.stop_reason in ("e", "dd") and re.fullmatch("[a-d]*", output.text)
  stop = ids_of_texts("b")
  output = llm.generate("the cat", structured("regex", "a{9}b{9}", stop_token_ids=stop))[0].outputs[0]
  assert output.text == "a" * 9 and output.token_ids[-1] == output.stop_reason in stop


def test_bias_and_penalties_allow_no_other_tokens(llm):
  kind, value = VALUES["array, as text"]
  for text in run(llm, 8, kind, value, logit_bias=dict.fromkeys([2, *ids_of_texts("}", "[")], 100)):
    jsonschema.validate(json.loads(text), json.loads(value))
  bias = dict.fromkeys(ids_of_texts("a", "b", "x"), -100)
  assert set(run(llm, 8, "regex", "[ab]x", logit_bias=bias)) == {"ax", "bx"}
  penalties = {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
  assert set(run(llm, 4, "regex", "a{30}", **penalties)) == {"a" * 30}
  assert set(run(llm, 8, "choice", ["b", "c"], logit_bias=dict.fromkeys(ids_of_texts("b"), -100))) == {"c"}


def test_tokenizer_json_outputs_match(tmp_path):
  folder = tiny_model(tmp_path, tokenizer=False, seed=3, max_position_embeddings=1024)
  byte_level_bpe().save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
  llm = LLM(folder, **GUIDED)
  kind, schema = VALUES["nested object"]
  for text in run(llm, 8, kind, schema): jsonschema.validate(json.loads(text), schema)
  assert set(run(llm, 64, "choice", ["é", "🙂", " naïve"])) == {"é", "🙂", " naïve"}
  assert all(re.fullmatch("[a-z ]{5,9}", text) for text in run(llm, 24, "regex", "[a-z ]{5,9}"))


def test_vocabulary_larger_than_tokenizer_outputs_match(tmp_path):
  """365 is not a multiple of 32. Ids beyond the tokenizer's vocabulary and the unknown token have no text."""
  llm = LLM(tiny_model(tmp_path, vocab_size=365, eos_token_id=[2, 1], seed=4, max_position_embeddings=1024), **GUIDED)
  outputs = [o.outputs[0] for o in llm.generate(prompts(64), [structured("regex", ".{3,40}", i) for i in range(64)])]
  assert all(re.fullmatch(".{3,40}", o.text) and o.finish_reason == "stop" for o in outputs)
  assert all(0 < i < VOCAB for o in outputs for i in o.token_ids) and "\u2047" not in "".join(o.text for o in outputs)
  assert {1, 2} <= {o.token_ids[-1] for o in outputs}, "both end tokens occur"


# Text before the format

@pytest.mark.parametrize("text, opened, expected", DATA["escapes"])
def test_escapes_precede_the_format(llm, text, opened, expected):
  """Reasoning may come first, and is opened by the prompt or the model; a call, "[c]", replaces the format. "(" may
  open both a call and the format: it belongs to the format."""
  escapes = {"<t>": ("</t>",), "[c]": (), "(c)": (), **({"": opened} if opened else {})}
  params = StructuredOutputsParams(choice=["yes", "(a"], escapes=escapes)
  constraint = params.constraint(llm.tokenizer, VOCAB, (2,))
  for token in llm.tokenizer.encode("\n" + text, False)[2:]: constraint.accept(token)   # without sentencepiece's space
  bits = np.unpackbits(constraint.bitmask().view(np.uint8), bitorder="little")[:VOCAB]
  allowed = {PIECES[i] for i in np.flatnonzero(bits)}
  assert len(allowed) > 100 if expected == "anything" else allowed - {"</s>"} == {*expected.split()}
  assert constraint.matcher.is_stopped() == (text == "yes")
