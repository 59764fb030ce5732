"""Embeddings and relevance scores. An embedding is a request for one token that returns the hidden state it would be
sampled from; a score is a request for the log probabilities of the answers "yes" and "no"."""
import dataclasses, math, pathlib, typing
from collections.abc import Generator

import numpy as np

from tinyvllm import request
from tinyvllm.config import ModelConfig, check, logger, option
from tinyvllm.engine import Engine, Prompt, RequestOutput
from tinyvllm_extra.sampling.logits import NUM_BEST
from tinyvllm_extra.sampling.params import Logprob, SamplingParams
from tinyvllm_extra.text.huggingface import ChatTokenizer

# The prompt of Qwen3-Reranker, from its model card
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
SCORE_PROMPT = pathlib.Path(__file__).with_name("score_prompt.txt").read_text()
ANSWERS = ("yes", "no")
# Why a model refuses a request, by whether it computes embeddings
MISMATCH = ("runner: this model generates text: for embeddings load it with runner='pooling' (--runner pooling)",
            "runner: this model computes embeddings (LLM.embed, /v1/embeddings): load another one for text, or this "
            "one with runner='generate' (--runner generate)")
Jobs = list[tuple[Prompt, request.SamplingParams]]   # prompts with their parameters


@dataclasses.dataclass(frozen=True)
class PoolingParams(request.SamplingParams):
  """Parameters of an embedding, under vLLM's names, and its LogitsProcessor, which changes no logits and returns the
  embedding in place of log probabilities."""
  max_tokens: int | None = option(1, "Must be 1: the engine samples a token and ignores it", min=1, max=1)
  temperature: float = 0.0
  dimensions: int | None = option(None, "Leading dimensions to keep (default: all)", min=1, max=request.MAX_INT)
  normalize: bool = option(True, "Scale to length 1")
  logprobs = 0         # the hidden state takes their place
  detokenize = False
  depends_on_output = False

  def processor(self, tokenizer: ChatTokenizer, model: ModelConfig) -> "PoolingParams":
    size = model.hidden_size
    check((self.dimensions or 1) <= size, f"dimensions={self.dimensions} must be at most {size}, the model's size")
    return self

  def accept(self, token: int) -> bool: return False
  def bitmask(self) -> None: return None
  def adjustments(self, seq: request.Sequence, position: int) -> list: return []
  def output_logprobs(self, seq: request.Sequence, start: int) -> tuple[list[typing.Any], None]:
    if start == len(seq.tokens): return [], None   # not computed, or delivered
    x = np.array(seq.logprobs[start], np.float32)[:self.dimensions]
    return [x / max(float(np.linalg.norm(x)), 1e-12) if self.normalize else x], None


# Results, under vLLM's names. score: the probability of "yes"
EmbeddingOutput = typing.NamedTuple("EmbeddingOutput", [("embedding", list[float])])
ScoringOutput = typing.NamedTuple("ScoringOutput", [("score", float)])
PoolingRequestOutput = typing.NamedTuple("PoolingRequestOutput", [("request_id", str), ("outputs", typing.Any),
                                  ("prompt_token_ids", list[int]), ("num_cached_tokens", int), ("finished", bool)])


# An embedding is where log probabilities are, see PoolingParams.output_logprobs
def logprobs_of(output: RequestOutput) -> dict[int, Logprob]: return next(iter(output.outputs[0].logprobs or ()))
def embedding_of(output: RequestOutput) -> np.ndarray: return np.asarray(logprobs_of(output))


def pooled(output: RequestOutput, result: EmbeddingOutput | ScoringOutput) -> PoolingRequestOutput:
  return PoolingRequestOutput(output.request_id, result, output.prompt_token_ids, output.num_cached_tokens, True)


