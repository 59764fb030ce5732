"""Beam search as vLLM has it, beside the engine. Each step asks `LLM.generate` for one token of every beam, and goes on
with the beams whose log probabilities add up to most; what a beam has computed before, the prefix cache finds.

python examples/beam_search.py [MODEL]"""
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

from tinyvllm import LLM, Logprob, RequestOutput, SamplingParams
from tinyvllm.config import Options, check


@dataclass(frozen=True)
class BeamSearchParams(Options):
  """How wide and how far to search, with vLLM's names. Raises ValueError for what is out of range or not supported."""
  beam_width: Annotated[int, 1, 10]                 # each beam asks for twice as many log probabilities, and 20 is most
  max_tokens: Annotated[int, 1, 2**31 - 1]          # tokens to generate at most
  ignore_eos: bool = False                          # go on after the model's end token
  temperature: float | int = 0.0                    # 0 alone: the model's own probabilities decide
  length_penalty: Annotated[float | int, -10, 10] = 1.0   # above 0: long texts gain
  include_stop_str_in_output: bool = False          # False alone: an end token is in `tokens`, and not in `text`

  def __post_init__(self) -> None:
    super().__post_init__()
    for name in ("temperature", "include_stop_str_in_output"):
      value = getattr(self, name)
      check(not value, f"{name}={value!r} is not supported by beam search: leave it at {type(value)()!r}")


@dataclass
class BeamSearchSequence:
  """A beam: a prompt's tokens and those behind it, and what the log probabilities of these add up to."""
  tokens: list[int]
  logprobs: list[dict[int, Logprob]] = field(default_factory=list)   # the best ones at each place behind the prompt
  cum_logprob: float = 0.0
  finish_reason: str | None = None                  # "stop": by an end token; "length": max_tokens or max_model_len
  text: str | None = None                           # of all tokens, once the search is over


@dataclass
class BeamSearchOutput:
  sequences: list[BeamSearchSequence]               # best first, at most beam_width


class Search:
  """The search behind one prompt: the beams that go on, the best first, and all that have ended."""
  def __init__(self, llm: LLM, params: BeamSearchParams):
    self.llm = llm
    self.params = params
    self.beams = [BeamSearchSequence([])]           # its prompt's ids come with the first output
    self.ended = list[BeamSearchSequence]()

  def advance(self, outputs: list[RequestOutput]) -> None:
    """Try the best tokens behind each beam. outputs: one for each beam."""
    longer = []
    for beam, output in zip(self.beams, outputs, strict=True):
      best = output.outputs[0].logprobs[0]          # type: ignore[index]
      for token, logprob in best.items():
        tokens = [*output.prompt_token_ids, token]
        longer.append(BeamSearchSequence(tokens, [*beam.logprobs, best], beam.cum_logprob + logprob.logprob))
    for beam in longer: beam.finish_reason = self.finish_reason(beam)
    self.ended += [beam for beam in longer if beam.finish_reason]
    going = [beam for beam in longer if not beam.finish_reason]
    self.beams = sorted(going, key=lambda beam: -beam.cum_logprob)[:self.params.beam_width]

  def finish_reason(self, beam: BeamSearchSequence) -> str | None:
    if beam.tokens[-1] in self.llm.model_config.eos_token_ids and not self.params.ignore_eos: return "stop"
    full = len(beam.logprobs) == self.params.max_tokens or len(beam.tokens) == self.llm.max_model_len
    return "length" if full else None

  def score(self, beam: BeamSearchSequence) -> float:
    """By what texts of different lengths are compared. The prompt's tokens do not count."""
    return beam.cum_logprob / len(beam.logprobs)**self.params.length_penalty

  def output(self) -> BeamSearchOutput:
    best = sorted(self.ended, key=self.score, reverse=True)[:self.params.beam_width]
    for beam in best: beam.text = self.llm.tokenizer.decode(beam.tokens)
    return BeamSearchOutput(best)


def beam_search(llm: LLM, prompts: Any, params: BeamSearchParams) -> list[BeamSearchOutput]:
  """Search for the likeliest texts behind prompts, which are what `LLM.generate` takes; outputs come in their order.
  Raises ValueError, and runs none, if any prompt is bad."""
  jobs = prompts if isinstance(prompts, list) else [prompts]
  most = min(2 * params.beam_width, llm.model_config.vocab_size)   # half of them may be end tokens
  step = SamplingParams(temperature=0.0, max_tokens=1, logprobs=most)
  searches = [Search(llm, params) for _ in jobs]
  while jobs:
    outputs = iter(llm.generate(jobs, step, use_tqdm=False))
    for search in searches: search.advance([next(outputs) for _ in search.beams])
    jobs = [{"prompt_token_ids": beam.tokens} for search in searches for beam in search.beams]
  return [search.output() for search in searches]


def main() -> None:
  llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
  for output in beam_search(llm, ["The cat", "Once upon a time"], BeamSearchParams(beam_width=3, max_tokens=12)):
    for sequence in output.sequences:
      print(f"{sequence.cum_logprob:8.3f} {sequence.finish_reason:7} {sequence.text!r}")


if __name__ == "__main__": main()
