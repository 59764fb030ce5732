"""Compare the throughput of tinyvllm and of Hugging Face's transformers on the same prompts, in one run.

  python tests/benchmarks/compare_hf.py --shape smollm2-135m --dtype float32 --running 8 --input-len 128 --output-len 64

transformers runs `generate` on static batches of --running prompts. It uses CUDA if torch has it and DEV is not CPU,
otherwise all CPU threads. All runs are greedy with a fixed output length; the second run is timed. Weights are random.
With --same-weights (the default below 7B) tinyvllm loads the transformers model's weights from a temporary folder, and
in float32 the first differing token is printed."""
import argparse
import gc
import importlib
import os
import tempfile

import common


def on_cuda(torch) -> bool:
  """Return whether torch and tinygrad run on CUDA. Does not open tinygrad's device: its CUDA context would become
  torch's in this thread."""
  return torch.cuda.is_available() and not os.environ.get("DEV", "").startswith("CPU")


def run_hf(args, config: dict, prompts: list[list[int]], folder: str, torch, transformers) -> tuple[list, float]:
  """Return the token ids and seconds of the second run. With --same-weights, save the weights to `folder`."""
  device, dtype = "cuda" if on_cuda(torch) else "cpu", getattr(torch, args.dtype)
  torch.manual_seed(args.seed)
  with torch.device(device):
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**config), dtype=dtype).eval()
  if args.same_weights: model.save_pretrained(folder)
  length, ids = args.output_len, torch.tensor(prompts, device=device)
  static = transformers.GenerationConfig(do_sample=False, max_new_tokens=length, min_new_tokens=length,
                                         eos_token_id=None, pad_token_id=0)

  @torch.inference_mode()
  def generate() -> list[list[int]]:
    batches = [model.generate(ids[i:i + args.running], attention_mask=torch.ones_like(ids[i:i + args.running]),
                              generation_config=static) for i in range(0, len(ids), args.running)]
    return [row[args.input_len:] for batch in batches for row in batch.tolist()]

  where = f"{device}, {args.dtype}, {torch.get_num_threads()} threads" if device == "cpu" else f"{device}, {args.dtype}"
  print(f"transformers {transformers.__version__}, torch {torch.__version__} on {where}", flush=True)
  generate()   # warm-up
  return common.timed(generate)


def main() -> None:
  parser = common.make_parser(__doc__)
  parser.add_argument("--running", type=common.positive, default=8, help="maximum running sequences")
  parser.add_argument("--num-prompts", type=common.positive, help="total prompts (default: --running)")
  common.add_workload(parser, output_len=64)
  parser.add_argument("--same-weights", action=argparse.BooleanOptionalAction, help="load the transformers model's "
                      "weights in tinyvllm (default: on for shapes below 7B)")
  args = parser.parse_args()
  if args.model: parser.error("compare_hf.py does not support --model; use --shape")
  try: torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
  except ImportError as e: raise SystemExit(f"error: {e}: pip install torch transformers") from e
  if args.dtype == "auto": args.dtype = "float16" if on_cuda(torch) else "float32"
  config = common.hf_config(args)
  if args.same_weights is None: args.same_weights = args.shape not in ("llama-7b", "llama-3.1-8b") or bool(args.layers)
  transformers.logging.set_verbosity_error()
  count = args.num_prompts or args.running
  prompts = [ids["prompt_token_ids"] for ids, _ in common.make_requests(config["vocab_size"], args, count)]
  with tempfile.TemporaryDirectory() as folder:
    hf_ids, hf_seconds = run_hf(args, config, prompts, folder, torch, transformers)
    gc.collect()
    if torch.cuda.is_available(): torch.cuda.empty_cache()   # frees memory for tinygrad
    common.start(args)
    if args.same_weights: args.model, args.layers = folder, None
    try:
      with common.random_weights(common.OwnWeights): llm = common.open_llm(
        args, max_model_len=args.input_len + args.output_len, max_num_seqs=args.running)
    except ValueError as e: raise SystemExit(f"error: {e}") from e
  requests = [{"prompt_token_ids": ids} for ids in prompts]
  def generate() -> list: return llm.generate(requests, common.greedy(args.output_len), use_tqdm=False)
  generate()   # captures the graphs
  outputs, seconds = common.timed(generate)
  weights = "the same weights" if args.same_weights else "different random weights"
  print(f"{count} prompts of {args.input_len} tokens, {args.output_len} output tokens each, {args.running} running, "
        f"{weights}")
  name = "transformers generate, static batches"
  common.print_table(["library", "seconds", "output tokens/s", "tinyvllm's speed-up"], [
    [name, f"{s:.3f}", f"{count * args.output_len / s:.1f}", f"{s / seconds:.2f}x"]
    for name, s in (("tinyvllm", seconds), (name, hf_seconds))])
  if args.same_weights and args.dtype == "float32":
    difference = common.first_difference([o.outputs[0].token_ids for o in outputs], hf_ids)
    print(f"{name}: {difference and 'first difference from tinyvllm at '}{difference or 'the same tokens'}")


if __name__ == "__main__": main()
