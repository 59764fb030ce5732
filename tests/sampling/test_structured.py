"""Structured outputs: the output of a random model follows its JSON schema, regular expression, choices or grammar.
Checked with json, jsonschema, re and, token by token, with llguidance and a vocabulary built in this file."""
import datetime
import decimal
import enum
import functools
import json
import re
import sys
import typing

import annotated_types
import jsonschema
import numpy as np
import pydantic
import pytest
import sentencepiece
from llguidance import LLMatcher, LLTokenizer, grammar_from
from helpers.engines import ENGINE, assert_same_outputs
from helpers.models import VOCAB, sentencepiece_model, tiny_model
from helpers.reference import reference_logits
from helpers.requests import tokens
from helpers.tokenizers import byte_level_bpe

from tinyvllm import LLM, SamplingParams, StructuredOutputsParams
from tinyvllm_extra.packages import MissingPackage

GUIDED = {**ENGINE, "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 4}
SINGLE = {**GUIDED, "max_num_seqs": 1, "max_num_batched_tokens": 1}   # compiling a graph takes a second or more
OBJECT = {"type": "object", "additionalProperties": False}
SCHEMAS = {
  "nested object": {**OBJECT, "required": ["name", "at"], "properties": {
    "name": {"enum": ["Ann", "Bob \"B\""]}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "at": {**OBJECT, "required": ["x"], "properties": {"x": {"type": "boolean"}, "y": {"type": "null"}}}}},
  "enum": {"enum": ["red", "green", "é", 5, -1.5, None, True]},
  "array": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"const": "x"}]}, "minItems": 1, "maxItems": 4},
  "integers": {"type": "array", "items": False, "minItems": 2, "prefixItems": [
    {"type": "integer", "minimum": -20, "maximum": 3}, {"type": "integer", "exclusiveMinimum": 99, "maximum": 1234}]},
  "string": {"type": "string", "minLength": 2, "maxLength": 6},
}
REGEXES = ["[a-f]{3,8}", "[0-9]{3}-[0-9]{4}", "(foo|ba[rz]){1,3}!", "[A-Z][a-z]{2,5}( [A-Z][a-z]{2,5}){0,2}", ".{5}",
           " (the|a) [cm]at( sat){0,5}", "[^ -~]{3}"]
LARK = 'start: "sum " NUMBER (SIGN NUMBER){1,3}\nNUMBER: /[1-9][0-9]{0,2}/\nSIGN: "+" | "-"\n'
GBNF = 'root ::= "(" word ("," word)? ")"\nword ::= [a-c]+ | [0-9] [0-9]\n'


def structured(kind, value, seed=0, **options):
  common = {"temperature": 1.5, "seed": seed, "max_tokens": 900}
  return SamplingParams(**{**common, **options}, structured_outputs=StructuredOutputsParams(**{kind: value}))


def free(seed=0, **options): return SamplingParams(**{"temperature": 1.5, "seed": seed, "max_tokens": 40, **options})
def prompts(n): return [tokens([3 + 7 * i % 300, 5 + i, 300 - i]) for i in range(n)]


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


@pytest.fixture(scope="module")
def lone(folder): return LLM(folder, **SINGLE)


class Vocabulary:
  """The sentencepiece model in llguidance's interface: each token's bytes, and an encoder to byte tokens."""
  eos_token_id, bos_token_id, special_token_ids, is_tokenizer_wrapper = 2, 1, [0, 1, 2], True

  def __init__(self):
    model = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    pieces = [model.IdToPiece(i) for i in range(VOCAB)]
    self.tokens = [bytes([int(p[3:5], 16)]) if model.IsByte(i) else p.replace("\u2581", " ").encode()
                   for i, p in enumerate(pieces)]

  def all_of(self, *texts): return [i for i, text in enumerate(self.tokens) if text in texts]   # a byte may have two

  def __call__(self, text):
    return [self.all_of(bytes([byte]))[0] for byte in (text if isinstance(text, bytes) else text.encode())]


@functools.cache
def vocabulary(): return LLTokenizer(Vocabulary(), n_vocab=VOCAB, eos_token=2, slices=[])
def matcher(kind, value):
  return LLMatcher(vocabulary(), grammar_from(kind, value if isinstance(value, str) else json.dumps(value)))


