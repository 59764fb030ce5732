"""Measure prompts, decoding and a mixed load end to end: on tinyvllm or, with --engine vllm, on vLLM (installed with
its own torch), with random weights of the same shape. Compare only runs on one card.

  python tests/benchmarks/beside_vllm.py --shape llama-7b --running 1 32 64
  python tests/benchmarks/beside_vllm.py --shape llama-3.1-8b --running 64 --mixed --engine vllm

Prints tokens/s of one prompt of 512 tokens and of 32 of them, tokens/s of decoding (the time of 64 more tokens), and
with --mixed the seconds of 256 requests of log-normal lengths, 64 at once, and the pauses between tokens."""
import os
import random
import statistics
import time
from typing import Any

import common

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
OPTIONS = {"max_model_len": 4096, "max_num_seqs": 64}


def open_vllm(args: Any) -> Any:
  """Return vLLM's engine. Its int4 is AWQ; its fp8 also quantizes activations."""
  os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
  if args.tensor_parallel_size == 1: os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
  import vllm
  quantization = {"quantization_config": AWQ} if args.quantization == "int4" else {}
  with common.model_folder({**common.hf_config(args), **quantization, "torch_dtype": "float16"}) as folder:
    return vllm.LLM(folder, load_format="dummy", skip_tokenizer_init=True, dtype="float16", **OPTIONS,
                    gpu_memory_utilization=0.85, disable_log_stats=True, enable_prefix_caching=False,
                    tensor_parallel_size=args.tensor_parallel_size,
                    quantization="fp8" if args.quantization == "fp8" else None)


def open_tinyvllm(args: Any) -> Any:
  """Return tinyvllm's engine after its captures."""
  common.start(args)
  if args.quantization == "fp8": args.activation_quantization = "fp8"
  llm = common.open_llm(args, **OPTIONS)
  list(llm.capture())
  return llm


def main() -> None:
  parser = common.make_parser(__doc__)
  parser.set_defaults(max_num_batched_tokens=2048)
  parser.add_argument("--engine", choices=("tinyvllm", "vllm"), default="tinyvllm", help="engine to measure")
  parser.add_argument("--running", type=common.positive, nargs="*", default=[1, 32, 64], help="sequences that decode")
  parser.add_argument("--mixed", action="store_true", help="also run the mixed load")
  args = parser.parse_args()
  if args.engine == "vllm":
    llm = open_vllm(args)
    from vllm import SamplingParams
  else:
    llm = open_tinyvllm(args)
    from tinyvllm import SamplingParams
  rng = random.Random(args.seed)

  def run(lengths: list[int], outputs: list[int]) -> tuple[float, list[float]]:
    """Run requests of the given lengths. Return the seconds, and the pauses between the tokens of each request."""
    engine = getattr(llm, "llm_engine", llm)
    pauses, last = [], {}
    prompts = [{"prompt_token_ids": [rng.randrange(10, 31000) for _ in range(n)]} for n in lengths]
    started = time.perf_counter()
    for i, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
      engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    running = set(map(str, range(len(prompts))))
    while running:
      for output in engine.step():
        now = time.perf_counter()
        if output.request_id in last: pauses.append(now - last[output.request_id])
        last[output.request_id] = now
        if output.finished: running.discard(output.request_id)
    return time.perf_counter() - started, sorted(pauses)

  def seconds(count: int, length: int, output: int, rounds: int = 3) -> float:
    return statistics.median(run([length] * count, [output] * count)[0] for _ in range(rounds))

  name = f"{args.engine} {args.shape} {args.quantization or ''}"
  for count in (1, 32):
    seconds(count, 512, 1, 1)
    print(f"{name}: {count} x 512 prompt tokens: {count * 512 / seconds(count, 512, 1, 5):.0f} tokens/s", flush=True)
  for count in args.running:
    seconds(count, 128, 8, 1)
    rate = 64 * count / (seconds(count, 128, 97) - seconds(count, 128, 33))
    print(f"{name}: {count} running: {rate:.0f} tokens/s", flush=True)
  if not args.mixed: return
  rng = random.Random(1)
  lengths = [max(8, min(2000, int(rng.lognormvariate(5.3, 0.9)))) for _ in range(256)]
  outputs = [max(8, min(600, int(rng.lognormvariate(4.8, 0.8)))) for _ in range(256)]
  run(lengths[:64], outputs[:64])
  total, pauses = run(lengths, outputs)
  print(f"{name}: mixed load of {sum(lengths)} + {sum(outputs)} tokens: {total:.2f} s, pauses: median "
        f"{1e3 * statistics.median(pauses):.1f} ms, 99% {1e3 * pauses[int(len(pauses) * 0.99)]:.1f} ms, "
        f"longest {1e3 * pauses[-1]:.1f} ms", flush=True)


if __name__ == "__main__": main()
