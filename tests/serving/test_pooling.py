"""Embeddings and relevance scores, from Python and over HTTP, compared with the numpy reference."""
import base64
import json
import shutil

import numpy as np
import pytest
from helpers.engines import ENGINE, check_invariants
from helpers.invalid_values import check_refused, refused_requests
from helpers.models import load, tiny_model, write_safetensors
from helpers.reference import reference_logits
from helpers.requests import flags, tokens
from helpers.servers import LocalServer, checked, error_of
from helpers.tokenizers import SPECIALS, byte_level_bpe
from tokenizers import Tokenizer, processors

from tinyvllm import LLM, InputError
from tinyvllm_extra.pooling import INSTRUCTION, SCORE_PROMPT
from tinyvllm_extra.vllm_names import PoolingParams

QWEN = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "bos_token_id": None, "eos_token_id": 0}
LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
END = SPECIALS.index("<|endoftext|>")
QUERY, DOCUMENTS = "what sat on the mat?", ["the cat sat on the mat", "hello world", "f(x) -> y", "1 + 1 = 2"]


def modules(*names):
  return [{"idx": i, "name": str(i), "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(names)]


def write_tokenizer(folder, template="$A <|endoftext|>", words=("yes", "no")):
  """Write a byte-level tokenizer like Qwen3-Embedding's, which ends a text with a special token. words: its words."""
  model = byte_level_bpe(words)
  model.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<|endoftext|>", END)])
  model.save(str(folder / "tokenizer.json"))
  names = {"add_bos_token": False, "eos_token": "<|endoftext|>", "chat_template": "{{ messages[0].content }}"}
  (folder / "tokenizer_config.json").write_text(json.dumps(names))
  return folder


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
  """A Qwen3 checkpoint that generates text."""
  return write_tokenizer(tiny_model(tmp_path_factory.mktemp("text"), tokenizer=False, **QWEN))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text_folder):
  """The same model as Qwen3-Embedding is published: tensors without "model." and lm_head; sentence-transformers."""
  folder = tmp_path_factory.mktemp("embedder")
  shutil.copytree(text_folder, folder, dirs_exist_ok=True)
  weights = {name.removeprefix("model."): x for name, x in load(text_folder)[1].items() if name != "lm_head.weight"}
  write_safetensors(folder / "model.safetensors", weights)
  (folder / "modules.json").write_text(json.dumps(modules("Transformer", "Pooling", "Normalize")))
  (folder / "1_Pooling").mkdir()
  (folder / "1_Pooling" / "config.json").write_text(json.dumps(LAST))
  return folder


@pytest.fixture(scope="module")
def hidden(tmp_path_factory, text_folder):
  """A function that returns the reference's hidden state, (E,), of the last of some tokens."""
  config, weights = load(text_folder)
  folder = tmp_path_factory.mktemp("reference")
  (folder / "config.json").write_text(json.dumps(config))
  write_safetensors(folder / "model.safetensors", {**weights, "lm_head.weight": np.eye(config["hidden_size"])})
  return lambda ids: reference_logits(folder, ids)[-1]


@pytest.fixture(scope="module")
def llm(folder): return LLM(folder, **ENGINE)


@pytest.fixture(scope="module")
def server(folder): yield from checked(LocalServer(folder, *flags(**ENGINE, max_queue=2)))


RERANK = {**ENGINE, "max_model_len": 448}


@pytest.fixture(scope="module")
def reranker(text_folder): yield from checked(LocalServer(text_folder, *flags(**RERANK, max_queue=2)))


def unit(x): return x / np.linalg.norm(x)
def ids_of_length(n, salt=0): return [3 + (7 * i + 5 * salt + i * i) % 300 for i in range(n)]
def vectors(outputs): return np.array([x.outputs.embedding for x in outputs])
def close(a, b): np.testing.assert_allclose(a, b, atol=2e-5, rtol=0)


# From Python

def test_embeddings_equal_normalized_reference_at_block_and_chunk_limits(llm, hidden):
  prompts = [ids_of_length(n, n) for n in (1, 3, 4, 5, 15, 16, 17, 33, 120)]
  outputs = llm.embed([tokens(ids) for ids in prompts])
  close(vectors(outputs), [unit(hidden(ids)) for ids in prompts])
  assert [x.prompt_token_ids for x in outputs] == prompts
  check_invariants(llm)


def test_text_ends_with_special_token_of_tokenizer(llm, hidden):
  output, = llm.embed("the cat")
  ids = llm.get_tokenizer().encode("the cat", False) + [END]
  assert output.prompt_token_ids == ids
  close(output.outputs.embedding, unit(hidden(ids)))


def test_dimensions_truncate_before_normalization(llm, hidden):
  x = hidden(ids_of_length(7))
  def embed(**params): return llm.embed(tokens(ids_of_length(7)), pooling_params=PoolingParams(**params))[0].outputs
  close(embed(dimensions=5).embedding, unit(x[:5]))
  np.testing.assert_allclose(embed(normalize=False).embedding, x, atol=1e-4)
  with pytest.raises(InputError, match="dimensions=33 must be at most 32"): embed(dimensions=33)


def test_runner_option_overrides_modules_json(folder, text_folder, llm):
  prompt = tokens(ids_of_length(9))
  for options in ({"runner": "pooling"}, {"task": "embed"}):
    close(vectors(LLM(text_folder, **ENGINE, **options).embed(prompt)), vectors(llm.embed(prompt)))


NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.mark.parametrize("files, options, message", [
  ({"modules.json": modules("Pooling", "Dense")}, {}, "Dense.*supported: Normalize, Pooling, Transformer"),
  ({"1_Pooling/config.json": {"pooling_mode_mean_tokens": True}}, {}, "pooling_mode_lasttoken must be true"),
  ({}, {"tensor_parallel_size": 2}, "tensor_parallel_size.* must be .* for an embedding model"),
  ({}, {"speculative_config": NGRAM}, "speculative_config.* must be .* for an embedding model"),
  ({}, {"runner": "generate"}, "lm_head"), ({}, {"runner": "x"}, "runner='x' must be one of auto, generate, pooling")])
def test_unsupported_embedder_or_option_is_refused(tmp_path, folder, files, options, message):
  """The checkpoint has no lm_head."""
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
  for name, content in files.items(): (tmp_path / name).write_text(json.dumps(content))
  with pytest.raises(InputError, match=message): LLM(tmp_path, **ENGINE, **options)


def test_text_and_embedding_need_matching_runner(llm, text_folder):
  with pytest.raises(InputError, match="computes embeddings.*runner='generate'"): llm.generate("a")
  with pytest.raises(InputError, match="generates text.*runner='pooling'"): LLM(text_folder, **ENGINE).embed("a")


def expected_scores(folder, encode, pairs):
  yes, no = (encode(x)[0] for x in ("yes", "no"))
  for query, document in pairs:
    ids = encode(SCORE_PROMPT.format(instruction=INSTRUCTION, query=query, document=document))
    logits = reference_logits(folder, ids)[-1]
    yield 1 / (1 + np.exp(logits[no] - logits[yes]))


def test_scores_equal_reference_softmax(text_folder):
  llm = LLM(text_folder, **RERANK)
  encode = lambda text: llm.get_tokenizer().encode(text, False)   # noqa: E731
  scores = [x.outputs.score for x in llm.score(QUERY, DOCUMENTS)]
  close(scores, [*expected_scores(text_folder, encode, [(QUERY, x) for x in DOCUMENTS])])
  yes, no = (encode(x)[0] for x in ("yes", "no"))
  logits = reference_logits(text_folder, llm.score(QUERY, DOCUMENTS)[0].prompt_token_ids)[-1]
  assert min((logits > logits[i]).sum() for i in (yes, no)) >= 20, "an answer must need a second request"
  pairs = [*zip(DOCUMENTS, reversed(DOCUMENTS), strict=True)]
  scores = [x.outputs.score for x in llm.score(*([*x] for x in zip(*pairs, strict=True)))]
  close(scores, [*expected_scores(text_folder, encode, pairs)])
  ready_made = SCORE_PROMPT.format(instruction=INSTRUCTION, query=QUERY, document="a|b").split("a|b")
  close(llm.score(ready_made[0], "hello world" + ready_made[1])[0].outputs.score,
        llm.score(QUERY, "hello world")[0].outputs.score)
  with pytest.raises(InputError, match="data_1 has 2 texts, but data_2 has 3"): llm.score(["a", "b"], ["a", "b", "c"])


# Over HTTP

def test_openai_client_gets_embeddings_as_base64_by_default(server, llm):
  texts = ["the cat", "hello world", "x"]
  client = server.client()
  result = client.embeddings.create(model=client.models.list().data[0].id, input=texts)
  outputs = llm.embed(texts)
  close([x.embedding for x in result.data], vectors(outputs))
  assert [x.index for x in result.data] == [0, 1, 2]
  count = sum(len(x.prompt_token_ids) for x in outputs)
  assert result.usage.prompt_tokens == result.usage.total_tokens == count
  one = client.embeddings.create(model=result.model, input="x", encoding_format="float", dimensions=4).data[0].embedding
  close(one, unit(np.array(outputs[2].outputs.embedding)[:4]))


def test_embedding_formats_and_inputs_agree(server, llm):
  ids = ids_of_length(20)
  expected = vectors(llm.embed(tokens(ids)))[0]
  for value, count in ((ids, 1), ([ids], 1), ([ids, ids_of_length(3)], 2)):
    body = server.post("/v1/embeddings", {"input": value, "encoding_format": "base64"}).raise_for_status().json()
    assert len(body["data"]) == count and body["object"] == "list" and body["id"].startswith("embd-")
    close(np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4"), expected)
  body = server.post("/v1/embeddings", {"input": ids, "encoding_format": "float", "normalize": False}).json()
  x = np.array(body["data"][0]["embedding"])
  assert np.linalg.norm(x) > 1.5
  close(unit(x), expected)


@pytest.mark.parametrize("path,body,status,param,words", refused_requests("embedder"), ids=str)
def test_invalid_embedding_request_is_refused(server, path, body, status, param, words):
  check_refused(server, path, body, status, param, words)


@pytest.mark.parametrize("path,body,status,param,words", refused_requests("reranker"), ids=str)
def test_invalid_rerank_request_is_refused(reranker, path, body, status, param, words):
  check_refused(reranker, path, body, status, param, words)


def test_too_long_text_to_embed_or_rerank_is_400(server, reranker):
  message = "maximum context length is 128 tokens. However, the prompt has 128"
  assert message in error_of(server.post("/v1/embeddings", {"input": [5] * 128}), 400)["message"]
  error = error_of(reranker.post("/rerank", {"query": "a", "documents": ["b " * 448]}), 400)
  assert "maximum context length is 448 tokens" in error["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_sorts_documents_by_score(reranker, text_folder, path):
  encode = Tokenizer.from_file(str(text_folder / "tokenizer.json"))
  scores = [*expected_scores(text_folder, lambda x: encode.encode(x, add_special_tokens=False).ids,
                             [(QUERY, x) for x in DOCUMENTS])]
  documents = [*DOCUMENTS[:-1], {"text": DOCUMENTS[-1]}]
  body = reranker.post(path, {"query": QUERY, "documents": documents}).raise_for_status().json()
  order = np.argsort(-np.array(scores)).tolist()
  assert [x["index"] for x in body["results"]] == order
  assert [x["document"]["text"] for x in body["results"]] == [DOCUMENTS[i] for i in order]
  close([x["relevance_score"] for x in body["results"]], [scores[i] for i in order])
  assert body["id"].startswith("rerank-") and body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] > 500
  fields = {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": False}
  assert reranker.post(path, fields).json()["results"] == [
    {k: x[k] for k in ("index", "relevance_score")} for x in body["results"][:2]]
  other = reranker.post(path, {**fields, "instruction": "find nothing"}).json()["results"]
  assert {x["relevance_score"] for x in other}.isdisjoint(x["relevance_score"] for x in body["results"])


def test_score_route_equals_rerank(reranker):
  results = reranker.post("/rerank", {"query": QUERY, "documents": DOCUMENTS * 5}).raise_for_status().json()["results"]
  expected = [x["relevance_score"] for x in sorted(results, key=lambda x: x["index"])]
  data = reranker.post("/score", {"text_1": QUERY, "text_2": DOCUMENTS * 5}).json()["data"]
  assert [x["index"] for x in data] == [*range(20)] and {x["object"] for x in data} == {"score"}
  close([x["score"] for x in data], expected)
  one = reranker.post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS[1]}).json()
  close(one["data"][0]["score"], expected[1])


def test_tokenizer_without_answers_cannot_rerank(tmp_path, text_folder):
  shutil.copytree(text_folder, tmp_path / "model")
  write_tokenizer(tmp_path / "model", words=())
  with pytest.raises(InputError, match="no single tokens for yes and no.*Qwen3-Reranker"):
    LLM(tmp_path / "model", **RERANK).score("a", "b")


def test_aborted_embeddings_get_503(folder):
  with LocalServer(folder, *flags(**ENGINE, request_timeout=0.001)) as server:
    response = server.post("/v1/embeddings", {"input": [f"{i} the cat " * 6 for i in range(2000)]})
    assert response.status_code == 503 and "--request-timeout" in response.json()["error"]["message"], response.text
