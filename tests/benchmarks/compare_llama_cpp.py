"""Compare decode and prefill speed with llama.cpp on a CPU, in one run. Needs `pip install llama-cpp-python`.

python tests/benchmarks/compare_llama_cpp.py --model DIR --gguf FILE [--rounds 3]

DIR and FILE are the same model. llama.cpp requantizes FILE to F16, Q8_0 and Q4_0, which are compared with tinyvllm's
float16, int8 and int4. Prints decode tokens/s of one stream and of eight streams, prefill tokens/s of a prompt of 512
tokens (each the best of all rounds) of tinyvllm and of llama.cpp's plain and repacked weights, the ratio of tinyvllm to
the faster of them, and the load average. All use all cores and greedy sampling, which for llama.cpp is numpy's argmax.
Each type runs in a process of its own."""
import argparse
import ctypes
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import llama_cpp as lib
import numpy as np

from tinyvllm import LLM, SamplingParams

STREAMS, NEW, PROMPT = 8, 48, 512
KINDS = {"float16": (lib.LLAMA_FTYPE_MOSTLY_F16, None), "int8": (lib.LLAMA_FTYPE_MOSTLY_Q8_0, "int8"),
         "int4": (lib.LLAMA_FTYPE_MOSTLY_Q4_0, "int4")}


def tinyvllm_timer(folder: Path, quantization: str | None) -> Callable[[int, int, int], float]:
  llm = LLM(folder, quantization=quantization, max_model_len=1024, max_num_seqs=STREAMS, max_num_batched_tokens=512,
            enable_prefix_caching=False)

  def seconds(streams: int, prompt: int, new: int) -> float:
    prompts = [{"prompt_token_ids": [5 + (7 * i + s) % 400 for i in range(prompt)]} for s in range(streams)]
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started
  return seconds


def llama_cpp_timer(path: Path, repack: bool) -> Callable[[int, int, int], float]:
  cores = os.cpu_count() or 1
  quiet = lib.llama_log_callback(lambda *args: None)
  lib.llama_log_set(quiet, None)
  model_params = lib.llama_model_default_params()
  model_params.use_extra_bufts = repack
  model = lib.llama_model_load_from_file(str(path).encode(), model_params)
  params = lib.llama_context_default_params()
  params.n_ctx, params.n_batch, params.n_seq_max = 1024 * STREAMS, 512, STREAMS
  params.n_threads = params.n_threads_batch = cores
  context = lib.llama_init_from_model(model, params)
  size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

  def decode(rows: list[tuple[int, int, int, bool]]) -> None:   # token id, position, sequence, needs logits
    batch = lib.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (token, position, sequence, needs_logits) in enumerate(rows):
      batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, needs_logits
      batch.seq_id[i][0] = sequence
    assert lib.llama_decode(context, batch) == 0
    lib.llama_batch_free(batch)

  def argmax(row: int) -> int:
    return int(np.ctypeslib.as_array(ctypes.cast(lib.llama_get_logits_ith(context, row),
                                                 ctypes.POINTER(ctypes.c_float)), (size,)).argmax())

  def seconds(streams: int, prompt: int, new: int) -> float:
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    started = time.perf_counter()
    tokens = []
    for s in range(streams):
      decode([(5 + (7 * i + s) % 400, i, s, i == prompt - 1) for i in range(prompt)])
      tokens.append(argmax(prompt - 1))
    for step in range(1, new):
      decode([(token, prompt + step - 1, s, True) for s, token in enumerate(tokens)])
      tokens = [argmax(s) for s in range(streams)]
    return time.perf_counter() - started
  seconds.log_callback = quiet   # type: ignore[attr-defined]   # llama.cpp keeps a pointer to it
  return seconds


def compare(name: str, args: argparse.Namespace) -> None:
  """Print the rates of one kind, in this process: after the first kind, llama.cpp's next model would crash."""
  kind, quantization = KINDS[name]
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / f"{name}.gguf"
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = kind, True
    assert lib.llama_model_quantize(str(args.gguf).encode(), str(path).encode(), ctypes.byref(params)) == 0
    sides = {"tinyvllm": tinyvllm_timer(args.model, quantization), "llama.cpp": llama_cpp_timer(path, False),
             "repacked": llama_cpp_timer(path, True)}
    rates: dict[str, list[list[float]]] = {side: [] for side in sides}
    for i in range(args.rounds + 1):
      for side, seconds in sides.items():
        short, one, eight = seconds(1, 16, 2), seconds(1, 16, 2 + NEW), seconds(STREAMS, 16, 2 + NEW)
        eight_short, prompt = seconds(STREAMS, 16, 2), seconds(1, PROMPT, 1)
        row = [NEW / (one - short), STREAMS * NEW / (eight - eight_short), PROMPT / prompt]
        if i: rates[side].append(row)   # the first round captures graphs
  best = {side: np.max(rows, axis=0) for side, rows in rates.items()}
  ratios = best["tinyvllm"] / np.maximum(best["llama.cpp"], best["repacked"])
  for side, row in best.items(): print(f"{name:8} {side:9}", *(f"{x:12.1f}" for x in row))
  print(f"{name:8} {'ratio':9}", *(f"{x:12.2f}" for x in ratios), f"  load {os.getloadavg()[0]:.1f}", flush=True)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="model folder for tinyvllm")
  parser.add_argument("--gguf", type=Path, required=True, metavar="FILE",
                      help="the same model as a GGUF file for llama.cpp")
  parser.add_argument("--rounds", type=int, default=3, help="timed rounds; the best counts (default: 3)")
  parser.add_argument("--kinds", nargs="+", default=[*KINDS], help=f"types to compare (default: {' '.join(KINDS)})")
  args = parser.parse_args()
  print(f"{'tokens/s':8} {'':9} {'1 stream':>12} {'8 streams':>12} {'prefill':>12}", flush=True)
  for name in args.kinds:
    process = multiprocessing.get_context("spawn").Process(target=compare, args=(name, args))
    process.start()
    process.join()
    assert process.exitcode == 0, f"{name}: the process ended with {process.exitcode}"


if __name__ == "__main__": main()
