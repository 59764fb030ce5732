"""Which tiles suit a device's tensor cores: what TILES and SHARED in tinyvllm_extra.kernels.matmul are made with.

  python tests/benchmarks/tiles.py --shape llama-7b --layers 8 --tokens 1 32 512

The matrices of each number of outputs in turn get each tiling that fits, while the others keep the best so far, and the
captured step is run whole: single products mislead, as a graph runs those side by side that do not wait for each other,
and a cache holds weights that are read again and again. Prints the best beside what the table says today, in
microseconds of a step, and rows for the table. Up to 64 --tokens are sequences that decode one each, more a chunk.
TILES is for the matrices that SHARED leaves; of a multiple of 32 tokens all are tried in tiles of its kind, too."""
import argparse
import itertools
import operator

import common
import kernels
from common import LLM
from tinygrad import Tensor

from tinyvllm.runner import next_power_of_two
from tinyvllm_extra.kernels import matmul

Tiling = tuple[int, ...]   # tiles of 16 outputs, of 8 rows, warps that share a sum, steps of 32 inputs at once
DECODING = 64              # tokens at most


def current(tokens: int, outputs: int, bits: int) -> Tiling:
  """What the table says."""
  return next(tuple(tiling) for rows, most, most_bits, *tiling in matmul.TILES
              if rows >= tokens and most >= outputs and most_bits >= bits)


