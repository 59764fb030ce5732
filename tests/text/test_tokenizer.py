"""Encoding, decoding, incremental decoding and chat templates with each kind of tokenizer."""
import dataclasses
import json
import random
from types import SimpleNamespace

import pytest
from gguf import GGUFWriter
from helpers.data import read_data
from helpers.gguf_files import write_gguf
from helpers.models import VOCAB, sentencepiece_model, tiny_model
from helpers.tokenizers import SPECIALS, TEXTS, byte_level_bpe
from tokenizers import AddedToken, processors

from tinyvllm import LLM, SamplingParams
from tinyvllm.config import InputError
from tinyvllm.request import Sequence
from tinyvllm.tokenizer import TextStream, Tokenizer
from tinyvllm_extra.formats.gguf import SPLITS, make_tokenizer
from tinyvllm_extra.formats.hub import open_checkpoint
from tinyvllm_extra.text.huggingface import load_tokenizer

# Conversations as clients send them, rendered with templates that accept only some forms. The published templates are
# in outside/test_chat_templates.py
CONVERSATIONS = read_data("rendered_conversations.json")
CHAT = CONVERSATIONS["templates"]["ChatML"]


def sentencepiece(folder, config=None):
  """Return a SentencePiece tokenizer. config: the content of tokenizer_config.json."""
  (folder / "tokenizer.model").write_bytes(sentencepiece_model())
  (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
  return load_tokenizer(folder)


def byte_level(folder, config=None, post_processor=None, added=()):
  """Return a byte-level BPE from tokenizer.json. config: the content of tokenizer_config.json."""
  model = byte_level_bpe()
  if post_processor: model.post_processor = post_processor
  model.add_tokens([*added])
  model.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
  return load_tokenizer(folder)


@pytest.fixture(scope="module")
def spm(tmp_path_factory): return sentencepiece(tmp_path_factory.mktemp("spm"))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
  names = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHAT}
  return byte_level(tmp_path_factory.mktemp("bpe"), names)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
  """The same BPE, read from a GGUF file."""
  trained = json.loads(byte_level_bpe().to_str())["model"]
  vocab, folder = sorted(trained["vocab"], key=trained["vocab"].get), tmp_path_factory.mktemp("gguf")
  merges = [" ".join(m) if isinstance(m, list) else m for m in trained["merges"]]
  tiny_model(folder, vocab_size=len(vocab))
  write_gguf(folder / "a.gguf", folder, tokens=vocab, merges=merges, specials=SPECIALS, template=CHAT)
  return open_checkpoint(folder / "a.gguf").tokenizer()


@pytest.fixture(params=["spm", "bpe", "gguf"])
def tokenizer(request): return request.getfixturevalue(request.param)


def stream_pieces(tokenizer, ids, prompt=(), skip=True):
  """Return the new text after each token, and after the end of the sequence."""
  params = SamplingParams()
  decoder = tokenizer if skip else SimpleNamespace(decode=lambda ids: tokenizer.decode(ids, False))   # as LLM does
  seq = Sequence(request_id="", tokens=[*prompt], params=params, seed=0, order=(0,), index=0, stop_ids=frozenset(),
                 max_len=10**6)
  stream, pieces = TextStream(decoder, seq), []
  for i in [*ids, None]:
    if i is None: seq.finish_reason = "length"
    else: seq.append(i)
    before = len(stream.text)
    stream.update()
    assert stream.available.num_characters == len(stream.text)
    pieces.append(stream.text[before:])
  return pieces


def test_core_tokenizer_equals_extension_on_plain_text(spm, tmp_path):
  sentencepiece(tmp_path)
  core = Tokenizer(tmp_path)
  for text in [*TEXTS, "".join(TEXTS)]:
    ids = spm.encode(text)
    assert core.encode(text) == ids and core.encode(text, False) == spm.encode(text, False)
    assert core.decode(ids) == text and stream_pieces(core, ids) == stream_pieces(spm, ids)
  assert core.decode([*ids, 2, VOCAB]) == spm.decode([*ids, 2, VOCAB])


def test_gguf_tokenizer_equals_tokenizer_json(bpe, gguf):
  for text in [*TEXTS, "".join(TEXTS)]: assert gguf.encode(text, False) == bpe.encode(text, False)


