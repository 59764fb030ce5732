"""Count the tokens that each turn of a chat computes again, which are those beyond the new ones.

python tests/benchmarks/chat_turns.py --model DIR_OR_FILE [--llama-cpp] [--users 10] [--turns 10] [--tokens 8000]

Several users chat in turn. A prompt is the whole chat so far, with its generated answers of --answer tokens, and new
tokens; the last one has --tokens. Later prompts lack the first --dropped tokens of an answer, as chat templates drop a
model's reasoning. --llama-cpp: llama-cpp-python (`pip install llama-cpp-python`) as its server computes, with a cache
of states in memory (`--cache true`). Prints the means of all users."""
import argparse
import random
from collections.abc import Callable
from statistics import fmean


def tinyvllm_answer(args: argparse.Namespace) -> Callable[[list[int]], tuple[int, list[int]]]:
  from tinyvllm import LLM, SamplingParams
  llm, params = LLM(args.model), SamplingParams(temperature=0.0, max_tokens=args.answer, ignore_eos=True)

  def answer(ids: list[int]) -> tuple[int, list[int]]:
    output, = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return len(ids) - output.num_cached_tokens, output.outputs[0].token_ids
  return answer


def llama_cpp_answer(args: argparse.Namespace) -> Callable[[list[int]], tuple[int, list[int]]]:
  import llama_cpp as lib
  llm = lib.Llama(args.model, n_ctx=args.tokens + args.answer, verbose=False)
  llm.set_cache(lib.LlamaRAMCache())
  evaluate, counts = llm.eval, []   # tokens of the prompt, then 1 for each output token
  llm.eval = lambda ids: (counts.append(len(ids)), evaluate(ids))

  def answer(ids: list[int]) -> tuple[int, list[int]]:
    counts.clear()
    llm.create_completion(ids, max_tokens=args.answer, temperature=0.0)
    return counts[0], llm.input_ids[len(ids):llm.n_tokens].tolist()
  return answer


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", required=True, help="model folder or GGUF file")
  parser.add_argument("--llama-cpp", action="store_true", help="measure llama.cpp")
  for name, default in {"users": 10, "turns": 10, "tokens": 8000, "answer": 60, "dropped": 0}.items():
    parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
  args = parser.parse_args()
  answer, rng = (llama_cpp_answer if args.llama_cpp else tinyvllm_answer)(args), random.Random(0)
  chats: list[list[int]] = [[] for _ in range(args.users)]
  for turn in range(1, args.turns + 1):
    length, again = args.tokens * turn // args.turns, []
    for chat in chats:
      new = [rng.randrange(3, 100) for _ in range(length - len(chat))]
      computed, ids = answer(chat + new)
      again.append(computed - len(new))
      chat += [*new, *ids[args.dropped:]]
    print(f"turn {turn:2}: {length:5} tokens, {len(new)} of them new, {fmean(again):6.1f} computed again, "
          f"{fmean(again) / length:.1%}", flush=True)


if __name__ == "__main__": main()
