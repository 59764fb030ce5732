"""Find the fastest tile sizes for a device's tensor cores: TILES in tinyvllm_extra.kernels.matmul, SHARED in
shared_memory.

  python tests/benchmarks/tiles.py --shape llama-7b --layers 8 --tokens 1 32 512

For each number of outputs, tries all tile sizes that fit for its matrices, while the other matrices keep their best so
far, and times the whole captured step. Timing single products misleads: a graph runs independent kernels in parallel,
and repeated reads of the weights hit a cache. Prints the current and the best tile sizes with the step's microseconds,
and rows for TILES. Up to 64 --tokens is a decode step of that many sequences, more is a prefill chunk. TILES is for
the matrices without SHARED tiles; if --tokens is a multiple of 16, SHARED tiles are tried on all matrices."""
import argparse
import itertools
import operator

import common
import kernels
from common import LLM
from tinygrad import Tensor

from tinyvllm.runner import next_power_of_two
from tinyvllm_extra.kernels import matmul, shared_memory

Tiling = tuple[int, ...]   # tiles of 16 outputs, tiles of 8 rows, warps per sum, steps of 32 inputs per iteration
DECODING = 64              # maximum tokens of a decode step


def current(tokens: int, outputs: int, bits: int) -> Tiling:
  """Return the tile sizes in TILES."""
  return next(tuple(tiling) for rows, max_outputs, max_bits, *tiling in matmul.TILES
              if rows >= tokens and max_outputs >= outputs and max_bits >= bits)


