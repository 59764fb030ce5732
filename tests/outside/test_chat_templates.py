"""Published chat templates, which trl contains, rendered as transformers renders them (pip install --group formats,
then pip install --no-deps trl==1.16.0). data/conversations.json holds the conversations."""
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.data import read_data, write_files
from helpers.tokenizers import byte_level_bpe

from tinyvllm_extra.text.huggingface import load_tokenizer

CONVERSATIONS: dict[str, dict[str, Any]] = read_data("conversations.json")
# tokenizer_config.json and other files, in which transformers finds a template
PLACES = read_data("template_places.json")
TRL = importlib.util.find_spec("trl").submodule_search_locations[0]   # not imported: it would need torch
FOLDERS = [Path(TRL, "chat_templates"), *map(Path, filter(None, [os.environ.get("TINYVLLM_TEMPLATES")]))]
TEMPLATES = {path.stem: path.read_text() for folder in FOLDERS for path in sorted(folder.glob("*.jinja"))}
OF_TRL = [path.stem for path in FOLDERS[0].glob("*.jinja")]
TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": None}


def tokenizers(folder: Path, config: dict[str, Any], files: dict[str, str] | None = None) -> tuple[Any, Any]:
  """Return our tokenizer and transformers' one of a folder with these files."""
  from transformers import AutoTokenizer
  byte_level_bpe().save(str(folder / "tokenizer.json"))
  config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
  write_files(folder, {"tokenizer_config.json": json.dumps(config), **(files or {})})
  return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


def rendered(tokenizer: Any, conversation: dict[str, Any], **options: Any) -> str | None:
  """Return a conversation's text, or None if the template fails."""
  options = {"add_generation_prompt": True, **conversation, **options}
  try: return tokenizer.apply_chat_template(options.pop("messages"), **options)
  except Exception: return None   # templates fail in many ways


def with_plain_content(conversation: dict[str, Any]) -> dict[str, Any]:
  """Return a conversation whose contents are text, as vLLM passes it to templates that do not read lists or null."""
  def text(content: Any) -> str:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
  return {**conversation, "messages": [{**x, "content": text(x["content"])} for x in conversation["messages"]]}


def expected(tokenizer: Any, conversation: dict[str, Any]) -> str | None:
  """Return the text of transformers. Templates that fail with a list or null, or that print or drop the list, get plain
  content."""
  text = rendered(tokenizer, conversation, tokenize=False)
  parts = [x["text"] for m in conversation["messages"] if isinstance(m["content"], list) for x in m["content"]]
  is_printed = text is not None and re.search(r"['\"]type['\"]: ['\"]text", text)
  if text is not None and all(part in text for part in parts) and not is_printed: return text
  return rendered(tokenizer, with_plain_content(conversation), tokenize=False)


def test_published_templates_are_found(): assert len(OF_TRL) >= 72 and len(CONVERSATIONS) >= 12


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_renders_the_text_of_transformers(tmp_path, template):
  ours, theirs = tokenizers(tmp_path, TOKENS, {"chat_template.jinja": TEMPLATES[template]})
  texts = {name: rendered(ours, conversation) for name, conversation in CONVERSATIONS.items()}
  assert texts == {name: expected(theirs, conversation) for name, conversation in CONVERSATIONS.items()}
  if template in OF_TRL: assert sum(text is not None for text in texts.values()) >= 8


def test_tokens_that_only_tokenizer_config_adds_are_tokens(tmp_path):
  names = {320: ("<tool_call>", False), 321: ("<|extra|>", True)}
  flags = dict.fromkeys(["lstrip", "rstrip", "single_word", "normalized"], False)
  added = {str(i): {"content": text, "special": special, **flags} for i, (text, special) in names.items()}
  ours, theirs = tokenizers(tmp_path, {**TOKENS, "added_tokens_decoder": added})
  text = "a<tool_call>b<|extra|>"
  ids = theirs.encode(text, add_special_tokens=False)
  assert ours.encode(text, False) == ids and {320, 321} <= {*ids}
  for skip in (True, False): assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("place", PLACES["places"])
def test_template_is_found_where_transformers_finds_it(tmp_path, place):
  ours, theirs = tokenizers(tmp_path, **PLACES["places"][place])
  for options in ({}, {"tools": PLACES["tools"]}, {"chat_template": "rag"}, {"chat_template": "{{ eos_token }}!"}):
    conversation = {"messages": [{"role": "user", "content": "Hi"}], **options}
    assert rendered(ours, conversation) == rendered(theirs, conversation, tokenize=False), options
