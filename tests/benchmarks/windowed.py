"""Measure attention with a window at a long context, next to attention to a context as short as the window.

  python tests/benchmarks/windowed.py --shape llama-3.1-8b --context 32768 --windows 1024 128

Measures decode steps (one token per sequence, the last one of the context) and prefill chunks (of one sequence, after
the context). Runs each step's attention --layers times, with a KV cache each. Columns:
  us         microseconds per call, median of the rounds, without RoPE and the write of K and V
  MB         bytes of K and V that a call must read: each position that a token sees, once per sequence
  of copy    share of the measured copy bandwidth (the roofline); prefill is limited by arithmetic
  relative   time relative to the same step without a window"""
import argparse
from types import SimpleNamespace

import common
import kernels
import numpy as np
from common import SHAPES
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.engine import realize

from tinyvllm.runner import NO_TILE, TILE, TOKENS, capture
from tinyvllm_extra.kernels import make_backend

BLOCK_SIZE = 16


def on_device(x: np.ndarray) -> Tensor: return Tensor(np.ascontiguousarray(x)).contiguous().realize()


class Attention:
  """Attention of --layers layers. length: maximum positions of all sequences together, in whole blocks."""
  def __init__(self, args: argparse.Namespace, length: int):
    self.args, config = args, SHAPES[args.shape]
    self.model = SimpleNamespace(**{name: config[name] for name in ("num_attention_heads", "num_key_value_heads")},
                                 head_dim=config["hidden_size"] // config["num_attention_heads"])
    self.backend = make_backend()
    self.dtype = getattr(dtypes, self.backend.pick_dtype("auto"))
    self.layout = self.backend.kv_layout(self.model, SimpleNamespace(  # type: ignore[arg-type]
      kv_cache_dtype=args.kv_cache_dtype, block_size=BLOCK_SIZE), self.dtype)
    self.num_blocks = length // BLOCK_SIZE + 1
    def zeros(shape, dtype): return Tensor.zeros(self.num_blocks, *shape, dtype=dtype).clone().realize()
    self.caches = [[zeros(*part) for part in self.layout] for _ in range(args.layers)]
    self.options: dict = {"cap": args.cap}
    if args.sinks: self.options["sinks"] = Tensor.zeros(self.model.num_attention_heads).clone().realize()

  def measure(self, sequences: int, chunk: int, context: int, window: int) -> tuple[float, int]:
    """Return the seconds of a call, and the bytes that it must read. chunk: last tokens of each sequence's context."""
    model, T = self.model, sequences * chunk
    num_blocks = -(-context // BLOCK_SIZE)
    table = np.random.default_rng(0).permutation(self.num_blocks - 1)[:sequences * num_blocks] + 1
    table = table.reshape(sequences, num_blocks)
    slots, positions = np.divmod(np.arange(T), chunk)
    positions += context - chunk
    tiles = np.full(T, NO_TILE)
    starts = [(i * chunk + j, min(TILE, chunk - j)) for i in range(sequences) for j in range(0, chunk, TILE)]
    tiles[:len(starts)] = [first * TILE + size - 1 for first, size in starts]
    columns = {"id": 0 * slots, "position": positions, "slot": slots, "query_tile": tiles,
               "table_index": slots * num_blocks + positions // BLOCK_SIZE,
               "block": table[slots, positions // BLOCK_SIZE]}
    tokens = np.stack([columns[name] for name in TOKENS.dtype.names])
    heads = model.num_attention_heads + 2 * model.num_key_value_heads
    rope = np.ones((context, 2, model.head_dim // 2), np.float32)
    inputs = [on_device(x) for x in (rope, tokens.astype(np.int32), table.astype(np.int32))]
    qkv = Tensor.ones(T, heads * model.head_dim, dtype=self.dtype).clone().realize()
    jit = TinyJit(lambda qkv: [self.backend.attend(qkv, cache, *inputs, model.num_attention_heads, window=window,
                                                   **self.options).realize() for cache in self.caches])
    for _ in range(3): capture(lambda: jit(qkv))
    calls = kernels.calls_of(jit.captured.linear)
    times = kernels.kernel_times(calls, {}, [qkv.uop.base], self.args)
    seconds = 0.0
    for call, time in zip(calls, times, strict=True):
      operands = [u.buffer for u in realize.resolve_params(call, (qkv.uop.base,))]
      if any(word in realize.get_call_name(call, operands) for word in ("attend", "combine")): seconds += time
    visible = min(context, window + chunk - 1 if window else context)
    position_bytes = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.layout) // BLOCK_SIZE
    return seconds / self.args.layers, sequences * visible * position_bytes


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=common.Formatter)
  parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="model shape whose heads are used")
  parser.add_argument("--context", type=common.positive, default=32768, help="tokens per sequence")
  parser.add_argument("--windows", type=common.positive, nargs="+", default=[1024, 128], help="positions per window")
  parser.add_argument("--decode", type=common.positive, nargs="*", default=[1, 32], help="sequences per decode step")
  parser.add_argument("--prefill", type=common.positive, nargs="*", default=[512], help="tokens per prefill chunk")
  parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8", "int8"), default="auto",
                      help="data type of the KV cache")
  parser.add_argument("--cap", type=float, default=0.0, help="cap of the scores, 0 for none")
  parser.add_argument("--sinks", action="store_true", help="with a sink per head")
  parser.add_argument("--layers", type=common.positive, default=4, help="layers, each with its own KV cache")
  parser.add_argument("--rounds", type=common.positive, default=20, help="runs of the step")
  parser.add_argument("--one-by-one", action="store_true", help="on CUDA, synchronize after each kernel (slower)")
  parser.set_defaults(model=None, dtype="auto")
  args = parser.parse_args()
  bandwidth = common.start(args)
  steps = [(f"decode of {n}", n, 1) for n in args.decode] + [(f"prefill of {n}", 1, n) for n in args.prefill]
  room = args.context + max([0, *args.prefill])
  attention = Attention(args, max([1, *args.decode]) * -(-room // BLOCK_SIZE) * BLOCK_SIZE)
  rows = []
  for name, sequences, chunk in steps:
    before = chunk if chunk > 1 else 0   # a prefill chunk follows the context, a decoded token is its last
    pairs = [(0, args.context)] + [pair for n in args.windows for pair in ((n, args.context), (0, n))]
    cases = [(f"window {window}" if window else "no window", context,
              attention.measure(sequences, chunk, context + before, window)) for window, context in pairs]
    full, _ = cases[0][2]
    for kind, context, (seconds, size) in cases:
      rows.append([name, kind, str(context), f"{1e6 * seconds:.1f}", f"{size / 1e6:.3f}",
                   f"{size / seconds / bandwidth:.0%}", f"{seconds / full:.4f}"])
  common.print_table(["step", "attention", "context", "us", "MB", "of copy", "relative"], rows)


if __name__ == "__main__": main()
