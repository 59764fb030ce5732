"""Record what vLLM's parsers find in outputs of each format, as data/tool_calls.json. Needs vLLM without a GPU:
pip install torch==2.13.0 transformers==5.24.0 uvloop, then pip install --no-deps vllm==0.33.0 and what it imports.

python tests/outside/record_tool_calls.py"""
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

DATA = Path(__file__).parents[1] / "data"
MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>", "<|python_tag|>",
           "<|python_start|>", "<|python_end|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<think>", "</think>"]


def make_tokenizer() -> Any:
  tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
  tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
  return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def parse(name: str, text: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
  """Return the content before the first call, and the calls with their arguments."""
  request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "a"}], tools=tools)
  parser = ToolParserManager.get_tool_parser(name)(make_tokenizer(), tools=request.tools)
  found = parser.extract_tool_calls(text, request)
  def load(arguments: str) -> Any:
    try: return json.loads(arguments)
    except ValueError: return {"not JSON": arguments}
  return {"content": found.content or "",
          "calls": [[call.function.name, load(call.function.arguments)] for call in found.tool_calls]}


def main() -> None:
  cases = json.loads((DATA / "tool_calls.json").read_text())
  for case in cases["cases"]:
    try: case["vllm"] = parse(case["format"], case["text"], cases["tools"])
    except Exception as error: case["vllm"] = {"error": f"{type(error).__name__}: {error}"[:100]}
  lines = ",\n ".join(json.dumps(case, ensure_ascii=False) for case in cases["cases"])
  tools = json.dumps(cases["tools"], ensure_ascii=False)
  (DATA / "tool_calls.json").write_text(f'{{"tools": {tools},\n"cases": [\n {lines}\n]}}\n')


if __name__ == "__main__": main()
