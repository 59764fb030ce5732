"""Prompts of token ids and sampling parameters, as most tests need them."""
import random
from collections.abc import Iterable
from typing import Any

from tinyvllm import RequestOutput, SamplingParams


def greedy(num_tokens: int, /, **fields: Any) -> SamplingParams:
  """Return parameters for exactly `num_tokens` greedy tokens."""
  return SamplingParams(**{"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, **fields})


def sampled(num_tokens: int, /, seed: int = 0, **fields: Any) -> SamplingParams:
  """Return parameters for exactly `num_tokens` sampled tokens."""
  return greedy(num_tokens, **{"temperature": 0.9, "seed": seed, **fields})


def tokens(ids: Iterable[int]) -> dict[str, list[int]]: return {"prompt_token_ids": list(ids)}
def ids_of(output: RequestOutput) -> list[int]: return output.outputs[0].token_ids


def prompt(length: int, *salt: Any) -> list[int]:
  """Return random ids of words, different for each salt; none is 0."""
  rng = random.Random(str(salt or (0,)))
  return [rng.randrange(259, 320) for _ in range(length)]


def flags(**options: Any) -> list[str]:
  """Return options as the command line's flags: max_num_seqs=4 becomes --max-num-seqs 4."""
  return [x for name, value in options.items() for x in ("--" + name.replace("_", "-"), str(value))]
