"""Print generated text as its tokens arrive.   python examples/streaming.py [PROMPT] [MODEL]"""
import sys

import tinyvllm


def main() -> None:
  prompt, model = (sys.argv[1:] + ["The cat", None])[:2] if len(sys.argv) != 2 else (sys.argv[1], None)
  pieces = tinyvllm.generate_stream(prompt, model=model, max_tokens=60)
  print(prompt + next(pieces, ""), end="", flush=True)   # together: until the first piece, the model logs its start
  for piece in pieces: print(piece, end="", flush=True)
  print()


if __name__ == "__main__": main()
