"""The command line's client for a running server."""
import json, urllib.error, urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from tinyvllm import SamplingParams
from tinyvllm.config import InputError, check


class Remote:
  """A running server, with the methods of LLM that the command line calls."""
  def __init__(self, url: str, api_key: str | None = None, model: str | None = None):
    self.url = url.rstrip("/")
    self.api_key = api_key
    self.model = model

  @classmethod
  def from_flags(cls, flags: dict[str, Any], engine_options: dict[str, Any]) -> "Remote":
    """Create a client from command-line flags. Raises InputError for engine options, which only the server can set."""
    check(flags["url"], "api_key: requires --url")
    names = ", ".join(engine_options)
    check(not names, f"{names}: not allowed with --url: pass engine options to `tinyvllm serve`")
    return cls(flags["url"], flags["api_key"], flags["model"])

  def generate_stream(self, prompt: Any, params: SamplingParams) -> Iterator[Any]:
    """Run LLM.generate_stream on the server, for a str or {"messages": [...]}. Each output has only outputs[0].text.
    Raises InputError if the server rejects the request or does not respond, RuntimeError if a step fails there."""
    chat = isinstance(prompt, dict)
    url = f"{self.url}/v1/chat/completions" if chat else f"{self.url}/v1/completions"
    sampling = {name: value for name, value in vars(params).items() if value != getattr(SamplingParams, name)}
    body = {**(prompt if chat else {"prompt": prompt}), **sampling, "model": self.model, "stream": True}
    headers: Any = {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key}".encode()}
    request = urllib.request.Request(url, json.dumps(body, default=vars).encode(), headers)
    try: response = urllib.request.urlopen(request)
    except urllib.error.HTTPError as error: raise InputError(f"{self.url}: {message_of(error)}") from error
    except urllib.error.URLError as error:
      raise InputError(f"url={self.url}: cannot connect to a server: {error.reason}") from error
    with response:
      for event in (json.loads(line[6:]) for line in response if line.startswith(b"data: {")):
        if "error" in event: raise RuntimeError(event["error"]["message"])
        for choice in event["choices"]:   # a delta of reasoning or of a tool call has no content
          text = choice["delta"].get("content") if chat else choice["text"]
          if text: yield SimpleNamespace(outputs=[SimpleNamespace(text=text)])


def message_of(error: urllib.error.HTTPError) -> str:
  try: return json.load(error)["error"]["message"]
  except (ValueError, KeyError, TypeError): return str(error)   # not a tinyvllm server
