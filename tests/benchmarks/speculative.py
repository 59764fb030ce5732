"""What drafts are worth: texts of several kinds with and without them, in turn in one run, and what a step costs.

  python tests/benchmarks/speculative.py --model DIR --k 0 1 2 3 5 7 --streams 1 8 --tasks editing summary free code
  python tests/benchmarks/speculative.py --model DIR --draft DIR --k 0 3
  python tests/benchmarks/speculative.py --steps --shape llama-7b --running 1 8 --k 0 1 3 5 7
  python tests/benchmarks/speculative.py --steps --shape llama-3.1-8b --draft-shape llama-3.2-1b --k 0 3

Drafts come from the text so far (ngram), or from a draft model. With --model one table for each task and number of
streams: k: num_speculative_tokens, 0 without drafts; tokens a step: that a sequence got in each step that gave it any,
after its first; drafts a step: that were checked; accepted: of these; speed-up: over k = 0. Prompts are in the prefix
cache, so that seconds are of decoding. All k must give the same ids: if not, a line says where, and the exit code is 1.

With --steps the time of a step in which each running sequence has k drafts checked, all of them wrong, at random
weights: over k = 0 is also how many tokens a step must give for drafts to pay."""
import argparse
import contextlib
import inspect
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import common
from common import LLM, Watch

# Each with the name that the editing task replaces, and the one that it puts there
STORIES = [
  ("Anna", "Clara", "Anna kept a small shop of clocks at the end of Mill Street. Every morning Anna wound the tall ones "
   "by the door, and then the little ones on the shelf. One day a boy brought a watch that ran backwards. Anna opened it "
   "with great care, and found a spring that someone had put in the wrong way round."),
  ("harbour", "market", "The old harbour wakes up long before the rest of the town. Men carry boxes of fish across the "
   "harbour square, and women call out their prices over the noise of the gulls. By nine the harbour is full of people, "
   "and at noon it is quiet again, with nothing left but wet stones and a sleeping dog."),
  ("Peter", "Oscar", "Peter wanted to plant an apple tree behind the house. His sister told Peter that the soil was too "
   "dry, so he dug a deep hole and filled it with leaves. In the third spring the tree had seven flowers, and in the "
   "autumn Peter ate the first apple, which was small, green and very sour."),
  ("bridge", "tower", "The council has decided to repair the bridge before the winter. Engineers found cracks in two of "
   "the stones on which the bridge stands, and rust on most of its iron. The work will take eleven weeks. While it goes "
   "on, nobody may use the bridge after eight in the evening."),
  ("Marta", "Helen", "Marta plays the violin in a small orchestra in the north. Last winter Marta fell on the ice and "
   "broke her left hand, and for three months she could only listen. She says that she has never heard so much music. "
   "Now Marta plays again, slower than before, and everybody says that it is better."),
  ("train", "coach", "The train to the coast leaves at seven and takes four hours. It stops in every village, and at each "
   "stop the driver of the train talks with somebody on the platform. Nobody minds. Children count the cows from the "
   "windows of the train, and there is a woman who sells tea and warm bread."),
  ("Doctor Lind", "Doctor Webb", "Doctor Lind measures the snow on the mountain twice a year. With two students and a "
   "sledge Doctor Lind climbs to the hut, digs a hole, and weighs what comes out of it. The numbers go back sixty years. "
   "There is less snow each year, Doctor Lind says, but there is also more to learn."),
  ("library", "school", "A fox has moved into the garden of the library. It sleeps under the steps, and at night it walks "
   "along the wall and looks into the windows. The people of the library have put up a sign that asks readers not to "
   "feed it. Since then more children have come to the library than ever before."),
]
OPENINGS = [
  "The ship had been at sea for forty days when the captain", "My grandmother used to say that every house",
  "Nobody in the village could explain why the bell", "When the lights went out in the museum, the guard",
  "It was the first warm day of the year, and the two brothers", "The letter had no stamp and no address, but it",
  "On the other side of the mountain there lived a painter who", "The robot opened its eyes and asked for"]
RECORDS = ["user name email age", "book title author year", "city region country population",
           "order customer product amount", "sensor place unit value", "song singer album length",
           "plant family colour height", "flight origin target delay"]


def editing(i: int) -> str:
  """A text of three stories and its first words with one name replaced, after another text for which all is there."""
  def pair(i: int, n: int) -> tuple[str, str]:
    text = "\n".join(story for _, _, story in (STORIES * 2)[i:i + n])
    return text, text.replace(*STORIES[i][:2])
  prompt = ""
  for number, n in ((i + 5) % 8, 1), ((i + 6) % 8, 1), (i, 3):
    old, new, _ = STORIES[number]
    text, edited = pair(number, n)
    prompt += f'### Text\n{text}\n\n### The same text, with "{new}" in place of "{old}"\n{edited}\n\n\n'
  begun = edited.index(new, edited.index(new) + 1) + len(new)
  return prompt[:-3 - len(edited)] + edited[:begun]