def candidates(tokens: int, outputs: int, inputs: int) -> list[Tiling]:
  """Those whose sums fit a warp's registers, and what its work group shares 48 KiB."""
  sizes = itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2))
  return [(n, t, shares, steps) for n, t, shares, steps in sizes
          if outputs // 16 % n == 0 and -(-tokens // 8) % t == 0 and n * t <= 16 and n * t * shares <= 96
          and shares * steps <= inputs // 32]


def step_time(llm: LLM, tokens: int, args: argparse.Namespace) -> float:
  """Microseconds of a step captured anew, the median."""
  matmul.tensor_core_linear_kernel.cache_clear()
  num_tokens = next_power_of_two(tokens)
  llm.runner.graphs = {key: graph for key, graph in llm.runner.graphs.items() if key.num_tokens != num_tokens}
  decode = tokens <= DECODING
  context = args.context if decode else args.context // tokens * tokens   # or the last chunk would be less
  jit, inputs, values = kernels.capture(llm, tokens, context, decode)
  return 1e6 * kernels.step_time(jit, inputs, values, args.rounds)


def matrices_of(llm: LLM) -> dict[str, matmul.Linear]:
  """A layer's, by name, that tensor cores take."""
  layer = vars(llm.runner.model.layers[0])
  found = {name: x for name, x in layer.items() if isinstance(x, matmul.Linear) and len(x.weight.shape) != 3}
  if not found: raise SystemExit("error: this device's tensor cores take none of these matrices")
  return found


def sweep(llm: LLM, tokens: int, args: argparse.Namespace) -> None:
  """The matrices whose warps share nothing, by TILES."""
  def alone(x): return not x.splits(Tensor.empty(tokens, 1, dtype=llm.runner.model.dtype))
  matrices = {name: x for name, x in matrices_of(llm).items() if alone(x)}
  if not matrices: return
  bits = {None: 16, "int8": 8, "int4": 4}[args.quantization]
  table = [*matmul.TILES]
  chosen = {x.out_features: current(tokens, x.out_features, bits) for x in matrices.values()}

  def measured(outputs: int, tiling: Tiling) -> tuple[float, Tiling]:
    tried = sorted({**chosen, outputs: tiling}.items())
    below = sum(rows < tokens for rows, *_ in table)   # of steps with fewer rows, and of the head's
    matmul.TILES[below:below] = [(tokens, most, bits, *sizes) for most, sizes in tried]
    try: return step_time(llm, tokens, args), tiling
    finally: matmul.TILES[:] = table

  rows = []
  for outputs, before in chosen.items():
    of = {name: x for name, x in matrices.items() if x.out_features == outputs}
    inputs = min(int(x.weight.shape[1]) * 32 for x in of.values())
    today = measured(outputs, before)[0]
    best, tiling = min(measured(outputs, x) for x in candidates(tokens, outputs, inputs)[:args.most])
    if best < today * 0.99: chosen[outputs] = tiling   # else it may be chance
    rows.append([", ".join(of), str(outputs), str(before), f"{today:.0f}", str(tiling), f"{best:.0f}"])
    print(*rows[-1], flush=True)
  print(f"\n{tokens} tokens, {bits} bits")
  common.print_table(["matrices", "outputs", "today", "us", "best", "us"], rows)
  print("rows of the table:", *[(tokens, outputs, bits, *tiling) for outputs, tiling in sorted(chosen.items())])


def shared_candidates(tokens: int, outputs: int) -> list[tuple[matmul.Shared, int]]:
  """Tiles that warps share, and parts of the inputs: what fits 48 KiB and keeps a card busy."""
  sizes = [matmul.Shared(*size, 0) for size in itertools.product((1, 2, 4), repeat=4)]
  full = [x._replace(buffers=min(8, 48 * 1024 // (64 * (x.outputs + x.rows)))) for x in sizes]
  return [(x, parts) for x, parts in itertools.product(full, (1, 2, 4, 8))
          if tokens % x.rows == 0 == outputs % x.outputs and x.buffers > 2 and 2 <= x.wide * x.high <= 8
          and x.rows // 8 % (x.wide * x.high) == 0 == x.outputs // 8 % (x.wide * x.high)
          and 96 <= tokens // x.rows * (outputs // x.outputs) * parts <= 1100]


def sweep_shared(llm: LLM, tokens: int, args: argparse.Namespace) -> None:
  """Each matrix in turn by warps that share what they read, or as the rule says (None)."""
  matrices = matrices_of(llm)
  rule = matmul.shared_tiles
  rows = []
  for outputs in dict.fromkeys(x.out_features for x in matrices.values()):
    def measured(choice: tuple[matmul.Shared, int] | None, outputs=outputs) -> float:
      def shared_tiles(rows, features, parts):
        taken = choice and (rows, features) == (tokens, outputs) and choice[1] in parts
        return choice if taken else rule(rows, features, parts)
      matmul.shared_tiles = shared_tiles
      matmul.many_rows_linear_kernel.cache_clear()
      try: return step_time(llm, tokens, args)
      finally: matmul.shared_tiles = rule
    names = [name for name, x in matrices.items() if x.out_features == outputs]
    times = {choice: measured(choice) for choice in [None, *shared_candidates(tokens, outputs)[:args.most]]}
    best, took = min(times.items(), key=operator.itemgetter(1))
    rows.append([", ".join(names), str(outputs), f"{times[None]:.0f}", str(best), f"{took:.0f}"])
    print(*rows[-1], flush=True)
  print(f"\n{tokens} tokens, warps that share what they read")
  common.print_table(["matrices", "outputs", "us by the rule", "best", "us"], rows)


def main() -> None:
  parser = common.make_parser(__doc__)
  parser.set_defaults(layers=8)
  parser.add_argument("--tokens", type=common.positive, nargs="+", default=[1, 32, 512], help="of a step")
  parser.add_argument("--context", type=common.positive, default=64, help="tokens that the sequences hold before")
  parser.add_argument("--rounds", type=common.positive, default=20, help="times that each step is run")
  parser.add_argument("--most", type=common.positive, help="tilings that are tried of each matrix, for a quick look")
  args = parser.parse_args()
  common.start(args)
  for tokens in args.tokens:
    common.release()
    llm = common.open_llm(args, max_model_len=args.context + 8 * tokens + 8, max_num_seqs=min(tokens, DECODING),
                          max_num_batched_tokens=max(tokens, DECODING))
    sweep(llm, tokens, args)
    if tokens % 32 == 0 and not args.quantization: sweep_shared(llm, tokens, args)


if __name__ == "__main__": main()
