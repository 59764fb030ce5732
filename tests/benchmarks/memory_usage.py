"""Measure KV-cache use, and the gain and cost of the prefix cache.

  python tests/benchmarks/memory_usage.py    # four layers of SmolLM2-135M's shape; three minutes on two cores
  python tests/benchmarks/memory_usage.py --shape llama-3.2-1b --requests 32 --prefix 1024
  python tests/benchmarks/memory_usage.py --overhead --shape bundled

First, --requests prompts with a shared --prefix are submitted together: seconds until all have their first token, with
and without the prefix cache. A warm-up on other tokens captures the graphs. Then several loads run in a pool of
--blocks blocks, inspected after every step. Columns:
  running       sequences in the median step that leaves a request waiting or runs all of them
  peak          maximum running sequences in any step
  preallocated  sequences that fit if each reserves --max-model-len tokens
  utilization   stored tokens / slots of the allocated blocks, mean and minimum; above 100% if sequences share tokens
  MiB each      allocated blocks per sequence, shared blocks counted once
  unshared      the same if no block were shared

Other modes:
  --overhead    tokens/s of prompts with nothing in common, with and without the prefix cache, alternating
  --pressure    seconds of --requests prompts (128 to 512 tokens in, 192 out) with all the blocks they need, and with a
                quarter of them, so that sequences are preempted and recomputed
  --kv-caches   memory and decode speed of each kv_cache_dtype (--running sequences of --context tokens, alternating);
                with --model also the perplexity of a text"""
import math
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import common
from common import LLM
from perplexity import TEXT, perplexity

OWN, NEW = 16, 64   # prompt tokens after the prefix; output tokens of a load


@dataclass
class Sample:
  """The running sequences after a step."""
  running: int
  waiting: int           # waiting requests
  stored_tokens: int     # tokens with K and V in the cache, counted per sequence
  block_references: int  # entries of all block tables
  blocks: int            # distinct blocks in them


def engine(args, cache: bool, length: int, **options) -> LLM:
  """Return an engine for sequences of `length` tokens, or of the model's limit if that is less. cache: prefix cache."""
  common.release()
  length = min(length, common.hf_config(args)["max_position_embeddings"])
  return common.open_llm(args, max_model_len=length, enable_prefix_caching=cache, **options)


def pool_engine(args, cache: bool) -> LLM:
  return engine(args, cache, args.max_model_len, max_num_seqs=2 * args.requests,
                num_gpu_blocks_override=args.blocks + 1)


def sharing(llm: LLM, args, n: int, new: int, seed: int) -> list[dict]:
  """Return n prompts: a shared prefix (as much of --prefix as fits, in whole blocks) and OWN different tokens each."""
  size, vocabulary, rng = llm.config.block_size, llm.model_config.vocab_size, random.Random(seed)
  fits = (llm.max_model_len - OWN - new) // size * size
  prefix = common.random_ids(vocabulary, min(args.prefix, fits), rng)["prompt_token_ids"]
  return [{"prompt_token_ids": prefix + common.random_ids(vocabulary, OWN, rng)["prompt_token_ids"]} for _ in range(n)]


def mixed(llm: LLM, min_len: int, max_len: int, n: int, seed: int) -> list[dict]:
  """Return n prompts of random lengths with nothing in common."""
  rng, limit, vocabulary = random.Random(seed), llm.max_model_len - NEW, llm.model_config.vocab_size
  return [common.random_ids(vocabulary, min(limit, rng.randint(min_len, max_len)), rng) for _ in range(n)]


def timed(llm: LLM, prompts: list[dict], new: int, warm: bool = True) -> tuple[list, float]:
  """Return the outputs of `prompts`, submitted together, and the seconds they take."""
  graphs = len(llm.runner.graphs)
  outputs, seconds = common.timed(llm.generate, prompts, common.greedy(new), use_tqdm=False)
  if warm and len(llm.runner.graphs) > graphs: print("  warning: graphs were captured during the measurement")
  return outputs, seconds


