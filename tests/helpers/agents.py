"""Bodies of agents, and a template and answers with tools."""
import json

from .data import DATA, read_data
from .engines import ENGINE
from .models import tiny_model
from .servers import LocalServer


# Renders all its inputs, so that tests can compare the numbers of tokens
TEMPLATE = (DATA / "agent_template.jinja").read_text()
WEATHER, TIME = read_data("functions.json")
NO_TAGS = {"logit_bias": {"63": -100}}   # token "<": keeps a random model from opening reasoning before a format
HERMES = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
# Makes a server's model good at one conversation: it calls the function in CALL, then answers if the result has RESULT
SCRIPT = """
import os
from tinyvllm_extra.serving import protocol
sampling_params = protocol.sampling_params
def scripted(body, defaults, escapes):   # a random model would use the escapes
  last, text = body.messages[-1], os.environ["CALL"] if body.tools else os.environ["ANSWER"]
  if last["role"] == "tool": text = os.environ["ANSWER"] if os.environ["RESULT"] in str(last) else "no result"
  if not body.response_format and body.tool_choice not in ("required", "none"):
    body = body.model_copy(update={"structured_outputs": {"choice": [text]}})
  return sampling_params(body, defaults, {})
protocol.sampling_params = scripted
"""


SMALL = {**ENGINE, "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 8}


def start(folder, *flags, server=LocalServer, **options):
  """Start a LocalServer or a Server of a tiny model whose template is TEMPLATE, and which reasons in <think>."""
  tiny_model(folder, words=True, max_position_embeddings=1024, chat_template=TEMPLATE)
  small = [x for name, value in SMALL.items() for x in ("--" + name.replace("_", "-"), value)]
  return server(folder, *small, "--reasoning-parser", "qwen3", "--served-model-name", "tiny", *flags, **options)


def named_events(response):
  """Return the data of all server-sent events, whose names must be their types."""
  assert response.status_code == 200, response.read()
  lines = [*response.iter_lines()]
  data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
  assert [line for line in lines if line.startswith("event: ")] == [f"event: {event['type']}" for event in data]
  assert len(lines) == 3 * len(data)
  return data
