"""`tinyvllm generate --explain`: prints what the first steps compute."""
import math
from collections.abc import Iterator

import tinyvllm
from tinyvllm.backend import LOGITS, TOKENS
from tinyvllm.runner import Results, Step

STEPS = 3   # explained
SHOWN = 10   # entries of a column


def columns(step: Step) -> Iterator[str]:
  """Yield a line for each column of a step's array, see TOKENS and LOGITS, without padding."""
  words = step.words
  for title, table, size, used in (("token", TOKENS, step.key.num_tokens, sum(map(len, step.computed.values()))),
                                   ("row of logits", LOGITS, step.key.num_rows, len(step.rows))):
    yield f"  a column for each {title}: {used}, padded to {size}"
    for i, (name, dtype) in enumerate(table.formats.items()):
      entries = words[i * size:(i + 1) * size].view(dtype)[:used]   # their texts have as many digits as float32
      yield f"    {name:12}{' '.join(f'{x!s:>6}' for x in entries[:SHOWN])}{' ...' * (used > SHOWN)}"
    words = words[table.num_words * size:]


def explain(llm: tinyvllm.LLM) -> None:
  """Print the first steps when their results are read: sequences with their block tables at that time, the step's
  array, and the most likely tokens of requests with logprobs."""
  update, numbers = llm._update, iter(range(1, STEPS + 1))
  def print_update(results: Results) -> None:
    step, tables = results.step, [[*seq.block_table] for seq in results.step.computed]   # empty after the end
    update(results)
    number = next(numbers, None)
    if number is None: return
    print(f"Step {number}")
    for (seq, positions), table in zip(step.computed.items(), tables, strict=True):
      kind = "prompt" if positions.start < seq.num_prompt else "decode"
      print(f"  sequence {seq.index}: tokens {positions.start} to {positions.stop - 1} ({kind}), block table {table}")
    print(*columns(step), sep="\n")
    for row in step.rows:
      best = sorted(row.seq.logprobs.get(row.position, {}).values(), key=lambda x: x.rank or 0)
      if not best or row.position < row.seq.num_prompt: continue   # a rejected draft, or a token of the prompt
      likely = ", ".join(f"{x.decoded_token!r} {math.exp(x.logprob):.0%}" for x in best[:5])
      print(f"  most likely: {likely}\n  sampled: {llm.tokenizer.decode(row.seq.tokens[row.position:][:1], False)!r}\n")
  vars(llm).update(_update=print_update)
