"""Failed steps, internal errors and missing packages: the status, a logged traceback, and the next request works."""
import json
import sys

import pytest
from helpers.data import read_data
from helpers.faults import add_fault
from helpers.protocol import COMPLETIONS, ENDLESS
from helpers.commands import flags
from helpers.servers import LocalServer, error_of, stream, wait_until

from tinyvllm import LLM
from tinyvllm.runner import Runner
from tinyvllm_extra.text.huggingface import ChatTokenizer

CASES = read_data("server_cases.json")


def break_server(patch):
  """Make steps and requests fail, by max_tokens and prompt."""
  add_fault(patch, Runner, "launch", RuntimeError("boom"), lambda _, step: any(
    s.params.max_tokens == 13 and s.num_generated > 2 for s, *_ in step.rows))
  add_fault(patch, Runner, "launch", SystemExit("bye"), lambda _, step: any(   # would end the engine's thread
    s.params.max_tokens == 14 for s, *_ in step.rows))
  add_fault(patch, ChatTokenizer, "encode", ValueError("operands could not be broadcast"),
            lambda _, text, *options: text == "broken")
  add_fault(patch, LLM, "make_request", KeyError("absent"),
            lambda _, name, prompt, params, *__: params.max_tokens == 15)


def works(server):
  body = {"prompt": "the cat", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
  return server.post(COMPLETIONS, body).json()["usage"]["completion_tokens"] == 12


@pytest.fixture(scope="module")
def faulty(chat_folder):
  """A server with a 1.5 s request timeout whose steps fail for requests with max_tokens 13 (after 3 tokens) or 14."""
  options = flags(dtype="float32", max_num_seqs=1, max_num_batched_tokens=4, request_timeout=1.5)
  with LocalServer(chat_folder, *options, before=break_server) as server:
    wait_until(lambda: works(server), "warm-up")
    yield server


OPENAI = {"type": "InternalServerError", "param": None, "code": 500}


@pytest.mark.parametrize("path,body,kind,error", CASES["failed steps"])
def test_failed_step_is_500_and_ends_a_stream_with_an_error_event(faulty, path, body, kind, error):
  error = {**error, "message": "a step failed: boom"}
  with faulty.stream(path, body) as response:
    *chunks, last = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
  assert chunks and all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks if kind is None)
  assert last.get("type") == kind and last.get("response", last)["error"] == error
  assert last.get("response", {}).get("status", "failed") == "failed"
  whole = faulty.post(path, body)
  expected = error if kind == "error" else {**OPENAI, "message": error["message"]}
  assert (whole.status_code, whole.json()["error"]) == (500, expected)
  assert works(faulty)


def test_exit_in_a_step_is_500_and_next_request_works(faulty):
  error_of(faulty.post(COMPLETIONS, {"prompt": "the cat", "max_tokens": 14}), 500)
  assert works(faulty) and faulty.healthy()


@pytest.mark.parametrize("path,fields,message", CASES["internal errors"])
def test_internal_error_is_500_with_a_logged_traceback(faulty, path, fields, message):
  before = len(faulty.log)
  error = error_of(faulty.post(path, fields), 500)
  assert message in error["message"] and error["param"] is None
  wait_until(lambda: message in faulty.log[before:], "the log has the exception")
  assert faulty.log[before:].count("Traceback") == 1, faulty.log[before:]
  assert works(faulty)


@pytest.mark.parametrize("path,fields,package,extra", CASES["missing packages"])
def test_missing_optional_package_is_501_and_logged(server, monkeypatch, path, fields, package, extra):
  for name in ("llguidance", "jinja2.sandbox"): monkeypatch.setitem(sys.modules, name, None)   # not installed
  error = error_of(server.post(path, fields), 501)
  assert package in error["message"] and f"pip install 'tinyvllm[{extra}]'" in error["message"]
  wait_until(lambda: f"{path}: {error['message']}" in server.log, "the log has the message")
  assert "Traceback" not in server.log


def test_request_timeout_aborts_running_and_waiting_prompts(faulty):
  """One prompt runs, the other waits."""
  body = faulty.post(COMPLETIONS, {**ENDLESS, "prompt": ["the cat", "hello"]}, timeout=30).json()
  assert [choice["finish_reason"] for choice in body["choices"]] == ["abort"] * 2
  assert body["choices"][0]["text"] and not body["choices"][1]["text"]
  assert 0 < body["usage"]["completion_tokens"] < 30000
  *chunks, last = stream(faulty, COMPLETIONS, ENDLESS)
  assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["abort"]
  assert last == "[DONE]"
  assert faulty.metrics()["num_requests_running"] == faulty.metrics()["num_requests_waiting"] == 0
