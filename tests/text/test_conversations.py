"""Conversations as clients send them, rendered with templates that accept only some forms, of
data/rendered_conversations.json. The published templates are in outside/test_chat_templates.py."""

import pytest
from gguf import GGUFWriter
from helpers.data import read_data
from helpers.models import sentencepiece_model

from tinyvllm.config import InputError
from tinyvllm_extra.formats.gguf_tokenizer import make_tokenizer
from tinyvllm_extra.text.huggingface import load_tokenizer

CONVERSATIONS = read_data("rendered_conversations.json")


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
  messages = [{"role": "user", "content": "hi"}]
  assert [tokenizer.apply_chat_template(messages, **x) for x in ({}, {"tools": [1]})] == ["plain", "tools"]
