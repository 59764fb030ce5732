"""Measure speculative decoding: speed-up by task, number of draft tokens (k) and streams, and the cost of a step.

  python tests/benchmarks/speculative.py --model DIR --k 0 1 2 3 5 7 --streams 1 8 --tasks editing summary free code
  python tests/benchmarks/speculative.py --model DIR --draft DIR --k 0 3
  python tests/benchmarks/speculative.py --steps --shape llama-7b --running 1 8 --k 0 1 3 5 7
  python tests/benchmarks/speculative.py --steps --shape llama-3.1-8b --draft-shape llama-3.2-1b --k 0 3

Draft tokens come from n-grams in the sequence (ngram) or from a draft model. With --model, prints one table per task
and number of streams, all k measured alternately. Columns:
  k             num_speculative_tokens; 0: no speculative decoding
  tokens/step   output tokens per step and sequence, without the first token
  drafts/step   verified draft tokens per step and sequence
  accepted      share of them that were accepted
  speed-up      relative to k = 0
Prompts are in the prefix cache, so only decoding is timed. All k must return the same ids; otherwise the first
difference is printed and the exit status is 1.

With --steps, measures a step that verifies k wrong draft tokens per running sequence, with random weights. Columns:
  drafts/step   draft tokens verified per sequence
  sequences     sequences with new tokens per engine step; fewer than running if they wait for verification in turn
  / k = 0       time relative to k = 0, which is also the tokens per step at which speculation pays off"""
import argparse
import contextlib
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import common
from common import LLM, SamplingParams, Watch

from tinyvllm.request import Sequence
from tinyvllm_extra.sampling.speculation import Drafter, SpeculativeProposer

TEXTS = json.loads((Path(__file__).parent / "speculation_tasks.json").read_text())
STORIES = TEXTS["stories"]   # old: the name that the editing task replaces by new


def editing(i: int) -> str:
  """Return two complete examples of replacing a name in a story, then three stories and the start of their edit."""
  def pair(i: int, n: int) -> tuple[str, str]:
    text = "\n".join(story["text"] for story in (STORIES * 2)[i:i + n])
    return text, text.replace(STORIES[i]["old"], STORIES[i]["new"])
  prompt = ""
  for number, n in ((i + 5) % 8, 1), ((i + 6) % 8, 1), (i, 3):
    (text, edited), (old, new, _) = pair(number, n), STORIES[number].values()
    prompt += f'### Text\n{text}\n\n### The same text, with "{new}" in place of "{old}"\n{edited}\n\n\n'
  start_len = edited.index(new, edited.index(new) + 1) + len(new)
  return prompt[:-3 - len(edited)] + edited[:start_len]


def summary(i: int) -> str:
  """Return a long text and the start of its summary."""
  text = "\n\n".join(f"Sent by our reporter.\n{story['text']}" for story in STORIES[i:] + STORIES[:i])
  return f"# News of the week\n\n{text}\n\n# Summary\n\nThis week's news in short:\n\n1."


def free(i: int) -> str: return TEXTS["openings"][i]


def code(i: int) -> str:
  """Return a class with a getter and a setter for its first field, and the start of the next getter."""
  name, *fields = TEXTS["records"][i]
  return "\n".join(TEXTS["class"]).format(*fields, name=name, title=name.title())


TASKS = {"editing": editing, "summary": summary, "free": free, "code": code}


def config_of(args: argparse.Namespace, k: int, folder: str | None = None) -> dict | None:
  """Return the engine's speculative_config. folder: of the draft model; None: ngram."""
  if not k: return None
  if folder: return {"model": folder, "num_speculative_tokens": k}
  return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": args.lookup[0],
          "prompt_lookup_max": args.lookup[1]}


def draft_counts(llm: LLM) -> tuple[int, int]:
  """Return the draft tokens verified and accepted since the engine's start."""
  metrics = llm.get_metrics()
  return metrics.get("spec_decode_num_draft_tokens", 0), metrics.get("spec_decode_num_accepted_tokens", 0)


@dataclass
class Run:
  """One run of a task's prompts."""
  ids: list[list[int]]
  seconds: list[float]   # per step
  num_updates: int   # sum over steps of sequences with new tokens, without each sequence's first token
  drafts: int        # verified draft tokens
  accepted: int      # accepted draft tokens
  captured: int      # graphs captured meanwhile


def run_task(llm: LLM, prompts: list[str], params: list, streams: int) -> Run:
  """Generate from the prompts in batches of `streams`."""
  before = draft_counts(llm)
  ids = []
  with Watch(llm) as watch:
    for i in range(0, len(prompts), streams):
      outputs = llm.generate(prompts[i:i + streams], params[i:i + streams], use_tqdm=False)
      ids += [output.outputs[0].token_ids for output in outputs]
  drafts, accepted = (new - old for new, old in zip(draft_counts(llm), before, strict=True))
  seconds = [step.seconds for step in watch.steps]
  return Run(ids, seconds, sum(step.outputs for step in watch.steps) - len(ids), drafts, accepted, watch.captured)