def test_max_tokens_refuses_long_text_without_encoding_it(tokenizer):
  limited = dataclasses.replace(tokenizer)
  limited.max_tokens = 4
  longest = max(map(len, limited.get_vocab()))
  assert limited.max_characters == 4 * longest and limited.encode("a" * 4 * longest)
  limited.encode_plain = None   # would raise TypeError
  with pytest.raises(ValueError, match=f"at most {4 * longest} characters. However, the prompt has {4 * longest + 1}:"):
    limited.encode("a" * (4 * longest + 1))


def test_eos_token_id_is_read_from_files(tokenizer, tmp_path):
  assert tokenizer.eos_token_id == 2
  assert byte_level(tmp_path).eos_token_id is None, "the files name no end token"


def test_vocabulary_and_bos_token_id_are_those_of_the_files(tmp_path, spm):
  tokenizer = byte_level(tmp_path, {"bos_token": "<bos>"}, added=[AddedToken("<bos>", special=True)])
  vocab = byte_level_bpe().get_vocab()
  assert tokenizer.get_vocab() == vocab | {"<bos>": len(vocab)} and tokenizer.bos_token_id == len(vocab)
  vocab = spm.get_vocab()
  assert (spm.bos_token_id, len(vocab), vocab["<s>"], spm.decode([vocab["▁the"]])) == (1, VOCAB, 1, "the")


def test_sentencepiece_add_bos_token_decides_bos(tmp_path, spm):
  ids = spm.encode("hello")
  assert ids[0] == 1 and 1 not in ids[1:] and 2 not in ids
  assert spm.encode("hello", add_special_tokens=False) == ids[1:]
  for add_bos in (True, False): assert sentencepiece(tmp_path, {"add_bos_token": add_bos}).encode("hello") == (
    ids if add_bos else ids[1:])


def test_tokenizer_json_files_decide_bos(tmp_path, bpe):
  plain = bpe.encode("the cat")
  assert plain == bpe.encode("the cat", False), "no post-processor, no add_bos_token"
  names = {"bos_token": "<|endoftext|>"}
  bos = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
  for config, processor, ids in ((names, bos, [0, *plain]), ({}, bos, [0, *plain]),
                                 ({**names, "add_bos_token": True}, None, [0, *plain]),
                                 ({**names, "add_bos_token": False}, bos, plain)):
    assert byte_level(tmp_path, config, processor).encode("the cat") == ids


def test_special_tokens_are_encoded_and_skipped_by_decode(tokenizer):
  special, number = ("</s>", 2) if tokenizer.encode("</s>", False) == [2] else ("<|im_end|>", 2)
  ids = tokenizer.encode(f"the cat{special}")
  assert ids.count(number) == 1 and ids[-1] == number
  assert tokenizer.decode(ids) == "the cat"
  assert tokenizer.decode(ids, skip_special_tokens=False).endswith(f"the cat{special}")


def test_added_tokens_are_encoded_longest_first_and_skipped_if_special(tmp_path):
  """Gemma's vocabulary has tokens of one, two and more line breaks; found by comparing ids with llama.cpp's."""
  added = {VOCAB + i: {"content": "\n" * (i + 1), "special": False} for i in range(3)}
  tokenizer = sentencepiece(tmp_path, {"added_tokens_decoder": {
    **added, VOCAB + 3: {"content": "<|im_end|>", "special": True}}})
  ids = tokenizer.encode("hello<|im_end|>")
  assert ids[-1] == VOCAB + 3 and tokenizer.decode(ids) == "hello"
  assert tokenizer.decode(ids, skip_special_tokens=False).endswith("hello<|im_end|>")
  assert tokenizer.encode("\n\n\n\n\n", False) == [VOCAB + 2, VOCAB + 1]
  assert tokenizer.decode([VOCAB + 1]) == "\n\n"


def test_added_plain_token_of_bpe_round_trip_is_equal(tmp_path):
  tokenizer = byte_level(tmp_path, added=[AddedToken("<think>", special=False, normalized=False)])
  assert tokenizer.decode(tokenizer.encode("the <think> cat")) == "the <think> cat"


# Chat templates

HI = [{"role": "user", "content": "hi"}]


def test_chat_template_special_tokens_are_encoded(bpe, gguf):
  messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
  for tokenizer in (bpe, gguf):
    text = tokenizer.apply_chat_template(messages)
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>assistant\n"
    assert text == expected
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(SPECIALS.index("<|im_start|>")) == 3 and ids.count(SPECIALS.index("<|im_end|>")) == 2


def test_chat_without_template_raises(spm):
  with pytest.raises(ValueError, match="no chat.template.*generate"): spm.apply_chat_template(HI)


