"""Measure the cost of sampling in a decode step.

  python tests/benchmarks/sampling.py --shape smollm2-135m --running 8
  python tests/benchmarks/sampling.py --model DIR --running 8 --host

Each row is a set of sampling parameters that all running sequences use. Every round measures all rows, so that other
load on the machine affects all of them. Columns:
  ms/step       median decode step of all rounds
  over greedy   median of the rounds' differences to the greedy step
  share         the same in percent of that round's greedy step
  range         minimum and maximum share
Prompts have --context tokens (default 1): with little attention, sampling takes a larger share. Structured outputs need
a tokenizer, so --model.

Target: 15% of a decode step of eight SmolLM2 sequences on a CPU."""
import random
import statistics

import common
from common import LLM, SamplingParams, Watch

TARGET_SHARE = 0.15
BEST = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5,
             "logit_bias": {i: i / 10 for i in range(10, 42)}}
GREEDY, ALL, STRUCTURED = "greedy", "+ penalties, logit_bias, min_tokens", "structured outputs"


def sampling_params(tokens: int) -> dict[str, SamplingParams]:
  def params(**options) -> SamplingParams: return SamplingParams(max_tokens=tokens, **options)
  return {GREEDY: common.greedy(tokens), "temperature": params(temperature=0.8, ignore_eos=True),
          "+ top_k, top_p, min_p": params(**BEST, ignore_eos=True),
          ALL: params(**BEST, **PENALTIES, min_tokens=tokens),
          "logprobs=5": params(temperature=0.0, ignore_eos=True, logprobs=5),
          STRUCTURED: params(temperature=0.8, structured_outputs={"regex": "[a-z ]{1,}"})}


def decode_steps(llm: LLM, params: SamplingParams, args, rng: random.Random) -> tuple[list, int]:
  """Return the steps in which all sequences decode, without the first two, and the number of graphs captured meanwhile.
  A finished sequence is replaced: structured outputs may end early."""
  live = set[str]()
  number = 0
  with Watch(llm) as watch:
    def decoding() -> list: return [s for s in watch.steps if s.decode and s.outputs == args.running][2:]
    while len(steps := decoding()) < args.steps:
      while len(live) < args.running:
        live.add(str(number := number + 1))
        llm.add_request(str(number), common.random_ids(llm.model_config.vocab_size, args.context, rng), params)
      live -= {output.request_id for output in llm.step() if output.finished}
  for request_id in live: llm.abort_request(request_id)
  while llm.has_unfinished_requests(): llm.step()
  return steps, watch.captured


def measure_steps(args) -> None:
  common.release()
  tokens = 2 * args.steps + 8 + args.running
  llm = common.open_llm(args, max_model_len=args.context + tokens, max_num_seqs=args.running)
  names, rng = sampling_params(tokens), random.Random(args.seed)
  has_tokenizer = args.model and args.layers is None
  if not has_tokenizer: del names[STRUCTURED]
  _, seconds = common.timed(lambda: [decode_steps(llm, params, args, rng) for params in names.values()])
  print(f"  warm-up and graph captures took {seconds:.1f} s", flush=True)
  rounds: list[dict[str, list]] = []
  for i in range(args.rounds):
    rounds.append({})
    for name in [*names][::-1 if i % 2 else 1]:   # alternate the order
      rounds[-1][name], captured = decode_steps(llm, names[name], args, rng)
      if captured: print(f"  warning: {captured} graphs were captured in round {i} of {name}; run it again")
  rows = []
  for name in names:
    steps = [s for each in rounds for s in each[name]]
    pairs = [tuple(statistics.median(s.seconds for s in each[x]) for x in (name, GREEDY)) for each in rounds]
    difference, shares = statistics.median(a - b for a, b in pairs), sorted(a / b - 1 for a, b in pairs)
    row = [name, f"{1e3 * statistics.median(s.seconds for s in steps):.2f}", f"{1e3 * difference:+.2f}",
           f"{statistics.median(shares):+.1%}", f"{shares[0]:+.1%} to {shares[-1]:+.1%}"]
    rows.append(row + (common.host_columns(steps) if args.host else []))
    if name == ALL: share = statistics.median(shares)
  print(f"{args.running} running, {args.rounds} rounds of {args.steps} decode steps at context {args.context}, "
        f"vocabulary {llm.model_config.vocab_size}")
  common.print_table(["sampling", "ms/step", "over greedy, ms", "share", "range",
                      *(common.HOST_COLUMNS if args.host else [])], rows)
  if not has_tokenizer: print(f"{STRUCTURED}: needs --model and its tokenizer")
  print(f"{ALL}: {share:+.1%} of a greedy step (target: at most {TARGET_SHARE:.0%} for 8 SmolLM2 sequences)")


def main() -> None:
  parser = common.make_parser(__doc__)
  parser.add_argument("--running", type=common.positive, default=8, help="running sequences")
  parser.add_argument("--context", type=common.positive, default=1, help="tokens per prompt")
  parser.add_argument("--steps", type=common.positive, default=16, help="decode steps per row and round")
  parser.add_argument("--rounds", type=common.positive, default=9, help="rounds")
  common.add_host(parser)
  args = parser.parse_args()
  common.start(args)
  measure_steps(args)


if __name__ == "__main__": main()