def summary(i: int) -> str:
  """A long text, and the beginning of its summary."""
  text = "\n\n".join(f"Sent by our reporter.\n{story}" for _, _, story in STORIES[i:] + STORIES[:i])
  return f"# News of the week\n\n{text}\n\n# Summary\n\nThis week's news in short:\n\n1."


def free(i: int) -> str: return OPENINGS[i]


def code(i: int) -> str:
  """A class with a getter and a setter for one field, to go on with the others."""
  name, *fields = RECORDS[i].split()
  first, second, *_ = fields
  text = f'"""A {name}, as the database has it."""\n\n\nclass {name.title()}:\n  def __init__(self, row):\n'
  text += "".join(f'    self._{field} = row["{field}"]\n' for field in fields)
  text += f'\n  def get_{first}(self):\n    """Return the {first} of this {name}."""\n    return self._{first}\n'
  text += f'\n  def set_{first}(self, value):\n    """Set the {first} of this {name}."""\n    if value is None:\n'
  text += f'      raise ValueError("{first} is missing")\n    self._{first} = value\n'
  return text + f"\n  def get_{second}(self):\n    \"\"\"Return the"


TASKS = {"editing": editing, "summary": summary, "free": free, "code": code}


def drafts(args: argparse.Namespace, k: int, folder: str | None) -> dict | None:
  """The engine's speculative_config. folder: the draft model's; None: ngram."""
  if not k: return None
  if folder: return {"model": folder, "num_speculative_tokens": k}
  return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": args.lookup[1],
          "prompt_lookup_min": args.lookup[0]}


class Count:
  """What engines got done between this and a call, from `get_metrics` and a watch over their steps."""
  def __init__(self, llm: LLM):
    self.llm = llm
    self.before = llm.get_metrics()
    self.started = time.perf_counter()

  def __call__(self) -> dict[str, float]:
    now = {"seconds_passed": time.perf_counter() - self.started}
    names = {"drafted": "spec_decode_num_draft_tokens", "accepted": "spec_decode_num_accepted_tokens",
             "tokens": "generation_tokens"}
    metrics = self.llm.get_metrics()
    return now | {short: metrics.get(name, 0) - self.before.get(name, 0) for short, name in names.items()}


def run_task(llm: LLM, prompts: list[str], args: argparse.Namespace, streams: int) -> tuple[list[list[int]], dict]:
  """The ids of all prompts, so many of which run at once, and what it took."""
  ids, count = [], Count(llm)
  with Watch(llm) as watch:
    for i in range(0, len(prompts), streams):
      params = [common.SamplingParams(temperature=args.temperature, max_tokens=args.output_len, ignore_eos=True, seed=j)
                for j in range(len(prompts))[i:i + streams]]
      ids += [o.outputs[0].token_ids for o in llm.generate(prompts[i:i + streams], params, use_tqdm=False)]
  # A sequence's first token comes of its prompt
  return ids, {**count(), "gave": sum(step.outputs for step in watch.steps) - len(prompts), "captured": watch.captured}


def measure_task(engines: dict[int, LLM], task: str, streams: int, args: argparse.Namespace) -> bool:
  """Print a table. Returns whether the ids are the same for every k."""
  prompts = [TASKS[task](i) for i in range(max(streams, args.prompts))]
  prompts = prompts[:len(prompts) // streams * streams]
  found: dict[int, list[dict]] = {k: [] for k in engines}
  expected: list[list[int]] = []
  same = True
  for measured in range(-args.warmups, args.rounds):
    for k, llm in engines.items():   # in turn, as the clock may wander
      ids, took = run_task(llm, prompts, args, streams)
      if measured >= 0: found[k].append(took)
      expected = expected or ids
      for i, (one, other) in enumerate(zip(expected, ids, strict=True)):
        if one == other or measured >= 0 and not same: continue
        place = next(j for j, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
        print(f"  error: with k = {k} text {i} differs from token {place} on: {other[place]}, not {one[place]}")
        same = False
  lengths = [len(o["prompt_token_ids"]) for o in map(lambda p: {"prompt_token_ids": llm.tokenizer.encode(p)}, prompts)]
  print(f"\n{task}, {streams} at once of {len(prompts)}, prompts of {min(lengths)} to {max(lengths)} tokens")
  seconds = {k: statistics.median(took["seconds_passed"] for took in found[k]) for k in engines}
  rows = []
  for k in engines:
    last, new = found[k][-1], len(prompts) * args.output_len
    spread = [took["seconds_passed"] / seconds[k] for took in found[k]]
    rows.append([str(k), f"{(new - len(prompts)) / last['gave']:.2f}", f"{last['drafted'] / last['gave']:.2f}",
                 f"{last['accepted'] / last['drafted']:.0%}" if last["drafted"] else "-", f"{new / seconds[k]:.1f}",
                 f"{seconds[0] / seconds[k]:.2f}" if 0 in seconds else "-",
                 f"{min(spread):.2f} to {max(spread):.2f}"])
  common.print_table(["k", "tokens a step", "drafts a step", "accepted", "tokens/s", "speed-up", "rounds"], rows)
  captured = sum(took["captured"] for k in engines for took in found[k])
  if captured: print(f"  warning: {captured} graphs were captured while this was measured; raise --warmups")
  return same
