"""Failed steps, internal errors and missing packages: the status, a logged traceback, and the next request works."""
import sys

import pytest
from helpers.agents import named_events, start
from helpers.protocol import ENDLESS, MESSAGES
from helpers.requests import flags
from helpers.servers import LocalServer, error_of, stream, wait_until

from tinyvllm import LLM
from tinyvllm.runner import Runner
from tinyvllm_extra.huggingface import Tokenizer


def fail_third_step(patch):
  launch = Runner.launch

  def faulty(self, step):
    if any(sequence.num_generated > 2 for sequence, *_ in step.rows): raise RuntimeError("boom")
    return launch(self, step)
  patch.setattr(Runner, "launch", faulty)


def test_failed_step_ends_streams_with_error_events(tmp_path):
  """Both protocols, with the same faulty server."""
  with start(tmp_path, before=fail_third_step) as server:
    body = {"input": "hello", "max_output_tokens": 20}
    message = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
    with server.stream("/v1/responses", body) as response: events = named_events(response)
    assert events[-1]["type"] == "response.failed" and events[-1]["response"]["status"] == "failed"
    error = events[-1]["response"]["error"]
    assert error["code"] == "server_error" and "boom" in error["message"]
    assert events[-2]["type"] in ("response.output_text.delta", "response.in_progress")
    with server.stream("/v1/messages", message) as response: events = named_events(response)
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    assert "boom" in events[-1]["error"]["message"]
    assert server.post("/v1/responses", body).json()["error"]["code"] == 500
    whole = server.post("/v1/messages", message)
    assert whole.status_code == 500 and whole.json()["error"]["type"] == "api_error"


def break_server(patch):
  """Steps and requests that fail, by max_tokens; packages that are not installed."""
  launch, encode, make_request = Runner.launch, Tokenizer.encode, LLM.make_request

  def faulty(self, step):
    if any(s.params.max_tokens == 13 and s.num_generated > 2 for s, *_ in step.rows): raise RuntimeError("boom")
    if any(s.params.max_tokens == 14 for s, *_ in step.rows): raise SystemExit("bye")   # would end the engine's thread
    return launch(self, step)

  def broken_encode(self, text, *options):
    if text == "broken": raise ValueError("operands could not be broadcast")
    return encode(self, text, *options)

  def broken_request(self, request_id, prompt, params, priority):
    if params.max_tokens == 15: raise KeyError("absent")
    return make_request(self, request_id, prompt, params, priority)
  for name in ("llguidance", "jinja2.sandbox"): patch.setitem(sys.modules, name, None)   # not installed
  patch.setattr(Runner, "launch", faulty)
  patch.setattr(Tokenizer, "encode", broken_encode)
  patch.setattr(LLM, "make_request", broken_request)


@pytest.fixture(scope="module")
def faulty(long_folder):
  """A server with a 1.5 s request timeout whose steps fail for requests with max_tokens 13 (after 3 tokens) or 14."""
  options = flags(dtype="float32", max_num_seqs=1, max_num_batched_tokens=4, request_timeout=1.5)
  with LocalServer(long_folder, *options, before=break_server) as server:
    body = {"prompt": "the cat", "max_tokens": 12, "temperature": 0}   # warm up
    wait_until(lambda: server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 12, "warm-up")
    yield server


@pytest.mark.parametrize("size", [13, 14])
def test_failed_step_is_500_and_next_request_works(faulty, size):
  body = {"prompt": "the cat", "max_tokens": size, "temperature": 0}
  error_of(faulty.post("/v1/completions", body), 500)
  assert faulty.post("/v1/completions", {**body, "max_tokens": 12}).json()["usage"]["completion_tokens"] == 12
  assert faulty.get("/health").status_code == 200


def test_failed_step_ends_a_stream_with_an_error_event(faulty):
  *chunks, last = stream(faulty, "/v1/completions", {"prompt": "the cat", "max_tokens": 13, "temperature": 0})
  assert chunks and all(e["choices"][0]["finish_reason"] is None for e in chunks)
  assert set(last) == {"error"} and last["error"]["code"] == 500 and last["error"]["type"] == "InternalServerError"
  assert set(last["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path,fields,message", [
  ("/tokenize", {"prompt": "broken"}, "operands could not be broadcast"),
  ("/v1/completions", {"prompt": "broken"}, "operands could not be broadcast"),
  ("/v1/completions", {"prompt": "broken", "stream": True}, "operands could not be broadcast"),
  ("/v1/completions", {"prompt": "the cat", "max_tokens": 15}, "absent")],
  ids=["tokenize", "tokenizer", "tokenizer of a stream", "engine"])
def test_internal_error_is_500_with_a_logged_traceback(faulty, path, fields, message):
  before = len(faulty.log)
  error = error_of(faulty.post(path, fields), 500)
  assert message in error["message"] and error["param"] is None
  wait_until(lambda: message in faulty.log[before:], "the log has the exception")
  assert faulty.log[before:].count("Traceback") == 1, faulty.log[before:]
  body = {"prompt": "the cat", "max_tokens": 12, "temperature": 0}
  assert faulty.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("path,fields,package,extra", [
  ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "a"}}, "llguidance", "grammar"),
  ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_object"}}, "llguidance", "grammar"),
  ("/v1/chat/completions", {"messages": MESSAGES}, "jinja2", "hf"),
  ("/tokenize", {"messages": MESSAGES}, "jinja2", "hf")],
  ids=["structured_outputs", "response_format", "chat", "tokenize"])
def test_missing_optional_package_is_501_and_logged(faulty, path, fields, package, extra):
  before = len(faulty.log)
  error = error_of(faulty.post(path, fields), 501)
  assert package in error["message"] and f"pip install 'tinyvllm[{extra}]'" in error["message"]
  wait_until(lambda: error["message"] in faulty.log[before:], "the log has the message")
  assert "Traceback" not in faulty.log[before:]


def test_request_timeout_finishes_request_with_abort(faulty):
  answer = faulty.post("/v1/completions", ENDLESS).json()
  assert answer["choices"][0]["finish_reason"] == "abort" and answer["choices"][0]["text"]
  assert 0 < answer["usage"]["completion_tokens"] < 30000
  *chunks, last = stream(faulty, "/v1/completions", ENDLESS)
  assert last == "[DONE]"
  assert [e["choices"][0]["finish_reason"] for e in chunks] == [None] * (len(chunks) - 1) + ["abort"]
  assert faulty.metrics()["num_requests_running"] == 0


def test_request_timeout_aborts_running_and_waiting_prompts(faulty):
  """One prompt runs, the other waits."""
  answer = faulty.post("/v1/completions", {**ENDLESS, "prompt": ["the cat", "hello"]}, timeout=30).json()
  assert [c["finish_reason"] for c in answer["choices"]] == ["abort"] * 2
  assert answer["choices"][0]["text"] and not answer["choices"][1]["text"]
  assert faulty.metrics()["num_requests_running"] == faulty.metrics()["num_requests_waiting"] == 0


