"""Cases of vLLM's own tests of its OpenAI server (tests/entrypoints/openai and tests/tool_use, versions around 0.11),
recreated with a tiny model. Cases that other test files have are not repeated."""
# Left out:
# - features that tinyvllm lacks: LoRA, images, audio, prompt_embeds, HTTP beam search, /invocations, /tokenizer_info,
#   ORCA headers, middleware, run-batch, sleep mode, stored responses, log probabilities and reasoning_tokens there;
# - answers that need a trained model, unit tests of vLLM's classes, gpt-oss, Mistral and Kimi models;
# - differences on purpose: values of other types ("true" for a bool) are refused; tools=[] and tool_choice="auto"
#   without tools are accepted; usage has prompt_tokens_details; iteration_tokens_total counts computed tokens only;
#   no [DONE] follows an error event; a max_tokens beyond the context is cut to fit.
import json
import re

import jsonschema
import pytest
from helpers.agents import DATA, start
from helpers.servers import checked


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ROUTES = {COMPLETIONS: {"prompt": "hello, my name is"}, CHATS: {"messages": [
  {"role": "system", "content": "you are kind"}, {"role": "user", "content": "what is 1+1?"}]}}
both_routes = pytest.mark.parametrize("path", ROUTES)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  parser = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
  yield from checked(start(tmp_path_factory.mktemp("vllm-cases"), *parser))


@pytest.fixture(scope="module")
def create(server):
  """Return a function that sends a request with the openai package. extra: fields that the package lacks."""
  client = server.client()

  def create(path, extra=None, **fields):
    resource = client.chat.completions if path == CHATS else client.completions
    defaults = {"model": "tiny", "temperature": 0.0, "max_tokens": 5}
    return resource.create(**{**defaults, **ROUTES[path], **fields}, extra_body=extra)
  return create


def text_of(choice): return choice.text if hasattr(choice, "text") else choice.message.content
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_text_offsets_of_stream_equal_whole_response(create, size, echo):
  """A stop string that begins like the output holds text back: the text of a stream then lags behind its tokens."""
  text = create(COMPLETIONS, max_tokens=12).choices[0].text
  stop = [text[i:i + size] + "#" for i in range(len(text) - size)][:16]
  fields = {"logprobs": 0, "stop": stop, "max_tokens": 12, "echo": echo}
  whole = create(COMPLETIONS, **fields).choices[0]
  chunks = [chunk.choices[0] for chunk in create(COMPLETIONS, stream=True, **fields)]
  assert "".join(chunk.text for chunk in chunks) == whole.text and text in whole.text
  assert [x for chunk in chunks for x in chunk.logprobs.tokens] == whole.logprobs.tokens
  assert [x for chunk in chunks for x in chunk.logprobs.text_offset] == whole.logprobs.text_offset


FORMATS = json.loads((DATA / "guided_formats.json").read_text())
SQL_TEXT = r"SELECT col_[12]  from table_[12]  where col_[12] = [12]"


@both_routes
@pytest.mark.parametrize("backend", ["outlines", "xgrammar", "guidance"])
@pytest.mark.parametrize("kind", FORMATS)
def test_guided_samples_follow_the_format(create, path, kind, backend):
  extra = {f"guided_{kind}": FORMATS[kind], "guided_decoding_backend": backend}
  if kind == "json": extra["guided_whitespace_pattern"] = " ?"
  for choice in create(path, extra, n=3, temperature=1.0, seed=1, max_tokens=500).choices:
    if kind == "json": jsonschema.validate(json.loads(text_of(choice)), FORMATS["json"])
    elif kind == "choice": assert text_of(choice) in FORMATS["choice"]
    else: assert re.fullmatch(FORMATS["regex"] if kind == "regex" else SQL_TEXT, text_of(choice))


@pytest.fixture(scope="module")
def limited_server(tmp_path_factory):
  defaults = '{"max_new_tokens": 6, "temperature": 0}'
  yield from checked(start(tmp_path_factory.mktemp("limited"), "--override-generation-config", defaults))


@pytest.mark.parametrize("path,name", [(COMPLETIONS, "max_tokens"), (CHATS, "max_tokens"),
                                       (CHATS, "max_completion_tokens"), ("/v1/responses", "max_output_tokens")])
@pytest.mark.parametrize("value,number", [(None, 6), (15, 6), (3, 3)])
def test_max_new_tokens_of_server_limits_every_request(limited_server, path, name, value, number):
  body = {**ROUTES.get(path, {"input": "hello"}), name: value, "ignore_eos": True}
  usage = limited_server.post(path, body).json()["usage"]
  assert usage.get("completion_tokens", usage.get("output_tokens")) == number