def measure_prefill(llm: LLM, args, cache: bool) -> dict:
  """Measure the prefill of requests with a shared prefix, submitted together."""
  prompts = sharing(llm, args, args.requests, 1, args.seed)
  length, budget = len(prompts[0]["prompt_token_ids"]), llm.config.max_num_batched_tokens
  others = sharing(llm, args, args.requests, 1, args.seed + 1)
  if not cache:   # a full step and the last step's remainder capture the same graphs in less time
    full, rest = divmod(min(total := args.requests * length, budget + total % budget), length)
    others = others[:full] + [{"prompt_token_ids": x["prompt_token_ids"][:rest]} for x in others[full:full + 1] if rest]
  timed(llm, others, 1, warm=False)
  before, (outputs, seconds) = llm.get_metrics(), timed(llm, prompts, 1)
  queries, hits = (llm.get_metrics()[f"prefix_cache_{k}"] - before[f"prefix_cache_{k}"] for k in ("queries", "hits"))
  return {"seconds": seconds, "prefix": length - OWN, "prompt_tokens": args.requests * length,
          "cached_tokens": sum(o.num_cached_tokens for o in outputs), "hit_rate": hits / queries if queries else 0.0,
          "first_tokens": [o.outputs[0].token_ids[0] for o in outputs]}


def run_load(llm: LLM, prompts: list[dict]) -> list[Sample]:
  samples = []
  for i, prompt in enumerate(prompts): llm.add_request(str(i), prompt, common.greedy(NEW))
  while llm.has_unfinished_requests():
    llm.step()
    running = [seq for seq in llm.scheduler.running if seq.block_table]
    if not running: continue   # all are finished
    blocks = [block for seq in running for block in seq.block_table]
    samples.append(Sample(len(running), int(llm.get_metrics()["num_requests_waiting"]),
                          sum(seq.num_computed for seq in running), len(blocks), len(set(blocks))))
  return samples


