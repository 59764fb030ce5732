"""Beam search outside the engine, with vLLM's names. Each step calls `LLM.generate` for one token per beam, then keeps
the beams with the largest sums of log probabilities; the prefix cache avoids recomputation."""
from dataclasses import MISSING, dataclass, field
from typing import NamedTuple

from tinyvllm.config import Options, check, option
from tinyvllm.engine import Engine, Prompt, RequestOutput
from tinyvllm_extra.options import check_no_lora

from .params import Logprob, SamplingParams


@dataclass(frozen=True)
class BeamSearchParams(Options):
  """Beam search parameters, under vLLM's names. Raises InputError for values out of range or unsupported."""
  # At most half of the maximum `logprobs`, because each beam requests twice as many
  beam_width: int = option(MISSING, "number of beams", min=1, max=10)
  max_tokens: int = option(MISSING, "maximum tokens to generate", min=1, max=2**31 - 1)
  ignore_eos: bool = option(False, "continue after the model's end token")
  temperature: float = option(0.0, "must be 0: beams are ranked by the model's own probabilities")
  length_penalty: float = option(1.0, "above 0: prefer long sequences", min=-10, max=10)
  include_stop_str_in_output: bool = option(False, "must be False: an end token is in `tokens`, but not in `text`")

  def __post_init__(self) -> None:
    super().__post_init__()
    for name in ("temperature", "include_stop_str_in_output"):
      value = getattr(self, name)
      check(not value, f"{name}={value!r} is not supported by beam search: use {type(value)()!r}", value)


@dataclass
class BeamSearchSequence:
  """A beam: the tokens of the prompt and its continuation, and the continuation's sum of log probabilities."""
  tokens: list[int]
  logprobs: list[dict[int, Logprob]] = field(default_factory=list)   # the best tokens at each position after the prompt
  cum_logprob: float = 0.0
  finish_reason: str | None = None                  # "stop": an end token; "length": max_tokens or max_model_len
  text: str | None = None                           # text of all tokens, set at the end of the search


# Best first, at most beam_width
BeamSearchOutput = NamedTuple("BeamSearchOutput", [("sequences", list[BeamSearchSequence])])


class Search:
  """The search for one prompt: its unfinished beams, best first, and its finished beams."""
  def __init__(self, llm: Engine, params: BeamSearchParams):
    self.llm = llm
    self.params = params
    self.beams = [BeamSearchSequence([])]           # the first output provides the prompt's token ids
    self.finished = list[BeamSearchSequence]()

  def advance(self, outputs: list[RequestOutput]) -> None:
    """Extend each beam by its best tokens. outputs: one per beam."""
    longer = [BeamSearchSequence([*out.prompt_token_ids, token], [*beam.logprobs, best], beam.cum_logprob + x.logprob)
              for beam, out in zip(self.beams, outputs, strict=True)
              for best in out.outputs[0].logprobs or () for token, x in best.items()]
    for beam in longer: beam.finish_reason = self.finish_reason(beam)
    self.finished += [beam for beam in longer if beam.finish_reason]
    unfinished = [beam for beam in longer if not beam.finish_reason]
    self.beams = sorted(unfinished, key=lambda beam: -beam.cum_logprob)[:self.params.beam_width]

  def finish_reason(self, beam: BeamSearchSequence) -> str | None:
    if beam.tokens[-1] in self.llm.model_config.eos_token_ids and not self.params.ignore_eos: return "stop"
    full = len(beam.logprobs) == self.params.max_tokens or len(beam.tokens) == self.llm.max_model_len
    return "length" if full else None

  def output(self) -> BeamSearchOutput:
    """Return the beams with the best log probabilities, normalized by the length without the prompt."""
    def score(beam: BeamSearchSequence) -> float:
      return beam.cum_logprob / len(beam.logprobs)**self.params.length_penalty
    best = sorted(self.finished, key=score, reverse=True)[:self.params.beam_width]
    for beam in best: beam.text = self.llm.tokenizer.decode(beam.tokens)
    return BeamSearchOutput(best)


def beam_search(llm: Engine, prompts: Prompt | list[Prompt] | list[str], params: BeamSearchParams,
                lora_request: None = None, use_tqdm: bool = False, concurrency_limit: int | None = None
                ) -> list[BeamSearchOutput]:
  """Return the most probable continuations of each prompt, in the order of the prompts. prompts: see `LLM.generate`.
  concurrency_limit has no effect: the engine queues the beams. Raises InputError before any prompt runs if one is
  invalid."""
  check_no_lora(lora_request)
  check(isinstance(params, BeamSearchParams), f"params={params!r} must be BeamSearchParams(...)")
  jobs: list[Prompt] = [*prompts] if isinstance(prompts, list | tuple) else [prompts]
  # Up to half of the best tokens may be end tokens
  step = SamplingParams(temperature=0.0, max_tokens=1, logprobs=min(2 * params.beam_width, llm.model_config.vocab_size))
  searches = [Search(llm, params) for _ in jobs]
  while jobs:
    outputs = iter(llm.generate(jobs, step, use_tqdm))
    for search in searches: search.advance([next(outputs) for _ in search.beams])
    jobs = [{"prompt_token_ids": beam.tokens} for search in searches for beam in search.beams]
  return [search.output() for search in searches]
