"""Measure the perplexity of a text with each quantization and KV cache type, from prompt_logprobs.

python tests/benchmarks/perplexity.py --model DIR [--other DIR|FILE.gguf ...] [--text FILE]

Prints perplexity, and its ratio to the first row's, for: the model unchanged, with an int8 or fp8 KV cache, quantized
to int8 and int4 while loading, and each --other model (for example a conversion of the same one); then for the
quantized ones with activations in float. The text is split into windows of 512 tokens; the first 32 tokens of each are
skipped, because they have little context."""
import argparse
import math
from pathlib import Path

from tinyvllm import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "examples" / "default_model_text.txt"
WINDOW, SKIPPED = 512, 32


def perplexity(text: str, limit: int, model: str, **options: str) -> float:
  llm = LLM(model, max_model_len=WINDOW + 8, max_num_seqs=8, enable_prefix_caching=False, **options)
  ids = llm.get_tokenizer().encode(text)[:limit]
  windows = [ids[i:i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
  outputs = llm.generate([{"prompt_token_ids": window} for window in windows],
                         SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
  logprobs = [position[i].logprob for window, output in zip(windows, outputs, strict=True)
              for i, position in list(zip(window, output.prompt_logprobs, strict=True))[SKIPPED:]]
  return math.exp(-sum(logprobs) / len(logprobs))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", required=True, metavar="DIR", help="model folder")
  parser.add_argument("--other", nargs="+", default=[], help="more model folders or GGUF files")
  parser.add_argument("--text", type=Path, default=TEXT, help="text file (default: examples/default_model_text.txt)")
  parser.add_argument("--tokens", type=int, default=8192, help="maximum tokens of the text (default: 8192)")
  args = parser.parse_args()
  text = args.text.read_text()
  caches = [(f"KV cache {kind}", args.model, {"kv_cache_dtype": kind}) for kind in ("int8", "fp8")]
  models = [("int8", args.model, {"quantization": "int8"}), ("int4", args.model, {"quantization": "int4"}),
            *((Path(x).name, x, {}) for x in args.other)]
  rows = [("unchanged", args.model, {}), *caches, *models,
          *((f"{name}, float x", x, {**options, "activation_quantization": "none"}) for name, x, options in models)]
  first = None
  print(f"{'model':24} {'perplexity':>10} {'ratio':>8}")
  for name, model, options in rows:
    value = perplexity(text, args.tokens, model, **options)
    first = first or value
    print(f"{name:24} {value:10.3f} {value / first:8.4f}", flush=True)


if __name__ == "__main__": main()