def measure_load(llm: LLM, prompts: list[dict]) -> list[str]:
  """Return a row of the table of loads."""
  size, before = llm.config.block_size, llm.get_metrics()
  samples, after = run_load(llm, prompts), llm.get_metrics()
  block = common.token_bytes(llm) * size
  full = [s for s in samples if s.waiting or s.running == len(prompts)] or samples
  utilization = [s.stored_tokens / (s.blocks * size) for s in samples]
  each, unshared = (block * statistics.fmean(getattr(s, name) / s.running for s in full)
                    for name in ("blocks", "block_references"))
  return [str(len(prompts)), f"{statistics.median(s.running for s in full):g}", str(max(s.running for s in samples)),
          str(pool_tokens(llm) // llm.max_model_len), f"{statistics.fmean(utilization):.1%}", f"{min(utilization):.0%}",
          f"{each / 2**20:.2f}", f"{unshared / 2**20:.2f}", f"{after['num_preemptions'] - before['num_preemptions']:g}"]


def pool_tokens(llm: LLM) -> int: return (llm.blocks.num_blocks - 1) * llm.config.block_size


def decoding(args, kind: str) -> LLM:
  """Return an engine whose sequences are all past prefill and decode."""
  room = -(-args.context // (args.max_num_batched_tokens - args.running)) * args.running + 8 * args.rounds + 16
  blocks = args.running * -(-(args.context + room) // 16) + 1
  llm = common.open_llm(args, kv_cache_dtype=kind, max_num_seqs=args.running, num_gpu_blocks_override=blocks,
                        max_num_batched_tokens=args.max_num_batched_tokens)
  for i in range(args.running):
    prompt = common.random_ids(llm.model_config.vocab_size, args.context, random.Random(args.seed + i))
    llm.add_request(str(i), prompt, common.greedy(room))
  while any(seq.num_remaining > 1 for seq in llm.scheduler.running) or llm.scheduler.waiting: llm.step()
  for _ in range(3): llm.step()
  return llm


def measure_caches(args) -> None:
  """Compare the kv_cache_dtype values in one process."""
  engines = {kind: decoding(args, kind) for kind in ("auto", "int8", "fp8")}
  times: dict[str, list[float]] = {kind: [] for kind in engines}
  for kind, llm in [*engines.items()] * args.rounds:
    started = time.perf_counter()
    for _ in range(8): llm.step()
    times[kind].append((time.perf_counter() - started) / 8)
  sizes = {kind: common.token_bytes(llm) for kind, llm in engines.items()}
  perplexities = {kind: perplexity(args.text.read_text(), 8192, args.model, kv_cache_dtype=kind)
                  if args.model else math.nan for kind in engines}
  medians = {kind: statistics.median(x) for kind, x in times.items()}
  rows = [[kind, str(size), f"{sizes['auto'] / size:.2f}", f"{1e3 * medians[kind]:.2f}",
           f"{medians['auto'] / medians[kind]:.3f}", f"{perplexities[kind] / perplexities['auto']:.4f}"]
          for kind, size in sizes.items()]
  print(f"{args.running} running at context {args.context}; capacity, speed and perplexity relative to auto")
  common.print_table(["kv_cache_dtype", "bytes per token", "capacity", "ms/step", "speed", "perplexity"], rows)


def measure_memory(args) -> None:
  """Measure prefill without and with the prefix cache, then the loads with it."""
  prefill = {"off": measure_prefill(pool_engine(args, False), args, False)}
  llm = pool_engine(args, True)
  prefill["on"] = on = measure_prefill(llm, args, True)
  if on["prefix"] < args.prefix: print(f"  prefix of {on['prefix']} tokens: --prefix {args.prefix} does not fit")
  ratio = prefill["off"]["seconds"] / on["seconds"]
  rows = [[cache, f"{x['seconds']:.2f}", str(x["prompt_tokens"]), str(x["cached_tokens"]), f"{x['hit_rate']:.0%}"]
          for cache, x in prefill.items()]
  common.print_table(["prefix cache", "seconds", "prompt tokens", "cached tokens", "hit rate"], rows)
  same = sum(a == b for a, b in zip(*(x.pop("first_tokens") for x in prefill.values()), strict=True))
  print(f"{args.requests} requests of {on['prefix']} shared and {OWN} other tokens: speed-up {ratio:.1f}x by the "
        f"prefix cache (target: 5x); {same} of {args.requests} first tokens are equal\n", flush=True)
  n, seed, shared = args.requests, args.seed + 2, sharing(llm, args, args.requests, NEW, args.seed + 2)
  kinds = {"16 to 256": mixed(llm, 16, 256, 2 * n, seed), "200 to 400": mixed(llm, 200, 400, n, seed),
           f"{len(shared[0]['prompt_token_ids']) - OWN} shared + {OWN}": shared}
  rows = [[f"{name} in, {NEW} out", *measure_load(llm, prompts)] for name, prompts in kinds.items()]
  print(f"KV cache of {pool_tokens(llm)} tokens in {args.blocks} blocks, max_model_len {llm.max_model_len}")
  common.print_table(["load", "requests", "running", "peak", "preallocated", "utilization", "minimum", "MiB each",
                      "unshared", "preemptions"], rows)


def measure_overhead(args) -> None:
  """Measure prompts that never repeat. Each round fills the pool once, and so evicts all of it."""
  length = args.input_len + args.output_len
  engines = {cache: engine(args, cache, length, max_num_seqs=args.requests) for cache in (True, False)}
  rng, vocabulary, rates = random.Random(args.seed), engines[True].model_config.vocab_size, {True: [], False: []}
  for i in range(args.rounds + 1):   # the first round is a warm-up
    prompts = [common.random_ids(vocabulary, args.input_len, rng) for _ in range(args.requests)]
    for cache in (True, False) if i % 2 else (False, True):
      _, seconds = timed(engines[cache], prompts, args.output_len, warm=i > 0)
      if i: rates[cache].append(args.requests * length / seconds)
  ratios = sorted(on / off for on, off in zip(rates[True], rates[False], strict=True))
  metrics = engines[True].get_metrics()
  rows = [[name, *(f"{f(rates[cache]):.1f}" for f in (statistics.median, min, max))]
          for name, cache in (("off", False), ("on", True))]
  common.print_table(["prefix cache", "total tokens/s, median", "minimum", "maximum"], rows)
  hits = metrics["prefix_cache_hits"] / max(1, metrics["prefix_cache_queries"])
  print(f"{args.requests} prompts of {args.input_len} tokens, {args.output_len} out, hit rate {hits:.0%}: "
        f"throughput with / without the prefix cache {statistics.median(ratios):.3f}, median of {args.rounds} rounds "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f})")


def measure_pressure(args) -> None:
  """Run requests of the same lengths three times in two pools, and time the third run."""
  rng, rows = random.Random(args.seed), []
  longest = min(512, common.hf_config(args)["max_position_embeddings"] - 192)
  lengths = [rng.choice([longest // 4, longest // 2, longest]) for _ in range(args.requests)]
  need, largest = sum(-(-(n + 192) // 16) for n in lengths), -(-(longest + 192) // 16)   # blocks: all, longest one
  for name, blocks in (("all", need + 1), ("a quarter", max(need // 4, largest + 1))):
    llm = engine(args, True, 1024, max_num_seqs=args.requests, num_gpu_blocks_override=blocks)
    for i in range(3):
      prompts = [common.random_ids(llm.model_config.vocab_size, n, rng) for n in lengths]
      before, (_, seconds) = llm.get_metrics(), timed(llm, prompts, 192, warm=i > 1)
    after = llm.get_metrics()
    changes = [after[k] - before[k] for k in ("num_preemptions", "prefix_cache_hits")]
    rows.append([name, str(blocks), f"{seconds:.2f}", *(f"{x:g}" for x in changes)])
    del llm
  common.print_table(["pool", "blocks", "seconds", "preemptions", "cached tokens"], rows)


def main() -> None:
  parser = common.make_parser(__doc__)
  parser.set_defaults(shape=None)
  parser.add_argument("--requests", type=common.positive, default=32, help="requests (twice as many short ones)")
  parser.add_argument("--prefix", type=common.positive, default=1024, help="tokens of the shared prefix")
  parser.add_argument("--blocks", type=common.positive, default=256, help="size of the pool in blocks of 16 tokens")
  parser.add_argument("--max-model-len", type=common.positive, default=2048, help="maximum tokens per sequence")
  parser.add_argument("--overhead", action="store_true", help="measure the cost of the prefix cache without hits")
  parser.add_argument("--pressure", action="store_true", help="time a pool with a quarter of the blocks")
  parser.add_argument("--kv-caches", action="store_true", help="compare the kv_cache_dtype values")
  parser.add_argument("--running", type=common.positive, default=8, help="running sequences, with --kv-caches")
  parser.add_argument("--context", type=common.positive, default=1500, help="tokens per sequence, with --kv-caches")
  parser.add_argument("--text", type=Path, default=TEXT, help="text for the perplexity, with --kv-caches")
  parser.add_argument("--rounds", type=common.positive, default=9, help="rounds, with --overhead and --kv-caches")
  common.add_workload(parser, output_len=32)   # with --overhead
  args = parser.parse_args()
  if not args.shape and not args.model: args.shape, args.layers = "smollm2-135m", args.layers or 4
  common.start(args)
  modes = {"overhead": measure_overhead, "pressure": measure_pressure, "kv_caches": measure_caches}
  next((measure for name, measure in modes.items() if getattr(args, name)), measure_memory)(args)


if __name__ == "__main__": main()
