"""Beam search outside the engine, with vLLM's names. Each step calls `LLM.generate` for one token per beam, then keeps
the beams with the largest sums of log probabilities; the prefix cache avoids recomputation."""
import dataclasses, typing
from collections.abc import Iterator

from tinyvllm.config import Options, check, option
from tinyvllm.engine import Engine, Prompt, RequestOutput
from tinyvllm_extra.options import LoRARequest, add_fields

from .params import Logprob, SamplingParams


@dataclasses.dataclass(frozen=True)
class BeamSearchParams(Options):
  """Beam search parameters, under vLLM's names. Raises InputError for values out of range or unsupported."""
  # At most half of the maximum `logprobs`, because each beam requests twice as many
  beam_width: int = option(dataclasses.MISSING, "number of beams", min=1, max=10)
  max_tokens: int = option(dataclasses.MISSING, "maximum tokens to generate", min=1, max=2**31 - 1)
  ignore_eos: bool = option(False, "continue after the model's end token")
  temperature: float = option(0.0, "must be 0: beams are ranked by the model's own probabilities")
  length_penalty: float = option(1.0, "above 0: prefer long sequences", min=-10, max=10)
  include_stop_str_in_output: bool = option(False, "must be False: an end token is in `tokens`, but not in `text`")

  def __post_init__(self) -> None:
    super().__post_init__()
    for name in ("temperature", "include_stop_str_in_output"):
      value = getattr(self, name)
      check(not value, f"{name}={value!r} is not supported by beam search: use {type(value)()!r}", value)


@dataclasses.dataclass
class BeamSearchSequence:
  """A beam: the tokens of the prompt and its continuation, and the continuation's sum of log probabilities."""
  tokens: list[int]
  logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)   # best tokens after the prompt
  cum_logprob: float = 0.0
  finish_reason: str | None = None                  # "stop": an end token; "length": max_tokens or max_model_len
  text: str | None = None                           # text of all tokens, set at the end of the search


Beams = list[BeamSearchSequence]   # a prompt's
# Best first, at most beam_width
BeamSearchOutput = typing.NamedTuple("BeamSearchOutput", [("sequences", Beams)])


def advance(beams: Beams, outputs: Iterator[RequestOutput], params: BeamSearchParams, llm: Engine) -> Beams:
  """Extend each unfinished beam of a prompt by its best tokens. Return the finished beams, then the best unfinished
  ones. outputs: one for each unfinished beam; other prompts' outputs may follow."""
  longer = [BeamSearchSequence(out.prompt_token_ids + [token], beam.logprobs + [best], beam.cum_logprob + x.logprob)
            for beam, out in zip([x for x in beams if not x.finish_reason], outputs, strict=False)
            for best in out.outputs[0].logprobs or () for token, x in best.items()]
  ends = () if params.ignore_eos else llm.model_config.eos_token_ids
  for beam in longer:
    is_full = len(beam.logprobs) == params.max_tokens or len(beam.tokens) == llm.max_model_len
    beam.finish_reason = "stop" if beam.tokens[-1] in ends else "length" if is_full else None
  longer.sort(key=lambda beam: -beam.cum_logprob)
  finished = [beam for beam in beams + longer if beam.finish_reason]
  return finished + [beam for beam in longer if not beam.finish_reason][:params.beam_width]


def beam_search(llm: Engine, prompts: Prompt | list[Prompt] | list[str], params: BeamSearchParams,
                lora_request: LoRARequest | None = None, use_tqdm: bool = False, concurrency_limit: int | None = None
                ) -> list[BeamSearchOutput]:
  """Return the most probable continuations of each prompt, in the order of the prompts. prompts: see `LLM.generate`.
  concurrency_limit has no effect: the engine queues the beams. Raises InputError before any prompt runs if one is
  invalid."""
  check(isinstance(params, BeamSearchParams), f"params={params!r} must be BeamSearchParams(...)")
  jobs: list[Prompt] = [*prompts] if isinstance(prompts, list | tuple) else [prompts]
  # Up to half of the best tokens may be end tokens
  step = SamplingParams(temperature=0.0, max_tokens=1, logprobs=min(2 * params.beam_width, llm.model_config.vocab_size))
  searches = [[BeamSearchSequence([])] for _ in jobs]   # the first output provides the prompt's token ids
  while jobs:
    outputs = iter(llm.generate([add_fields(x, lora_request=lora_request) for x in jobs], step, use_tqdm))
    searches = [advance(beams, outputs, params, llm) for beams in searches]
    jobs = [{"prompt_token_ids": beam.tokens} for beams in searches for beam in beams if not beam.finish_reason]
  # By log probability, normalized by the length without the prompt
  def rank(beam: BeamSearchSequence) -> float: return -beam.cum_logprob / len(beam.logprobs)**params.length_penalty
  results = [BeamSearchOutput(sorted(beams, key=rank)[:params.beam_width]) for beams in searches]
  for beam in [beam for result in results for beam in result.sequences]: beam.text = llm.tokenizer.decode(beam.tokens)
  return results
