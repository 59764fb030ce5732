"""Embeddings in OpenAI's format, and scores in the formats of vLLM, Jina and Cohere. A long list runs in waves of
max_num_seqs prompts, so that it does not fill the queue."""
import asyncio, base64, time, uuid
from collections.abc import Callable
from typing import Any, Literal

import orjson
from fastapi.responses import Response

from tinyvllm import RequestOutput
from tinyvllm.config import check, check_ids
from tinyvllm_extra.pooling import INSTRUCTION, Jobs, PoolingParams, PoolingRequestOutput, pairs, result_of, scoring

from .errors import Refusal
from .fields import Int
from .protocol import body_model
from .serving import Serving

MAX_INPUTS = 2048   # maximum texts in a request, as in OpenAI's API
COMMON = {"model": str, "user": str, "priority": Int}
Document = body_model("Document", text=(str, ...))
EmbeddingRequest: Any = body_model("EmbeddingRequest", **COMMON, dimensions=Int, normalize=bool,
                                   encoding_format=Literal["float", "base64"],
                                   input=(str | list[str] | list[int] | list[list[int]], ...))
RerankRequest: Any = body_model("RerankRequest", **COMMON, query=(str, ...), top_n=Int, return_documents=bool,
                                documents=(list[str | Document], ...), instruction=str)   # type: ignore[valid-type]
ScoreRequest: Any = body_model("ScoreRequest", **COMMON, text_1=(str | list[str], ...), text_2=(str | list[str], ...),
                               instruction=str)


def json_response(content: dict[str, Any]) -> Response:
  return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


def usage_of(outputs: list[Any]) -> dict[str, int]:
  total = sum(len(output.prompt_token_ids) for output in outputs)
  return {"prompt_tokens": total, "completion_tokens": 0, "total_tokens": total}


def check_number(name: str, texts: Any) -> None:
  number = 1 if isinstance(texts, str) else len(texts)
  check(0 < number <= MAX_INPUTS, f"{name}: {number} texts must be 1 to {MAX_INPUTS}: send more in further requests")


class Pooling:
  """The routes of embeddings and scores."""
  def __init__(self, serving: Serving): self.serving = serving

  def routes(self) -> dict[str, Callable[..., Any]]:
    return {"/v1/embeddings": self.embeddings, **dict.fromkeys(["/rerank", "/v1/rerank", "/v2/rerank"], self.rerank),
            **dict.fromkeys(["/score", "/v1/score"], self.score)}

  async def embeddings(self, body: EmbeddingRequest) -> Response:
    head = self.head("embd", body)
    is_one = isinstance(body.input, str) or isinstance((body.input or [None])[0], int)
    texts = [body.input] if is_one else body.input
    check_number("input", texts)
    check(all(texts), "input: each text must have at least one token")
    for x in texts: check_ids("input", x if isinstance(x, list) else None, self.serving.llm.llm.model_config.vocab_size)
    params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize is not False)
    jobs = [({"prompt_token_ids": x} if isinstance(x, list) else x, params) for x in texts]
    outputs = await self.run(head["id"], jobs, body.priority)

    def response() -> Response:
      rows: list[Any] = [*map(result_of, outputs)]
      if body.encoding_format == "base64": rows = [base64.b64encode(x.astype("<f4")).decode() for x in rows]
      data = [{"object": "embedding", "index": i, "embedding": x} for i, x in enumerate(rows)]
      return json_response({**head, "object": "list", "data": data, "usage": usage_of(outputs)})
    return await asyncio.to_thread(response)

  async def rerank(self, body: RerankRequest) -> Response:
    head = self.head("rerank", body)
    check(body.top_n is None or body.top_n >= 0, f"top_n={body.top_n} must be at least 1, or 0 for all documents")
    texts = [x if isinstance(x, str) else x.text for x in body.documents]
    outputs = await self.scores(head["id"], body, ("query", "documents"), body.query, texts)
    results = [{"index": i, "relevance_score": x.outputs.score,
                **({} if body.return_documents is False else {"document": {"text": texts[i]}})}
               for i, x in enumerate(outputs)]
    best = sorted(results, key=lambda result: -result["relevance_score"])[:body.top_n or None]
    return json_response({**head, "results": best, "usage": usage_of(outputs)})

  async def score(self, body: ScoreRequest) -> Response:
    head = self.head("score", body)
    outputs = await self.scores(head["id"], body, ("text_1", "text_2"), body.text_1, body.text_2)
    data = [{"index": i, "object": "score", "score": x.outputs.score} for i, x in enumerate(outputs)]
    return json_response({**head, "object": "list", "data": data, "usage": usage_of(outputs)})

  def head(self, kind: str, body: Any) -> dict[str, Any]:
    self.serving.check_model(body.model)
    return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.serving.names[0]}

  async def scores(self, request_id: str, body: Any, names: tuple[str, str], *texts: Any) -> list[PoolingRequestOutput]:
    for name, x in zip(names, texts, strict=True): check_number(name, x)
    scores = scoring(self.serving.llm.llm.tokenizer, pairs(*texts, *names), body.instruction or INSTRUCTION)
    outputs: Any = None
    try:
      while True: outputs = await self.run(request_id, scores.send(outputs), body.priority)
    except StopIteration as end: return end.value

  async def run(self, request_id: str, jobs: Jobs, priority: int | None) -> list[RequestOutput]:
    """Run all jobs and return their outputs. Raises InputError, before any job runs, if one of them is invalid."""
    serving = self.serving
    engine = serving.llm.llm
    def make() -> list[Any]:
      return [engine.make_request(f"{request_id}-{i}", *job, priority or 0) for i, job in enumerate(jobs)]
    requests = await asyncio.to_thread(make)
    size = engine.config.max_num_seqs
    serving.check_queue(min(size, len(requests)), 1)
    for start in range(0, len(requests), size):
      async for _ in serving.steps(requests[start:start + size]): pass
      if any(seq.finish_reason == "abort" for request in requests for seq in request.sequences):
        raise Refusal(503, "the request was aborted by --request-timeout or the shutdown of the server: retry later")
    return [request.output() for request in requests]
