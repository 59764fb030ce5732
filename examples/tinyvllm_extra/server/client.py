"""The command line's way to a server that runs already."""
import json, urllib.error, urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from tinyvllm import SamplingParams
from tinyvllm.config import check


class Remote:
  """Stands in for an LLM whose engine is behind a URL."""
  def __init__(self, url: str, api_key: str | None = None, model: str | None = None):
    self.url = url.rstrip("/")
    self.api_key = api_key
    self.model = model

  @classmethod
  def of(cls, flags: dict[str, Any], engine: dict[str, Any]) -> "Remote":
    """From the command line's flags. Raises ValueError for options of an engine, as the server has its own."""
    check(flags["url"], "api_key: it is a server's: say which by --url")
    check(not engine, f"{', '.join(engine)}: with --url the engine is the server's: give that to `tinyvllm serve`")
    return cls(flags["url"], flags["api_key"], flags["model"])

  def generate_stream(self, prompt: Any, params: SamplingParams) -> Iterator[Any]:
    """As LLM.generate_stream, of a str or {"messages": [...]}; of each output there is outputs[0].text. Raises
    ValueError for what the server refuses, RuntimeError for a step that fails there."""
    chat = isinstance(prompt, dict)
    url = f"{self.url}/v1/chat/completions" if chat else f"{self.url}/v1/completions"
    given = {name: value for name, value in vars(params).items() if value != getattr(SamplingParams, name)}
    asked = {**(prompt if chat else {"prompt": prompt}), **given, "model": self.model, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key}"}
    request = urllib.request.Request(url, json.dumps(asked, default=vars).encode(), headers)
    try: answer = urllib.request.urlopen(request)
    except urllib.error.HTTPError as e: raise ValueError(f"{self.url}: {_message(e)}") from e
    except urllib.error.URLError as e: raise ValueError(f"url={self.url}: no server answers there: {e.reason}") from e
    with answer:
      for event in (json.loads(line[6:]) for line in answer if line.startswith(b"data: {")):
        if "error" in event: raise RuntimeError(event["error"]["message"])
        for choice in event["choices"]:
          yield SimpleNamespace(outputs=[SimpleNamespace(text=choice["delta"]["content"] if chat else choice["text"])])


def _message(error: urllib.error.HTTPError) -> str:
  try: return json.load(error)["error"]["message"]
  except (ValueError, KeyError, TypeError): return str(error)   # no server of this kind
