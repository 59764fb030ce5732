"""Embeddings and relevance scores, from Python and over HTTP, compared with the numpy reference."""
import functools
import json
import math
import shutil
from types import SimpleNamespace
from unittest.mock import ANY

import numpy as np
import pytest
from helpers.data import read_data
from helpers.engines import ENGINE, check_invariants, tokens
from helpers.invalid_requests import check_refused, refused_requests
from helpers.models import load, tiny_model, write_safetensors
from helpers.reference import reference_logits
from helpers.commands import flags
from helpers.servers import LocalServer, checked
from helpers.tokenizers import SPECIALS, byte_level_bpe
from tokenizers import Tokenizer, processors

from tinyvllm import LLM, InputError, Logprob, PoolingParams
from tinyvllm_extra.pooling.embeddings import INSTRUCTION, SCORE_PROMPT, scoring

QWEN = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "bos_token_id": None, "eos_token_id": 0}
LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
END = SPECIALS.index("<|endoftext|>")
QUERY, DOCUMENTS = "what sat on the mat?", ["the cat sat on the mat", "hello world", "f(x) -> y", "1 + 1 = 2"]


def modules(*names):
  return [{"idx": i, "name": str(i), "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(names)]


def write_tokenizer(folder, words=("yes", "no")):
  """Write a byte-level tokenizer like Qwen3-Embedding's, which ends a text with a special token. words: its words."""
  model = byte_level_bpe(words)
  special = [("<|endoftext|>", END)]
  model.post_processor = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=special)
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
def embedder(folder): yield from checked(LocalServer(folder, *flags(**ENGINE, max_queue=2)))


RERANK = {**ENGINE, "max_model_len": 448}


@pytest.fixture(scope="module")
def reranker(text_folder): yield from checked(LocalServer(text_folder, *flags(**RERANK, max_queue=2)))


@pytest.fixture(scope="module")
def expected_score(text_folder):
  """A function that returns the reference's probability of "yes" for a query and a document."""
  tokenizer = Tokenizer.from_file(str(text_folder / "tokenizer.json"))
  def encode(text): return tokenizer.encode(text, add_special_tokens=False).ids
  @functools.cache
  def score(query, document, instruction=INSTRUCTION):
    prompt = SCORE_PROMPT.format(instruction=instruction, query=query, document=document)
    logits = reference_logits(text_folder, encode(prompt))[-1]
    assert min((logits > logits[encode(x)]).sum() for x in ("yes", "no")) >= 20, "an answer needs a second request"
    return 1 / (1 + np.exp(logits[encode("no")] - logits[encode("yes")]))[0]
  return score


def unit(x): return x / np.linalg.norm(x)
def ids_of_length(n, salt=0): return [3 + (7 * i + 5 * salt + i * i) % 300 for i in range(n)]
def vectors(outputs): return np.array([x.outputs.embedding for x in outputs])
def close(a, b): np.testing.assert_allclose(a, b, atol=2e-5, rtol=0)
def near(x): return pytest.approx(x, abs=2e-5)


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


@pytest.mark.parametrize("files, options, message", read_data("server_cases.json")["refused embedders"])
def test_unsupported_embedder_or_option_is_refused(tmp_path, folder, files, options, message):
  """The checkpoint has no lm_head."""
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
  for name, content in files.items(): (tmp_path / name).write_text(json.dumps(content))
  with pytest.raises(InputError, match=message): LLM(tmp_path, **ENGINE, **options)


def test_model_of_embeddings_generates_no_text(llm):
  with pytest.raises(InputError, match="computes embeddings.*runner='generate'"): llm.generate("a")


def test_scores_equal_reference_softmax(text_folder, expected_score):
  llm = LLM(text_folder, **RERANK)
  def scores(queries, documents): return [x.outputs.score for x in llm.score(queries, documents)]
  close(scores(QUERY, DOCUMENTS), [expected_score(QUERY, x) for x in DOCUMENTS])
  close(scores(DOCUMENTS, DOCUMENTS[::-1]), [*map(expected_score, DOCUMENTS, DOCUMENTS[::-1])])
  start, end = SCORE_PROMPT.format(instruction=INSTRUCTION, query=QUERY, document="a|b").split("a|b")
  close(scores(start, "hello world" + end), scores(QUERY, "hello world"))
  with pytest.raises(InputError, match="data_1 has 2 texts, but data_2 has 3"): llm.score(["a", "b"], ["a", "b", "c"])


# Over HTTP

def test_embeddings_of_every_input_form_equal_llm_embed(embedder, folder, llm):
  a, b = ids_of_length(20), ids_of_length(3)
  for value, prompts in (("x", ["x"]), (["x", "the cat"], ["x", "the cat"]), (a, [tokens(a)]),
                         ([a, b], [tokens(a), tokens(b)])):
    outputs, body = llm.embed(prompts), embedder.post("/v1/embeddings", {"input": value}).json()
    num = sum(len(x.prompt_token_ids) for x in outputs)
    data = [{"object": "embedding", "index": i, "embedding": near(x)} for i, x in enumerate(vectors(outputs))]
    assert body.pop("id").startswith("embd-") and body == {
      "object": "list", "created": ANY, "model": folder.name, "data": data,
      "usage": {"prompt_tokens": num, "completion_tokens": 0, "total_tokens": num}}


def test_openai_client_gets_embeddings_as_base64_by_default(embedder, llm):
  def create(text, **fields): return embedder.client().embeddings.create(model="", input=text, **fields).data
  texts = ["the cat", "hello world", "x"]
  close([x.embedding for x in create(texts)], vectors(llm.embed(texts)))
  plain = vectors(llm.embed("x", pooling_params=PoolingParams(normalize=False)))[0]
  assert np.linalg.norm(plain) > 1.5
  close(create("x", encoding_format="float", extra_body={"normalize": False})[0].embedding, plain)
  close(create("x", encoding_format="float", dimensions=4)[0].embedding, unit(plain[:4]))


@pytest.mark.parametrize("name", ["embedder", "reranker"])
def test_invalid_request_is_refused_and_its_field_named(request, name):
  for row in refused_requests(name): check_refused(request.getfixturevalue(name), *row)


def test_rerank_sorts_documents_by_score(reranker, expected_score):
  def expected(*instruction):
    scores = [expected_score(QUERY, document, *instruction) for document in DOCUMENTS]
    return [{"index": i, "relevance_score": near(scores[i])} for i in np.argsort(scores)[::-1]]
  body = {"query": QUERY, "documents": [*DOCUMENTS[:-1], {"text": DOCUMENTS[-1]}]}
  for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
    answer = reranker.post(path, body).json()
    assert answer["results"] == [{**x, "document": {"text": DOCUMENTS[x["index"]]}} for x in expected()]
    usage = answer["usage"]
    assert answer["id"].startswith("rerank-") and usage["total_tokens"] == usage["prompt_tokens"] > 500
  body |= {"top_n": 2, "return_documents": False}
  assert reranker.post("/rerank", body).json()["results"] == expected()[:2]
  other = reranker.post("/rerank", {**body, "instruction": "find nothing"}).json()["results"]
  assert other == expected("find nothing")[:2] != expected()[:2]


def test_score_routes_return_scores_in_order(reranker, expected_score):
  data = [{"index": i, "object": "score", "score": near(expected_score(QUERY, x))} for i, x in enumerate(DOCUMENTS * 5)]
  assert reranker.post("/score", {"text_1": QUERY, "text_2": DOCUMENTS * 5}).json()["data"] == data
  assert reranker.post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS[0]}).json()["data"] == data[:1]


