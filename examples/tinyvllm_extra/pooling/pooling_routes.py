"""Embeddings in OpenAI's format, and scores in the formats of vLLM, Jina and Cohere."""
import asyncio, base64, time, uuid
from typing import Literal

import numpy as np, orjson
from fastapi.responses import Response

from tinyvllm import RequestOutput
from tinyvllm.config import JsonObject, check, check_ids
from tinyvllm_extra.serving import answers, errors
from tinyvllm_extra.serving.generation import Serving, add_fields
from tinyvllm_extra.serving.protocol import Body, Int, Prompts, with_fields

from .embeddings import INSTRUCTION, Jobs, PoolingParams, PoolingRequestOutput, embedding_of, pairs, scoring

MAX_INPUTS = 2048   # maximum inputs per request, as in OpenAI's API
COMMON = {"model": str, "user": str, "priority": Int, "cache_salt": str}
Texts = str | list[str]


class Document(Body): text: str


@with_fields(**COMMON, input=(Prompts, ...), encoding_format=Literal["float", "base64"], dimensions=Int, normalize=bool)
class EmbeddingRequest(Body): ...


@with_fields(**COMMON, query=(str, ...), top_n=Int, return_documents=bool, documents=(list[str | Document], ...),
             instruction=str)
class RerankRequest(Body): ...


@with_fields(**COMMON, text_1=(Texts, ...), text_2=(Texts, ...), instruction=str)
class ScoreRequest(Body): ...


def check_number(name: str, texts: Texts) -> None:
  num = 1 if isinstance(texts, str) else len(texts)
  check(0 < num <= MAX_INPUTS, f"{name}: its length, {num}, must be between 1 and {MAX_INPUTS}: send several requests")


class PoolingServing(Serving):
  """A server's routes, also for embeddings and scores."""
  async def embeddings(self, body: EmbeddingRequest) -> Response:
    texts = body.input
    check_number("input", texts)
    check(all(texts), "input: each text must have at least one token")
    for x in texts: check_ids(self.engine.model_config.vocab_size, input=x if isinstance(x, list) else None)
    params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize is not False)
    outputs = await self.run(body, [({"prompt_token_ids": x} if isinstance(x, list) else x, params) for x in texts])

    def response() -> Response:
      rows: list[object] = [embedding_of(x) for x in outputs]
      if body.encoding_format == "base64": rows = [base64.b64encode(np.asarray(x, "<f4").data).decode() for x in rows]
      data = [{"object": "embedding", "index": i, "embedding": x} for i, x in enumerate(rows)]
      content = {**self.head("embd", outputs), "object": "list", "data": data}
      return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")
    return await asyncio.to_thread(response)

  async def rerank(self, body: RerankRequest) -> JsonObject:
    check(body.top_n is None or body.top_n >= 0, f"top_n={body.top_n} must be at least 1, or 0 for all documents")
    texts = [x if isinstance(x, str) else x.text for x in body.documents]
    outputs = await self.scores(body, ("query", "documents"), body.query, texts)
    best = sorted(range(len(texts)), key=lambda i: -outputs[i].outputs.score)[:body.top_n or None]
    results: list[JsonObject] = [{"index": i, "relevance_score": outputs[i].outputs.score} for i in best]
    if body.return_documents is not False: results = [{**x, "document": {"text": texts[x["index"]]}} for x in results]
    return {**self.head("rerank", outputs), "results": results}

  async def score(self, body: ScoreRequest) -> JsonObject:
    outputs = await self.scores(body, ("text_1", "text_2"), body.text_1, body.text_2)
    data = [{"index": i, "object": "score", "score": x.outputs.score} for i, x in enumerate(outputs)]
    return {**self.head("score", outputs), "object": "list", "data": data}

  def head(self, prefix: str, outputs: list[RequestOutput] | list[PoolingRequestOutput]) -> JsonObject:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.names[0],
            "usage": answers.usage_of(sum(len(output.prompt_token_ids) for output in outputs), 0)}

  async def scores(self, body: Body, names: tuple[str, str], *texts: Texts) -> list[PoolingRequestOutput]:
    for name, x in zip(names, texts, strict=True): check_number(name, x)
    scores = scoring(self.engine.tokenizer, pairs(texts[0], texts[1], *names), body.instruction or INSTRUCTION)
    others = scores.send(await self.run(body, next(scores)))
    return scores.send(await self.run(body, others))

  async def run(self, body: Body, jobs: Jobs) -> list[RequestOutput]:
    """Run all jobs, max_num_seqs at a time so that they do not fill the queue. Raises InputError, before any job runs,
    if one of them is invalid."""
    check(not self.check_model(body.model), f"model={body.model!r} is an adapter: use {self.names[0]!r}")
    requests = await asyncio.to_thread(lambda: [self.engine.make_request(
      uuid.uuid4().hex, add_fields(x, cache_salt=body.cache_salt), params, body.priority or 0) for x, params in jobs])
    size = self.engine.config.max_num_seqs
    self.check_queue(min(size, len(requests)), 1)
    for start in range(0, len(requests), size):
      wave = requests[start:start + size]
      async for _ in self.steps(wave): pass
      if any(request.sequences[0].finish_reason == "abort" for request in wave):
        raise errors.Refusal(503, "the request was aborted by --request-timeout or the server's shutdown: retry later")
    return [request.output() for request in requests]