def naive_greedy(folder, prompt, kind, value, logit_bias=(), repetition_penalty=1.0, presence_penalty=0.0,
                 frequency_penalty=0.0):
  """Return the greedy ids of the reference's adjusted logits, masked to the tokens that the matcher accepts, up to the
  end token or the end of the grammar."""
  out, grammar = [], matcher(kind, value)
  while 2 not in out and not grammar.is_stopped():
    assert not grammar.compute_ff_bytes(), "forced text depends on the tokenizer"
    mask = np.unpackbits(np.frombuffer(grammar.compute_bitmask(), np.uint8), bitorder="little")[:VOCAB].astype(bool)
    x = np.where(mask, reference_logits(folder, [*prompt, *out])[-1], -np.inf)
    for token, change in dict(logit_bias).items(): x[token] += change
    for i in {*prompt, *out}: x[i] *= 1 / repetition_penalty if x[i] > 0 else repetition_penalty
    for i in {*out}: x[i] -= frequency_penalty * out.count(i) + presence_penalty
    out.append(int(x.argmax()))
    assert out[-1] == 2 or grammar.consume_token(out[-1])
  return out


# Parameters

@pytest.mark.parametrize("options", [
  {}, {"json_object": False}, {"json": {"type": "null"}, "regex": "a"}, {"choice": ["a"], "json_object": True},
  {"regex": "a", "grammar": "start: \"a\""}, {"json": 5}, {"json": None, "regex": None}, {"regex": ["a"]},
  {"regex": b"a"}, {"choice": "abc"}, {"choice": []}, {"choice": ["a", 5]}, {"choice": ("a",)}, {"grammar": {"a": "b"}},
  {"json_object": "yes"}, {"json_object": 1}, {"xml": "a"}], ids=str)
def test_params_without_exactly_one_valid_field_raise(options):
  with pytest.raises(ValueError): StructuredOutputsParams(**options)
  with pytest.raises(ValueError): SamplingParams(structured_outputs=options)


@pytest.mark.parametrize("value", ["a", ["a"], 5])
def test_params_from_dict_are_converted_other_types_raise(value):
  params = SamplingParams(structured_outputs={"choice": ["a", "b"]}).structured_outputs
  assert params == StructuredOutputsParams(choice=["a", "b"])
  with pytest.raises(ValueError, match="structured_outputs"): SamplingParams(structured_outputs=value)


def test_conflicting_field_raises_with_both_names():
  for name, value in {"min_tokens": 1, "ignore_eos": True, "allowed_token_ids": [5], "bad_words": ["a"]}.items():
    with pytest.raises(ValueError) as e: structured("regex", "a+", **{name: value})
    assert "structured_outputs" in str(e.value) and name in str(e.value)


# Outputs

@pytest.mark.parametrize("name, n", [*zip(SCHEMAS, (20, 40, 40, 40, 40), strict=True)])
def test_schema_outputs_validate(llm, name, n):
  texts = run(llm, n, "json", json.dumps(SCHEMAS[name]) if name == "array" else SCHEMAS[name])
  values = [json.loads(text) for text in texts]
  for value in values: jsonschema.validate(value, SCHEMAS[name])
  different = {json.dumps(value) for value in values}
  assert len(different) == 7 if name == "enum" else len(different) > 12, different


@pytest.mark.parametrize("kind, value, regex", [
  *(("regex", regex, regex) for regex in REGEXES), ("grammar", LARK, r"sum [1-9]\d{0,2}([+-][1-9]\d{0,2}){1,3}"),
  ("grammar", GBNF, r"\(([a-c]+|\d\d)(,([a-c]+|\d\d))?\)")], ids=[*REGEXES, "Lark", "GBNF"])
def test_regex_and_grammar_outputs_match(llm, kind, value, regex):
  texts = run(llm, 24, kind, value)
  assert all(re.fullmatch(regex, text) for text in texts) and len(set(texts)) > 8, texts