@pytest.mark.parametrize("share,warns", [(0.98, False), (0.02, True)])
def test_scores_of_model_that_rarely_answers_yes_or_no_log_a_warning(text_folder, caplog, share, warns):
  tokenizer = LLM(text_folder, **RERANK).tokenizer
  scores = scoring(tokenizer, [("a", "b")], INSTRUCTION)
  next(scores)
  table = {tokenizer.encode(x, False)[0]: Logprob(math.log(share / 2), 1, x) for x in ("yes", "no")}
  output = SimpleNamespace(request_id="", prompt_token_ids=[], num_cached_tokens=0,
                           outputs=[SimpleNamespace(logprobs=[table])])
  assert scores.send([output]) == []
  result, = scores.send([])
  assert result.outputs.score == 0.5 and ("choose a reranker" in caplog.text) == warns


def test_tokenizer_without_answers_cannot_rerank(tmp_path, text_folder):
  model = write_tokenizer(shutil.copytree(text_folder, tmp_path / "model"), words=())
  with pytest.raises(InputError, match="no single tokens for yes and no.*Qwen3-Reranker"):
    LLM(model, **RERANK).score("a", "b")


def test_aborted_embeddings_get_503(folder):
  with LocalServer(folder, *flags(**ENGINE, request_timeout=0.001)) as server:
    response = server.post("/v1/embeddings", {"input": [f"{i} the cat " * 6 for i in range(2000)]})
    assert response.status_code == 503 and "--request-timeout" in response.json()["error"]["message"], response.text
