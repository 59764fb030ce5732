"""`tinyvllm generate --explain` beside the library's own outputs."""
import re

import pytest
from helpers.commands import error_line, run_command

from tinyvllm import LLM, SamplingParams

pytestmark = pytest.mark.real   # with the bundled model
PROMPT = "The cat sat on the"


def printed(*flags: str) -> str: return run_command("generate", PROMPT, "--max-tokens", 6, *flags).stdout


@pytest.mark.parametrize("flags", [[], ["--max-num-batched-tokens", "4", "--max-num-seqs", "4"]])
def test_first_steps_are_printed_before_the_text(flags):
  """With 4 tokens per step the prompt needs two steps, and the first has no row of logits."""
  text = printed("--explain", *flags)
  assert text.endswith(f"\n{printed()}")
  steps = re.split(r"^Step (\d)$", text, flags=re.M)[1:]
  assert steps[::2] == ["1", "2", "3"]
  llm = LLM()
  output = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=6, logprobs=5), use_tqdm=False)[0]
  ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
  def column(name: str) -> list[int]:
    return [int(x) for step in steps[1::2] for x in re.search(rf"^    {name} +(.*)$", step, re.M)[1].split()]
  known = [token for token in column("id") if token >= 0]   # a token that is still on the device has no id
  assert known == ids[:len(known)] and column("position") == [*range(len(column("position")))]
  assert set(column("block")) == {*map(int, re.search(r"block table \[(.*)\]", text)[1].split(", "))}
  assert re.findall("sampled: (.*)", text) == [
    repr(llm.tokenizer.decode([i], False)) for i in ids[len(output.prompt_token_ids):][:text.count("sampled")]]
  best = sorted(output.outputs[0].logprobs[0].values(), key=lambda x: x.rank)
  assert re.search("most likely: ([^,]*)", text)[1].rpartition(" ")[0] == repr(best[0].decoded_token)


def test_a_server_explains_no_steps():
  run = run_command("generate", PROMPT, "--explain", "--url", "http://127.0.0.1:9")
  assert "remove --url and --api-key" in error_line(run)