def quiet_seconds(runs: list[Run]) -> float:
  """Return the sum of each step's minimum time over the runs, which excludes other load on the machine. If the numbers
  of steps differ, return the minimum total."""
  if len({len(run.seconds) for run in runs}) > 1: return min(sum(run.seconds) for run in runs)
  return sum(map(min, zip(*(run.seconds for run in runs), strict=True)))


def measure_task(engines: dict[int, LLM], task: str, streams: int, args: argparse.Namespace) -> bool:
  """Print a table; return whether all k give the same ids."""
  prompts = [TASKS[task](i) for i in range(streams * -(-args.prompts // streams))]
  params = [SamplingParams(temperature=args.temperature, seed=i, max_tokens=args.output_len, ignore_eos=True)
            for i in range(len(prompts))]
  for llm in engines.values():   # fill the prefix cache, then capture the graphs of the timed runs
    outputs = llm.generate(prompts, common.greedy(1), use_tqdm=False)
    run_task(llm, prompts, params, streams)
  lengths = [len(output.prompt_token_ids) for output in outputs]
  print(f"\n{task}: {len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {streams} streams", flush=True)
  runs: dict[int, list[Run]] = {k: [] for k in engines}
  for _ in range(args.rounds):   # alternate, because the clock rate drifts
    for k, llm in engines.items(): runs[k].append(run_task(llm, prompts, params, streams))
  best = {k: quiet_seconds(runs[k]) for k in engines}
  rows = []
  for k in engines:
    run = runs[k][-1]
    tokens = len(prompts) * args.output_len
    slowest = max(sum(run.seconds) for run in runs[k])
    rows.append([str(k), f"{(tokens - len(prompts)) / run.num_updates:.2f}",
                 f"{run.drafts / run.num_updates:.2f}",
                 f"{run.accepted / run.drafts:.0%}" if run.drafts else "-", f"{tokens / best[k]:.1f}",
                 f"{best[0] / best[k]:.2f}" if 0 in best else "-", f"{slowest / best[k] - 1:+.0%}"])
  common.print_table(["k", "tokens/step", "drafts/step", "accepted", "tokens/s", "speed-up", "slowest round"], rows)
  captured = sum(run.captured for k in engines for run in runs[k])
  if captured: print(f"  warning: {captured} graphs were captured during the measurement; run it again")
  differences = [(k, common.first_difference(runs[min(engines)][0].ids, run.ids)) for k in engines for run in runs[k]]
  for k, difference in differences:
    if difference: print(f"  error: k = {k} differs at {difference}")
  return not any(difference for _, difference in differences)


def measure_tasks(args: argparse.Namespace) -> bool:
  """Run all tasks with one engine per k; the engines share their weights."""
  engines: dict[int, LLM] = {}
  models: dict[int, object] = {}   # target model and draft model
  for k in args.k:
    llm = engines[k] = common.open_llm(
      args, max_model_len=args.max_model_len, max_num_seqs=max(args.streams), enable_prefix_caching=True,
      max_num_batched_tokens=max(args.max_num_batched_tokens, *args.streams),
      speculative_config=config_of(args, k, args.draft))
    for i, runner in enumerate(llm.runners): runner.model = models.setdefault(i, runner.model)
    common.release()
  return all([measure_task(engines, task, streams, args) for streams in args.streams for task in args.tasks])


@contextlib.contextmanager
def wrong_drafts(k: int, vocabulary: int) -> Iterator[None]:
  """Make every sequence verify k draft tokens regardless of acceptance, and n-grams propose random ids."""
  rng = random.Random(0)
  def needs_sync(proposer, seq: Sequence) -> bool: return True
  def propose(drafter, tokens: list[int], n: int) -> list[int]: return [rng.randrange(3, vocabulary) for _ in range(n)]
  with (patch.object(Drafter, "rate", property(lambda drafter: 0.99, lambda drafter, value: None), create=True),
        patch("tinyvllm_extra.sampling.speculation.step_time", lambda tokens: 1),   # k drafts are always worthwhile
        patch.object(SpeculativeProposer, "needs_sync", needs_sync),
        patch.object(Drafter, "propose", propose)): yield


class Decoding:
  """An engine whose sequences all decode throughout the measurement."""
  def __init__(self, args: argparse.Namespace, k: int, running: int, folder: str | None):
    self.args, self.k, self.running = args, k, running
    budget = max(args.max_num_batched_tokens, running * (k + 1))
    # During chunked prefill, finished prompts already decode; and a random draft may be accepted
    each = 1 + k * (args.draft_shape == args.shape)   # tokens per step: drafts of an equal model are all accepted
    room = running * (-(-args.context // max(1, budget - running * (k + 1))) + 1)
    room += each * (args.steps * (args.rounds + 1) + 32)
    self.llm = common.open_llm(args, max_model_len=args.context + room, max_num_seqs=running,
                               max_num_batched_tokens=budget, speculative_config=config_of(args, k, folder))
    if k: self.llm.proposer.draft_time = 0
    self.vocabulary = self.llm.model_config.vocab_size
    rng = random.Random(args.seed)
    for i in range(running):
      self.llm.add_request(str(i), common.random_ids(self.vocabulary, args.context, rng), common.greedy(room - 1))
    self.rounds: list[list[float]] = []   # per round: milliseconds per step, drafts, sequences, context
    with wrong_drafts(k, self.vocabulary):
      sequences = [seq for request in self.llm.requests.values() for seq in request.sequences]
      while min(seq.num_generated for seq in sequences) < 1 + 4 * each: self.llm.advance()

  def measure(self) -> None:
    """Measure one round. A step may be launched in one call and read in the next, so steps are counted by outputs."""
    drafts_before, _ = draft_counts(self.llm)
    with wrong_drafts(self.k, self.vocabulary), Watch(self.llm) as watch:
      while sum(step.outputs for step in watch.steps) < self.args.steps * self.running: self.llm.advance()
    watch.warn()
    outputs = [step.outputs for step in watch.steps if step.outputs]
    steps = sum(outputs) / self.running
    times = [sum(getattr(step, name) for step in watch.steps) for name in ("seconds", "host", "launch", "wait")]
    context = statistics.fmean(step.context for step in watch.steps if step.outputs)
    drafts = draft_counts(self.llm)[0] - drafts_before
    self.rounds.append([*(1e3 * x / steps for x in times), drafts / sum(outputs), statistics.fmean(outputs), context])


def measure_steps(args: argparse.Namespace, running: int, bandwidth: float) -> None:
  """Print a table of one engine per k; the engines share their random weights."""
  with contextlib.ExitStack() as stack:
    folder = None
    if args.draft_shape:
      draft = argparse.Namespace(model=None, shape=args.draft_shape, layers=args.layers)
      folder = stack.enter_context(common.model_folder(common.hf_config(draft)))
      stack.enter_context(common.random_weights())
    started = time.perf_counter()
    decoding = {k: Decoding(args, k, running, folder) for k in args.k}
  print(f"\n{running} running: prefill and graph captures took {time.perf_counter() - started:.1f} s", flush=True)
  for _ in range(args.rounds):
    for each in decoding.values(): each.measure()
  medians = {k: [statistics.median(x) for x in zip(*each.rounds, strict=True)] for k, each in decoding.items()}
  rows = []
  for k, (ms, host, launch, wait, drafts, sequences, context) in medians.items():
    least = 1e3 * common.roofline(decoding[k].llm, bandwidth, running, context)
    ratio = ms / medians[0][0] if 0 in medians else float("nan")
    rows.append([str(k), f"{drafts:.2f}", f"{sequences:.2f}", f"{ms:.3f}", f"{ratio:.3f}",
                 f"{(1 + drafts) / ratio:.2f}", f"{least / ms:.0%}", f"{host:.3f}", f"{launch:.3f}", f"{wait:.3f}"])
  common.print_table(["k", "drafts/step", "sequences", "ms/step", "/ k = 0", "maximum speed-up", "of roofline",
                      "host ms", "launch ms", "wait ms"], rows)


def main() -> None:
  parser = common.make_parser(__doc__)
  parser.add_argument("--k", type=int, nargs="+", default=[0, 1, 2, 3, 5, 7], help="num_speculative_tokens (0: off)")
  parser.add_argument("--rounds", type=common.positive, default=3, help="rounds over all k; each step's minimum "
                      "counts, with --steps the median round")
  parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS], help="tasks")
  parser.add_argument("--streams", type=int, choices=range(1, 9), nargs="+", default=[1, 8], help="concurrent streams")
  parser.add_argument("--prompts", type=int, choices=range(1, 9), default=4, help="minimum prompts per task")
  parser.add_argument("--output-len", type=common.positive, default=128, help="output tokens per prompt")
  parser.add_argument("--max-model-len", type=common.positive, default=1024, help="maximum tokens of prompt and output")
  parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy; prompt i has seed i")
  parser.add_argument("--lookup", type=common.positive, nargs=2, metavar=("MIN", "MAX"), default=[2, 4],
                      help="prompt_lookup_min and prompt_lookup_max")
  parser.add_argument("--draft", metavar="DIR", help="folder of the draft model (default: n-grams)")
  parser.add_argument("--steps", type=common.positive, nargs="?", const=32, help="measure this many steps per "
                      "round with wrong drafts (without a value: 32)")
  parser.add_argument("--running", type=common.positive, nargs="+", default=[1, 8],
                      help="running sequences, with --steps")
  parser.add_argument("--context", type=common.positive, default=128, help="tokens per prompt, with --steps")
  parser.add_argument("--draft-shape", choices=common.SHAPES, help="shape of a random draft model, with --steps")
  args = parser.parse_args()
  if not (args.steps or args.model): parser.error("use --model DIR or --steps: random weights generate no repetitions")
  bandwidth = common.start(args)
  if args.steps:
    for running in args.running:
      measure_steps(args, running, bandwidth)
      common.release()
  elif not measure_tasks(args): raise SystemExit(1)


if __name__ == "__main__": main()
