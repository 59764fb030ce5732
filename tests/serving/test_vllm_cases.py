"""Cases of vLLM's own tests of its OpenAI server (tests/entrypoints/openai and tests/tool_use, versions around 0.11),
recreated with a tiny model. Cases that other test files have are not repeated."""
# Left out:
# - features that tinyvllm lacks: LoRA, images, audio, prompt_embeds, HTTP beam search, /invocations, /tokenizer_info,
#   ORCA headers, middleware, run-batch, sleep mode, stored responses, log probabilities and reasoning_tokens there;
# - answers that need a trained model, unit tests of vLLM's classes, gpt-oss, Mistral and Kimi models;
# - differences on purpose: values of other types ("true" for a bool) are refused; tools=[] and tool_choice="auto"
#   without tools are accepted; usage has prompt_tokens_details; iteration_tokens_total counts computed tokens only;
#   no [DONE] follows an error event; a max_tokens beyond the context is cut to fit.
import pytest
from helpers.agents import start
from helpers.protocol import CHATS, COMPLETIONS, answer
from helpers.servers import checked

ROUTES = {COMPLETIONS: {"prompt": "hello, my name is"}, CHATS: {"messages": [
  {"role": "system", "content": "you are kind"}, {"role": "user", "content": "what is 1+1?"}]}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  parser = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
  yield from checked(start(tmp_path_factory.mktemp("vllm-cases"), *parser))


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_text_offsets_of_stream_equal_whole_response(server, size, echo):
  """A stop string that begins like the output holds text back: the text of a stream then lags behind its tokens."""
  body = {**ROUTES[COMPLETIONS], "temperature": 0, "max_tokens": 12}
  text = answer(server, COMPLETIONS, body)["choices"][0]["text"]
  stop = [text[i:i + size] + "#" for i in range(len(text) - size)][:16]
  choice, = answer(server, COMPLETIONS, {**body, "logprobs": 0, "stop": stop, "echo": echo})["choices"]
  assert choice["text"].endswith(text) and len(choice["logprobs"]["text_offset"]) >= 12


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