@pytest.mark.parametrize("template", CONVERSATIONS["failing templates"])
def test_chat_template_failure_is_value_error(tmp_path, template):
  with pytest.raises(ValueError, match="chat template") as e:
    byte_level(tmp_path, {"chat_template": template}).apply_chat_template(HI)
  if "alternate" in template: assert "roles must alternate" in str(e.value)


# Incremental decoding

@pytest.mark.parametrize("seed", range(40))
def test_stream_joined_equals_decode(tokenizer, seed):
  rng = random.Random(seed)
  words = [i for text in TEXTS for i in tokenizer.encode(text, False)]
  n = rng.choice((1, 5, 17, 60))
  ids = [rng.choice(words) if rng.random() < 0.5 else rng.randrange(VOCAB) for _ in range(n)]
  for skip in (True, False): assert "".join(stream_pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("text", [*TEXTS, "".join(TEXTS) * 3, "a\U0001f643"])
def test_decoded_ids_and_pieces_equal_the_text_without_partial_characters(tokenizer, text):
  ids = tokenizer.encode(text, False)
  pieces = stream_pieces(tokenizer, ids)
  assert "".join(pieces) == tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(text)) == text
  assert ids and all(isinstance(i, int) for i in ids) and pieces[-1] == ""
  assert not any("\ufffd" in piece for piece in pieces)


def test_stream_after_prompt_keeps_space(spm, bpe):
  for tokenizer in (spm, bpe):
    prompt, text = tokenizer.encode("the cat"), tokenizer.encode("the cat sat on the mat")
    assert text[:len(prompt)] == prompt
    assert "".join(stream_pieces(tokenizer, text[len(prompt):], prompt=prompt)) == " sat on the mat"


# Files

def test_token_bytes_join_to_the_text(tokenizer):
  for text in [*TEXTS, "🙃 é日"]:
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, False))).decode().strip() == text.strip()


def test_eos_token_of_tokenizer_ends_generation(tmp_path):
  llm = LLM(tiny_model(tmp_path, eos_token_id=5), max_model_len=32)
  assert llm.model_config.eos_token_ids == (2, 5), "</s>, and config.json's"
  for token in (2, 5):
    assert llm.generate("a", SamplingParams(logit_bias={token: 100}))[0].outputs[0].finish_reason == "stop"


def test_gguf_control_token_ends_a_turn_without_eot_id(tmp_path):
  folder = tiny_model(tmp_path, vocab_size=320)
  names = [f"t{i}" for i in range(319)] + ["<end_of_turn>"]
  path = write_gguf(tmp_path / "a.gguf", folder, tokens=names, merges=[], specials=["<end_of_turn>"])
  assert 319 in open_checkpoint(path).hf_config["eos_token_id"]


def test_gpt_4o_splits_as_published():
  """The pattern of o200k_base in https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py."""
  word = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
  rest = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
  assert SPLITS["gpt-4o"] == word % ("*", "+") + word % ("+", "*") + rest


# Conversations

@pytest.fixture
def render(tmp_path):
  """Return a function that renders messages with a template, or with one of the file's by its name."""
  (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
  def render(template, messages, options=None):
    (tmp_path / "chat_template.jinja").write_text(CONVERSATIONS["templates"].get(template, template))
    return load_tokenizer(tmp_path).render_conversation(messages, **options or {})
  return render


@pytest.mark.parametrize("name", CONVERSATIONS["rendered"])
def test_conversation_has_the_form_that_the_template_accepts(render, name):
  template, messages, expected, *options = CONVERSATIONS["rendered"][name]
  assert render(template, messages, *options) == expected


@pytest.mark.parametrize("name", CONVERSATIONS["refused"])
def test_conversation_that_cannot_be_rendered_is_named(render, name):
  template, messages, message = CONVERSATIONS["refused"][name]
  with pytest.raises(InputError, match=message): render(template, messages)


def test_arguments_that_are_nested_too_deeply_are_text(render):
  message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 50000}}]}
  assert render("{{ messages[0].tool_calls[0].function.arguments | list }}", [message]) == "['invalid_json']"


def test_named_templates_of_gguf_are_read(tmp_path):
  """The keys that the package gguf writes for several templates."""
  writer = GGUFWriter(tmp_path / "a.gguf", "llama")
  writer.add_chat_template([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
  keys = {name: value.value for part in writer.kv_data for name, value in part.items()}
  metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": [], **keys}
  tokenizer = make_tokenizer(tmp_path / "a.gguf", metadata, 2)
  assert [tokenizer.apply_chat_template(HI, **x) for x in ({}, {"tools": [1]})] == ["plain", "tools"]
