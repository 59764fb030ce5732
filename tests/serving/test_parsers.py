"""The parser of reasoning and tool calls alone. data/tool_calls.json holds outputs in the format of each of vLLM's
parsers, what vLLM finds in them (outside/record_tool_calls.py), and why our result differs where it does. Reasoning and
harmony, in data/reasoning_outputs.json, follow the model cards and https://github.com/openai/harmony."""
import itertools
import json

import pytest
from helpers.data import read_data
from hypothesis import given, settings, strategies as st
from tinyvllm_extra.text.parsers import OutputFormat, Parser, find_format

RECORDED = read_data("tool_calls.json")
FUNCTIONS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in RECORDED["tools"]}
# Outputs; chat templates and their parsers; starts and units of endless outputs; parts of random outputs
OTHERS = read_data("reasoning_outputs.json")
CASES = [*OTHERS["outputs"], *((None, x["format"], x["text"], "", x["content"], x["calls"]) for x in RECORDED["cases"])]


def merge_events(events):
  """Merge adjacent events of one kind, except calls, as one feed does."""
  groups = [(kind, [*group]) for kind, group in itertools.groupby(events, lambda event: event[0])]
  return [x for kind, xs in groups for x in (xs if kind == "call" else [(kind, "".join(x[1] for x in xs), "")])]


def read_pieces(parser, text, cuts):
  pieces = [text[a:b] for a, b in itertools.pairwise(sorted({0, len(text), *(x for x in cuts if x < len(text))}))]
  return merge_events([event for piece in pieces for event in parser.feed(piece)] + parser.feed("", True))


@pytest.mark.parametrize("reasoning_name,tools_name,text,reasoning,content,calls", CASES)
def test_output_of_each_format_is_split(reasoning_name, tools_name, text, reasoning, content, calls):
  output_format = find_format("", reasoning_name, tools_name)
  whole = Parser(output_format, FUNCTIONS).feed(text, True)
  def joined(kind): return "".join(x for k, x, _ in whole if k == kind)
  assert (joined("reasoning"), joined("content")) == (reasoning, content)
  assert [[name, json.loads(x)] for kind, x, name in whole if kind == "call"] == calls
  assert read_pieces(Parser(output_format, FUNCTIONS), text, range(len(text))) == whole
  for i in range(len(text)): assert read_pieces(Parser(output_format, FUNCTIONS), text, [i]) == whole
  plain = Parser(output_format, {}).feed(text, True)
  assert not [event for event in plain if event[0] == "call"], "no function may be called"
  first = Parser(output_format, FUNCTIONS, parallel=False).feed(text, True)
  assert [name for kind, _, name in first if kind == "call"] == [name for name, _ in calls[:1]]


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda x: x["text"][:40])
def test_recorded_calls_of_vllm_are_found_unless_a_reason_is_given(case):
  assert (case["calls"] == case["vllm"].get("calls")) != ("why" in case)


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(st.sampled_from(CASES), st.lists(st.sampled_from(OTHERS["fragments"]), max_size=12), st.integers(0, 200),
       st.sets(st.integers(1, 300), max_size=40))
def test_events_do_not_depend_on_split_into_deltas(output, fragments, position, cuts):
  output_format = find_format("", *output[:2])
  text = output[2][:position] + "".join(fragments) + output[2][position:]
  whole = Parser(output_format, FUNCTIONS).feed(text, True)
  assert read_pieces(Parser(output_format, FUNCTIONS), text, cuts) == whole
  assert read_pieces(Parser(output_format, FUNCTIONS), text, range(len(text))) == whole


@pytest.mark.parametrize("unit", ["<", "<tool_call>no", "x\n", "{1}", "</think"])
def test_text_that_is_no_call_is_delivered_as_it_arrives(unit):
  parser = Parser(OutputFormat(find_format("</think>").reasoning), FUNCTIONS)
  for i, character in enumerate(unit * 2000):
    parser.feed(character)
    assert len(parser.text) < 32 or unit == "<tool_call>no", (i, parser.text)


@pytest.mark.parametrize("tools_name,start,unit", OTHERS["hostile"])
def test_hostile_output_takes_linear_time(tools_name, start, unit):
  """Counts the characters that regular expressions may read: the text of each call of the parser's functions."""
  def work(size):
    parser = Parser(find_format("", None, tools_name), FUNCTIONS)
    read, num = parser.advance, 0
    def advance():
      nonlocal num
      before = parser.text
      result = read()
      num += len(before) if result else 0   # a border: text may be read again
      return result
    parser.advance = advance
    for character in (start + unit * size)[:size]: parser.feed(character)
    parser.feed("", True)
    return num
  assert work(8000) <= 2.5 * work(4000) + 1000


@pytest.mark.parametrize("template,reasoning,tools", OTHERS["templates"])
def test_format_is_that_of_chat_template(template, reasoning, tools):
  assert find_format(template) == find_format("", reasoning, tools)
