"""What rounding costs: the perplexity of a text, by prompt_logprobs.

python tests/benchmarks/perplexity.py --model DIR [--other DIR|FILE.gguf ...] [--text FILE]

Prints one row each: the model as it is, with a KV cache of 8 bits, made int8 and int4 while loading, and others (a
conversion of the same model, say), and each one's perplexity over the first's. The text, by default
examples/default_model_text.txt, is cut into windows of 512 tokens; the first 32 of each are not counted, as little is
known there."""
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
  found = [of[i].logprob for window, output in zip(windows, outputs, strict=True)
           for i, of in list(zip(window, output.prompt_logprobs, strict=True))[SKIPPED:]]
  return math.exp(-sum(found) / len(found))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", required=True)
  parser.add_argument("--other", nargs="+", default=[])
  parser.add_argument("--text", type=Path, default=TEXT)
  parser.add_argument("--tokens", type=int, default=8192)
  args = parser.parse_args()
  text = args.text.read_text()
  caches = [(f"KV cache {kind}", args.model, {"kv_cache_dtype": kind}) for kind in ("int8", "fp8")]
  rows = [("as it is", args.model, {}), *caches, ("int8", args.model, {"quantization": "int8"}),
          ("int4", args.model, {"quantization": "int4"}), *((Path(x).name, x, {}) for x in args.other)]
  first = None
  for name, model, options in rows:
    found = perplexity(text, args.tokens, model, **options)
    first = first or found
    print(f"{name:24} {found:8.3f} {found / first:8.4f}", flush=True)


if __name__ == "__main__": main()
