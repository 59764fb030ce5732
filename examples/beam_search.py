"""Beam search: the three most probable continuations of two prompts.

python examples/beam_search.py [MODEL]"""
import sys

from tinyvllm import LLM, BeamSearchParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
for output in llm.beam_search(["The cat", "Once upon a time"], BeamSearchParams(beam_width=3, max_tokens=12)):
  for sequence in output.sequences:
    print(f"{sequence.cum_logprob:8.3f} {sequence.finish_reason:7} {sequence.text!r}")
