"""Conversations as clients send them, rendered with templates that accept only some forms. The published templates are
in outside/test_chat_templates.py."""
import pytest
from gguf import GGUFWriter
from helpers.models import sentencepiece_model

from tinyvllm.config import InputError
from tinyvllm_extra.conversations import render_conversation
from tinyvllm_extra.gguf_tokenizer import make_tokenizer
from tinyvllm_extra.huggingface import load_tokenizer

USER = {"role": "user", "content": "hi"}
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
CALLS = """{% for m in messages %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls or [] %}
{%- if call.id and call.id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}{{ call.id }}
{%- for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}{% endfor %}
{{- m.tool_call_id }};{% endfor %}"""


@pytest.fixture
def render(tmp_path):
  """Return a function that renders messages with a template."""
  (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
  def render(template, messages, **options):
    (tmp_path / "chat_template.jinja").write_text(template)
    return render_conversation(load_tokenizer(tmp_path), messages, **options)
  return render


def call(arguments, call_id="abcdefghi", content=None, **fields):
  return {"role": "assistant", "content": content, **fields,
          "tool_calls": [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize("template,messages,expected", [
  (CALLS, [call({"a": 1}), {"role": "tool", "content": "x", "tool_call_id": "abcdefghi"}],
   "assistant:abcdefghia=1;tool:xabcdefghi;"),
  (CALLS, [call('{"a": 1}', "call_0123456789abcdef"), {"role": "tool", "content": "x", "tool_call_id":
                                                       "call_0123456789abcdef"}],
   "assistant:789abcdefa=1;tool:x789abcdef;"),
  (CALLS, [call("", "toolu_1"), call(None), call('{"a": ')],
   'assistant:000toolu1;assistant:abcdefghi;assistant:abcdefghiinvalid_json={"a": ;'),
  (CALLS.replace("!= 9", "> 99"), [call("", "call_0123456789abcdef")], "assistant:call_0123456789abcdef;"),
  ("{% for m in messages %}{{ 'tool_calls' in m }}{{ m.content }};{% endfor %}",
   [{"role": "assistant", "content": None, "tool_calls": x} for x in (None, [])], "False;False;"),
  ("{% for m in messages %}{{ 'call ' + m.tool_calls[0].function.arguments }};{% endfor %}",
   [call({"a": "é"}), call('{"a":  2}')], 'call {"a": "é"};call {"a": 2};'),
  ("{% for m in messages %}{{ m.tool_calls[0].function.arguments | list }};{% endfor %}", [call("[" * 50000)],
   "['invalid_json'];"),
  (PLAIN, [{"role": "developer", "content": "be kind"}, USER], "system:be kind;user:hi;"),
  (PLAIN + "{# developer #}", [{"role": "developer", "content": "be kind"}, USER], "developer:be kind;user:hi;"),
  ("{% for m in messages %}{% if m.role == 'user' or loop.first %}{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}",
   [{"role": "system", "content": "one"}, USER, {"role": "developer", "content": "two"}], "system:one\n\ntwo;user:hi;"),
  ("{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
   "{{ m.content }};{% endfor %}", [USER, {"role": "system", "content": [{"type": "text", "text": "two"}]}], "two;hi;"),
  ("{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}",
   [{"role": "assistant", "content": "a", name: "hm"} for name in ("reasoning", "reasoning_content")], "hmhmhmhm"),
  (PLAIN, [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "thinking", "thinking": "b"},
                                        {"type": "refusal", "refusal": "c"}, "d"]}], "user:a\nb\nc\nd;"),
], ids=["id of 9", "longer id", "shorter id", "any id", "no calls", "text arguments", "nested arguments", "developer",
        "known developer", "later instruction", "refused instruction", "reasoning", "parts"])
def test_conversation_has_the_form_that_the_template_accepts(render, template, messages, expected):
  assert render(template, messages) == expected


@pytest.mark.parametrize("template,messages,message", [
  ("{{ messages[0].content }}{# system #}", [USER, {"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
  ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
   [USER, {"role": "developer", "content": "be kind"}], "leaves out the instruction 'be kind'"),
  (PLAIN, [{"role": "assistant", "tool_calls": "f"}], "every entry of tool_calls must be an object"),
  (PLAIN, [{"content": "a"}], "role")], ids=["part", "instruction", "calls", "role"])
def test_conversation_that_cannot_be_rendered_is_named(render, template, messages, message):
  with pytest.raises(InputError, match=message): render(template, messages)


@pytest.mark.parametrize("text,template,expected", [
  ("yes,  ", PLAIN, "user:hi;assistant:yes,  "), ("", PLAIN, "user:hi;assistant:"), (";", PLAIN, "user:hi;assistant:;"),
  ("hi", PLAIN, "user:hi;assistant:hi"),
  ("yes  ", PLAIN.replace("m.content", "m.content.strip()"), "user:hi;assistant:yes")])
def test_prefill_is_continued_at_its_exact_end(render, text, template, expected):
  messages = [USER, {"role": "assistant", "content": text}]
  assert render(template, messages, continue_final_message=True) == expected


def test_template_has_the_functions_of_transformers(render):
  """outside/test_chat_templates.py compares them with transformers."""
  template = ("{% generation %}{{ {'b': '<é>', 'a': 1} | tojson }}{{ [1] | tojson(indent=1, separators=(',', ':')) }}"
              "{% endgeneration %}{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
              "{{ strftime_now('%d')|length }}{{ tools is none }}{{ documents is none }}{{ unk_token }}")
  assert render(template, [USER]) == '{"b": "<é>", "a": 1}[\n 1\n]12TrueTrue'


def test_named_templates_of_gguf_are_read(tmp_path):
  """The keys that the package gguf writes for several templates."""
  writer = GGUFWriter(tmp_path / "a.gguf", "llama")
  templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
  writer.add_chat_template(templates)
  keys = {name: value.value for part in writer.kv_data for name, value in part.items()}
  metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": [], **keys}
  tokenizer = make_tokenizer(tmp_path / "a.gguf", metadata, 2)
  assert [tokenizer.apply_chat_template([USER], **x) for x in ({}, {"tools": [1]})] == ["plain", "tools"]
