"""Bodies of requests, a running request, and outputs of an engine in the form of responses."""
import contextlib

from tinyvllm import SamplingParams

from .engines import ENGINE

SMALL = {**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 4}   # few graphs
CHAT = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mood }}"
        "{% if add_generation_prompt %}bot: {% endif %}")
GREEDY = {"temperature": 0.0, "max_tokens": 8}
ENDLESS = {"temperature": 0.0, "max_tokens": 30000, "ignore_eos": True, "prompt": "the cat"}   # runs for a minute
KEY = {"Authorization": "Bearer secret"}
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "you"}, {"role": "user", "content": "the cat"}]


@contextlib.contextmanager
def running_request(server, **fields):
  """Keep an endless request running. Yield the lines of its stream after the first event."""
  with server.stream("/v1/completions", {**ENDLESS, **fields}, headers=KEY) as response:
    lines = response.iter_lines()
    next(lines)
    yield lines


def chat_prompt(llm, messages):
  """Return `messages` as a prompt of token ids."""
  return {"prompt_token_ids": llm.chat(messages, SamplingParams(max_tokens=1))[0].prompt_token_ids}


def expected_output(llm, prompt, **fields):
  """Return LLM.generate's output for one prompt."""
  return llm.generate(prompt, SamplingParams(**fields), use_tqdm=False)[0]


def rows_of(choices):
  """Return index, text, finish_reason and stop_reason of completion choices, chat choices or LLM outputs."""
  text = [c.text if hasattr(c, "text") else c.message.content for c in choices]
  return [(i, c.index, t, c.finish_reason, c.stop_reason) for i, (c, t) in enumerate(zip(choices, text, strict=True))]