@pytest.mark.parametrize("choices", [["yes", "no", "maybe"], ["a", "ab", "abc"], [" the", "the", "th"],
                                     ["é", "🙂", "naïve 🙃", "e"], ["say \"hi\"\n", "back\\slash"]], ids=str)
def test_choice_outputs_are_all_choices(llm, choices):
  assert set(run(llm, 64, "choice", choices)) == {*choices}


def test_json_object_outputs_are_objects(lone):
  """A bias for } and ", and against white space, makes the objects end."""
  model = Vocabulary()
  bias = dict.fromkeys(model.all_of(b"}", b'"'), 6) | dict.fromkeys(model.all_of(b" ", b"\n", b"\r", b"\t"), -100)
  objects = [json.loads(text) for text in run(lone, 24, "json_object", True, logit_bias=bias)]
  assert all(isinstance(x, dict) for x in objects) and len({json.dumps(x) for x in objects}) > 2


@pytest.mark.parametrize("kind, value, n", [
  ("json", SCHEMAS["nested object"], 12), ("regex", "(ab|cd){30}", 25), ("grammar", LARK, 5),
  ("choice", ["a long choice", "another one"], 1)], ids=["json", "regex", "grammar", "choice"])
def test_output_truncated_by_max_tokens_is_valid_prefix(llm, kind, value, n):
  for result in llm.generate(prompts(8), [structured(kind, value, seed, max_tokens=n) for seed in range(8)]):
    output = result.outputs[0]
    assert output.finish_reason == "length" and len(output.token_ids) == n
    assert matcher("gbnf" if kind == "grammar" else kind, value).validate_tokens(output.token_ids) == n
    if kind == "regex": assert re.fullmatch("(ab|cd)*[ac]?", output.text)


def test_output_complete_at_max_tokens_ends_with_stop(llm):
  for n, reason in ((3, "length"), (4, "stop")):
    output = llm.generate("the cat", structured("regex", "x{4}", max_tokens=n))[0].outputs[0]
    assert (output.text, output.finish_reason) == ("x" * n, reason)


@pytest.mark.parametrize("options", [
  {}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.5, "frequency_penalty": 0.7},
  {"logit_bias": {289: 3, 290: -100}, "repetition_penalty": 1.2, "frequency_penalty": 1.0}], ids=str)
@pytest.mark.parametrize("kind, value", [("regex", "[a-z ]{6,20}"), ("grammar", 'start: /[0-9]{2}[a-h]{2,12}/ "!"?')])
def test_greedy_ids_equal_best_allowed_tokens(llm, folder, kind, value, options):
  for job in prompts(4):
    expected = naive_greedy(folder, job["prompt_token_ids"], kind, value, **options)
    output = llm.generate(job, structured(kind, value, temperature=0.0, max_tokens=40, **options))[0].outputs[0]
    assert output.token_ids == expected and output.finish_reason == "stop"


def test_mixed_batch_equals_single_requests(llm):
  """One prompt takes several prefill chunks. Every second request is unconstrained."""
  constraints = [("json", SCHEMAS["integers"]), ("regex", "[a-z]{20,40}"), ("choice", ["yes", "no"]), ("grammar", LARK),
                 ("regex", "[0-9]{9}"), ("json", SCHEMAS["enum"])]
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


def test_samples_equal_single_requests_with_next_seeds(llm):
  for kind, value in (("json", SCHEMAS["nested object"]), ("regex", "[a-z]{5,20}")):
    samples = llm.generate(prompts(1), structured(kind, value, 7, n=4))[0].outputs
    single = [llm.generate(prompts(1), structured(kind, value, 7 + i))[0].outputs[0] for i in range(4)]
    assert [(c.text, c.token_ids) for c in samples] == [(c.text, c.token_ids) for c in single]
    assert {c.finish_reason for c in samples} == {"stop"} and len({c.text for c in samples}) == 4


def test_stop_string_or_id_ends_incomplete_output(llm):
  for seed in range(8):
    output = llm.generate("the cat", structured("regex", "[a-e]{60}", seed, stop=["e", "dd"]))[0].outputs[0]
    assert output.finish_reason == "stop" and output.stop_reason in ("e", "dd") and re.fullmatch("[a-d]*", output.text)
  stop = Vocabulary().all_of(b"b")
  output = llm.generate("the cat", structured("regex", "a{9}b{9}", stop_token_ids=stop))[0].outputs[0]
  assert output.text == "a" * 9 and output.token_ids[-1] == output.stop_reason in stop