def candidates(tokens: int, outputs: int, inputs: int) -> list[Tiling]:
  """Return the tile sizes whose sums fit a warp's registers and whose work group fits 48 KiB of shared memory."""
  sizes = itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2))
  return [(n, t, shares, steps) for n, t, shares, steps in sizes
          if outputs // 16 % n == 0 and -(-tokens // 8) % t == 0 and n * t <= 16 and n * t * shares <= 96
          and shares * steps <= inputs // 32]


def step_time(llm: LLM, tokens: int, args: argparse.Namespace) -> float:
  """Capture a step again; return its median microseconds."""
  matmul.tensor_core_linear_kernel.cache_clear()
  num_tokens = next_power_of_two(tokens)
  llm.runner.graphs = {key: graph for key, graph in llm.runner.graphs.items() if key.num_tokens != num_tokens}
  decode = tokens <= DECODING
  context = args.context if decode else args.context // tokens * tokens   # only whole chunks
  jit, inputs, values = kernels.capture(llm, tokens, context, decode)
  return 1e6 * kernels.step_time(jit, inputs, values, args.rounds)


def matrices_of(llm: LLM) -> dict[str, matmul.Linear]:
  """Return a layer's matrices in the layout for tensor cores, by name."""
  layer = vars(llm.runner.model.layers[0])
  matrices = {name: x for name, x in layer.items() if isinstance(x, matmul.Linear) and len(x.weight.shape) != 3}
  if not matrices: raise SystemExit("error: no matrix of this model runs on this device's tensor cores")
  return matrices


def sweep(llm: LLM, tokens: int, args: argparse.Namespace) -> None:
  """Tune TILES for the matrices without SHARED tiles."""
  def uses_tiles(x): return not x.splits(Tensor.empty(tokens, 1, dtype=llm.runner.model.dtype))
  matrices = {name: x for name, x in matrices_of(llm).items() if uses_tiles(x)}
  if not matrices: return
  bits = {None: 16, "int8": 8, "int4": 4, "fp8": 8}[args.quantization]
  table = [*matmul.TILES]
  best_tilings = {x.out_features: current(tokens, x.out_features, bits) for x in matrices.values()}

  def measure(outputs: int, tiling: Tiling) -> tuple[float, Tiling]:
    tilings = sorted({**best_tilings, outputs: tiling}.items())
    below = sum(rows < tokens for rows, *_ in table)   # rows of TILES for fewer tokens, as in the head
    matmul.TILES[below:below] = [(tokens, max_outputs, bits, *sizes) for max_outputs, sizes in tilings]
    try: return step_time(llm, tokens, args), tiling
    finally: matmul.TILES[:] = table

  rows = []
  for outputs, before in best_tilings.items():
    group = {name: x for name, x in matrices.items() if x.out_features == outputs}
    inputs = min(int(x.weight.shape[1]) * 32 for x in group.values())
    current_us = measure(outputs, before)[0]
    best, tiling = min(measure(outputs, x) for x in candidates(tokens, outputs, inputs)[:args.most])
    if best < current_us * 0.99: best_tilings[outputs] = tiling   # a smaller gain may be noise
    rows.append([", ".join(group), str(outputs), str(before), f"{current_us:.0f}", str(tiling), f"{best:.0f}"])
    print(*rows[-1], flush=True)
  print(f"\n{tokens} tokens, {bits} bits")
  common.print_table(["matrices", "outputs", "current", "current, us", "best", "best, us"], rows)
  print("rows of TILES:", *[(tokens, outputs, bits, *tiling) for outputs, tiling in sorted(best_tilings.items())])


def shared_candidates(tokens: int, outputs: int, bytes_per_output: int) -> list[tuple[shared_memory.Shared, int]]:
  """Return SHARED tiles and split-K factors that fit 48 KiB of shared memory and have enough work groups."""
  powers = (1, 2, 4)
  sizes = [shared_memory.Shared(*x, 0) for x in itertools.product(powers, (*powers, 8, 16), powers, powers)]
  full = [x._replace(buffers=min(8, 48 * 1024 // (bytes_per_output * x.outputs + 64 * x.rows))) for x in sizes]
  return [(x, parts) for x, parts in itertools.product(full, (1, 2, 4, 8))
          if tokens % x.rows == 0 == outputs % x.outputs and x.buffers > 2 and 2 <= x.wide * x.high <= 8
          and x.n * x.t <= 32 and x.outputs <= 256 and 96 <= tokens // x.rows * (outputs // x.outputs) * parts <= 1100]


def sweep_shared(llm: LLM, tokens: int, args: argparse.Namespace) -> None:
  """Try SHARED tiles on each matrix; None is the current rule."""
  matrices = matrices_of(llm)
  rule = matmul.shared_tiles
  rows = []
  for outputs in dict.fromkeys(x.out_features for x in matrices.values()):
    def measure(choice: tuple[shared_memory.Shared, int] | None, outputs=outputs) -> float:
      def shared_tiles(rows, features, parts, is_quantized):
        is_measured = choice and (rows, features) == (tokens, outputs) and choice[1] in parts
        return choice if is_measured else rule(rows, features, parts, is_quantized)
      matmul.shared_tiles = shared_tiles
      matmul.many_rows_linear_kernel.cache_clear()
      try: return step_time(llm, tokens, args)
      finally: matmul.shared_tiles = rule
    names = [name for name, x in matrices.items() if x.out_features == outputs]
    candidates = shared_candidates(tokens, outputs, 36 if args.quantization else 64)[:args.most]
    times = {choice: measure(choice) for choice in [None, *candidates]}
    best, microseconds = min(times.items(), key=operator.itemgetter(1))
    rows.append([", ".join(names), str(outputs), f"{times[None]:.0f}", str(best), f"{microseconds:.0f}"])
    print(*rows[-1], flush=True)
  print(f"\n{tokens} tokens, SHARED tiles")
  common.print_table(["matrices", "outputs", "current, us", "best", "best, us"], rows)


def main() -> None:
  parser = common.make_parser(__doc__)
  parser.set_defaults(layers=8)
  parser.add_argument("--tokens", type=common.positive, nargs="+", default=[1, 32, 512], help="tokens per step")
  parser.add_argument("--context", type=common.positive, default=64, help="tokens per sequence before the step")
  parser.add_argument("--rounds", type=common.positive, default=20, help="runs of each step")
  parser.add_argument("--most", type=common.positive, help="maximum tile sizes to try per matrix, for a quick look")
  args = parser.parse_args()
  common.start(args)
  for tokens in args.tokens:
    common.release()
    llm = common.open_llm(args, max_model_len=args.context + 8 * tokens + 8, max_num_seqs=min(tokens, DECODING),
                          max_num_batched_tokens=max(tokens, DECODING))
    sweep(llm, tokens, args)
    if tokens % 16 == 0: sweep_shared(llm, tokens, args)


if __name__ == "__main__": main()