def embed(llm: Engine, prompts: Prompt | list[Prompt] | list[str], use_tqdm: bool = True,
          pooling_params: PoolingParams | None = None) -> list[PoolingRequestOutput]:
  """Return the embedding of each prompt, of length 1 by default. prompts: see `LLM.generate`. Raises InputError for a
  model that generates text: load it with runner="pooling"."""
  outputs = llm.generate(prompts, pooling_params or PoolingParams(), use_tqdm)
  return [pooled(x, EmbeddingOutput(embedding_of(x).tolist())) for x in outputs]


def score(llm: Engine, data_1: str | list[str], data_2: str | list[str], use_tqdm: bool = True,
          instruction: str = INSTRUCTION) -> list[PoolingRequestOutput]:
  """Return the probability that a document, of data_2, answers a query, of data_1: one query for all documents, or one
  for each. The model is a Qwen3-Reranker, loaded as a model that generates text."""
  def run(jobs: Jobs) -> list[RequestOutput]: return llm.generate([x for x, _ in jobs], [x for _, x in jobs], use_tqdm)
  scores = scoring(llm.tokenizer, pairs(data_1, data_2, "data_1", "data_2"), instruction)
  others = scores.send(run(next(scores)))
  return scores.send(run(others))


def pairs(queries: str | list[str], documents: str | list[str], *names: str) -> list[tuple[str, str]]:
  """Return the pairs of query and document to score. names: of the fields, for messages."""
  queries, documents = ([x] if isinstance(x, str) else x for x in (queries, documents))
  num_queries, num_documents = len(queries), len(documents)
  check(num_queries and num_documents, f"{names[0 if not queries else 1]}=[] must not be empty")
  check(num_queries in (1, num_documents), f"{names[0]} has {num_queries} texts, but {names[1]} has {num_documents}: "
        "use one query, or one for each document")
  return [*zip(queries * (num_documents // num_queries), documents, strict=True)]


def scoring(tokenizer: ChatTokenizer, texts: list[tuple[str, str]],
            instruction: str) -> Generator[typing.Any, list[RequestOutput], None]:
  """Score pairs of query and document: twice yield Jobs and receive their outputs, then yield the scores, a list of
  PoolingRequestOutput. The softmax over "yes" and "no" is exact: an answer that is not among the best tokens gets a
  second request."""
  encoded = [tokenizer.encode(answer, False) for answer in ANSWERS]
  check(all(len(x) == 1 for x in encoded), f"model: its tokenizer has no single tokens for {' and '.join(ANSWERS)}, "
        "the answers of a reranker: choose a model such as Qwen3-Reranker")
  yes, no = (x[0] for x in encoded)

  def params(num_best: int, *ids: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=[*ids], logprobs=num_best, detokenize=False)
  # A query with the model's template, as in vLLM's examples, gets no other one
  prompts = [query + document if query.startswith("<|im_start|>") else
             SCORE_PROMPT.format(instruction=instruction, query=query, document=document) for query, document in texts]
  outputs = yield [(prompt, params(NUM_BEST, yes, no)) for prompt in prompts]
  tables = [logprobs_of(x) for x in outputs]
  missing = [(i, token) for i, table in enumerate(tables) for token in (yes, no) if token not in table]
  others = yield [({"prompt_token_ids": outputs[i].prompt_token_ids}, params(0, token)) for i, token in missing]
  for (i, _), other in zip(missing, others, strict=True): tables[i] = tables[i] | logprobs_of(other)
  share = float(np.mean([math.exp(table[yes].logprob) + math.exp(table[no].logprob) for table in tables]))
  if share < 0.5: logger.warning(f"these scores mean little: the model answers {' or '.join(ANSWERS)} with probability "
                                 f"{share:.3f} only; choose a reranker such as Qwen/Qwen3-Reranker-0.6B")
  scores = [1 / (1 + math.exp(min(700.0, table[no].logprob - table[yes].logprob))) for table in tables]
  yield [pooled(x, ScoringOutput(score)) for x, score in zip(outputs, scores, strict=True)]