def test_bias_and_penalties_allow_no_other_tokens(lone):
  model = Vocabulary()
  for value in run(lone, 8, "json", SCHEMAS["array"], logit_bias=dict.fromkeys([2, *model.all_of(b"}", b"[")], 100)):
    jsonschema.validate(json.loads(value), SCHEMAS["array"])
  bias = dict.fromkeys(model.all_of(b"a", b"b", b"x"), -100)
  assert set(run(lone, 8, "regex", "[ab]x", logit_bias=bias)) == {"ax", "bx"}
  penalties = {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
  assert set(run(lone, 4, "regex", "a{30}", **penalties)) == {"a" * 30}
  assert set(run(lone, 8, "choice", ["b", "c"], logit_bias=dict.fromkeys(model.all_of(b"b"), -100))) == {"c"}


def test_tokenizer_json_outputs_match(tmp_path):
  folder = tiny_model(tmp_path, tokenizer=False, seed=3, max_position_embeddings=1024)
  byte_level_bpe().save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
  llm = LLM(folder, **SINGLE)
  for text in run(llm, 8, "json", SCHEMAS["nested object"]):
    jsonschema.validate(json.loads(text), SCHEMAS["nested object"])
  assert set(run(llm, 64, "choice", ["é", "🙂", " naïve"])) == {"é", "🙂", " naïve"}
  assert all(re.fullmatch("[a-z ]{5,9}", text) for text in run(llm, 24, "regex", "[a-z ]{5,9}"))


def test_vocabulary_larger_than_tokenizer_outputs_match(tmp_path):
  """365 is not a multiple of 32. Ids beyond the tokenizer's vocabulary and the unknown token have no text."""
  llm = LLM(tiny_model(tmp_path, vocab_size=365, eos_token_id=[2, 1], seed=4, max_position_embeddings=1024), **SINGLE)
  params = [structured("regex", ".{3,40}", i) for i in range(64)]
  outputs = [o.outputs[0] for o in llm.generate(prompts(64), params)]
  assert all(re.fullmatch(".{3,40}", o.text) and o.finish_reason == "stop" for o in outputs)
  assert all(0 < i < VOCAB for o in outputs for i in o.token_ids) and "\u2047" not in "".join(o.text for o in outputs)
  assert {1, 2} <= {o.token_ids[-1] for o in outputs}, "both end tokens occur"


def test_tokenizer_end_token_is_unchanged(llm):
  run(llm, 1, "choice", ["a", "b"])
  assert llm.tokenizer.eos_token_id == 2


# Errors

BAD = [("json", "{"), ("json", {"type": "nope"}), ("json", {"type": "string", "pattern": "("}), ("regex", "("),
       ("regex", "a{2,1}"), ("grammar", "start: nothing"), ("grammar", "start: (\"a\""), ("grammar", "root ::= ("),
       ("json", {"type": "integer", "minimum": 5, "maximum": 4}), ("json", "[1, 2]")]


@pytest.mark.parametrize("kind, value", BAD, ids=str)
def test_invalid_constraint_raises_and_other_requests_continue(llm, kind, value):
  expected, last = llm.generate("the cat", free(3)), None
  llm.add_request("other", "the cat", free(3))
  llm.step()
  before = llm.get_metrics()
  for call in (lambda: llm.add_request("bad", "the cat", structured(kind, value)),
               lambda: llm.generate(["the cat"] * 2, [free(), structured(kind, value)]),
               lambda: llm.generate_stream("the cat", structured(kind, value))):
    with pytest.raises(ValueError, match="structured_outputs"): call()
  assert llm.get_metrics() == before
  while llm.has_unfinished_requests(): last = llm.step() or last
  assert_same_outputs(last, expected)


def test_missing_llguidance_raises_and_other_requests_continue(folder, monkeypatch):
  fresh, install = LLM(folder, **SINGLE), re.escape("pip install 'tinyvllm[grammar]'")
  monkeypatch.setitem(sys.modules, "llguidance", None)
  with pytest.raises(MissingPackage, match=install): fresh.generate("the cat", structured("regex", "a+"))
  assert not fresh.has_unfinished_requests() and fresh.generate("the cat", free())[0].finished


def test_escapes_precede_the_format(llm):
  """Reasoning may come first, and is opened by the prompt or the model; a call replaces the format."""
  def words(bitmask): return {llm.tokenizer.decode([i], False) for i in range(320) if bitmask[i // 32] >> i % 32 & 1}
  def accept(constraint, text):   # without sentencepiece's space
    for token in llm.tokenizer.encode(f"\n{text}", False)[2:]: constraint.accept(token)
  def constraint(**fields):
    params = StructuredOutputsParams(choice=["yes"], escapes={"<t>": ("</t>",), "[c]": ()}, **fields)
    return params.constraint(llm.tokenizer, 320, (2,))
  own = constraint()
  assert {"<", "[", "y"} <= words(own.bitmask()) and "n" not in words(own.bitmask())
  accept(own, "<t>hm <[c]>")
  assert len(words(own.bitmask())) > 100 and not own.is_done, "reasoning is free"
  accept(own, "</t>")
  assert "<" in words(own.bitmask()) and "n" not in words(own.bitmask())
  accept(own, "y")
  assert words(own.bitmask()) <= {"e", "es"}, "escapes are only at the start"
  accept(own, "es")
  assert own.is_done
  for other in (constraint(), constraint(opened=("</r>",))):
    accept(other, "[c]yes" if other.ends is None else "yes</t>")
    assert len(words(other.bitmask())) > 100 and not other.is_done


class Colour(enum.Enum):
  RED, BLUE = "red", "blue"


class Order(pydantic.BaseModel):
  """A note, which is ignored."""
  price: decimal.Decimal
  day: datetime.date
  colour: Colour = Colour.RED
  counts: dict[typing.Literal["a", "b"], int]
  share: typing.Annotated[float, annotated_types.Gt(0), annotated_types.Lt(1)]
  level: int | None = pydantic.Field(None, gt=0, lt=3, examples=[1])
  secret: pydantic.SecretStr = pydantic.Field(max_length=3)
  lines: list["Order"] = pydantic.Field([], max_length=1)


def test_schema_of_pydantic_gives_valid_models(lone):
  schema = Order.model_json_schema()
  for seed in range(6):
    params = structured("json", schema, seed, max_tokens=900, logit_bias={i: -9 for i in range(3, 35)})
    output = lone.generate(prompts(1), params)[0].outputs[0]
    if output.finish_reason == "stop": assert Order.model_validate_json(output.text)
  assert output.finish_reason == "stop"


@pytest.mark.parametrize("keyword, value", [
  ("uniqueItems", True), ("not", {}), ("if", {}), ("dependentRequired", {}), ("unevaluatedProperties", False),
  ("contains", {}), ("propertyNames", {"pattern": "a"})])
def test_unsupported_keyword_of_schema_is_named(lone, keyword, value):
  with pytest.raises(ValueError, match=keyword): run(lone, 1, "json", {"type": ["object", "array"], keyword: value})


@pytest.mark.parametrize("schema, texts", [
  ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, {"1", "2"}),
  ({"type": "array", "items": {"const": 1}, "uniqueItems": False, "minItems": 2, "maxItems": 2}, {"[1,1]"}),
  ({"const": "a", "format": "of my own", "x-note": 1, "$comment": "b"}, {'"a"'}),
  ({"type": "object", "propertyNames": {"enum": ["k"]}, "additionalProperties": {"const": 5}, "minProperties": 1}, {
   '{"k":5}'})], ids=["exclusive", "unique", "notes", "names"])
def test_schema_of_generators_is_accepted(lone, schema, texts):
  fields = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}, "max_tokens": 30}
  outputs = lone.generate(prompts(6), [SamplingParams(**fields, seed=i) for i in range(6)])
  assert {output.outputs[0].text for output in outputs} <= texts
