"""Stop conditions of LLM.generate and LLM.generate_stream: the exact character and token at which output ends. The
model follows scripts: its tokens are the pieces of the scripts, and the greedy next token is the next piece."""
import json

import numpy as np
import pytest
from helpers.data import read_data
from helpers.models import random_weights, tiny_config, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models

from tinyvllm import LLM, SamplingParams

EOS = "</s>"
# The first piece is the prompt. EOS ends a script; "…" repeats the piece before it. A piece is text or a byte (<0xC3>).
# Scripts share no tokens, except the byte tokens of "long".
DATA = read_data("stop_strings.json")
SCRIPTS = DATA["scripts"]


def token(name, i):
  """Return the vocabulary entry of the script's piece `i`."""
  piece = SCRIPTS[name][i]
  return piece if name == "long" and piece.startswith("<0x") else f"{name}:{i}#{piece}"


SCRIPTED = [token(name, i) for name, pieces in SCRIPTS.items() for i in range(len(pieces))]
VOCAB = list(dict.fromkeys([EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *SCRIPTED]))
IDS = {text: i for i, text in enumerate(VOCAB)}
SIZE = -(-len(VOCAB) // 8) * 8


def id_of(name, i): return IDS[token(name, i)]


def script_ids(name, n):
  """Return the first `n` ids after the script's prompt."""
  ids = [id_of(name, i) for i in range(1, len(SCRIPTS[name]) - 1)]
  return (ids + [0 if SCRIPTS[name][-1] == EOS else ids[-1]] * n)[:n]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
  """Attention and MLP output zeros, embeddings are one-hot, and the head maps each token to the next one."""
  sizes = {"hidden_size": SIZE, "vocab_size": SIZE, "num_hidden_layers": 1}
  weights = random_weights(tiny_config(**sizes))
  for name in weights:
    if name.endswith(("o_proj.weight", "down_proj.weight")): weights[name][:] = 0
    if name.endswith("norm.weight"): weights[name][:] = 1
  weights["model.embed_tokens.weight"] = np.eye(SIZE, dtype=np.float32)
  head = weights["lm_head.weight"] = np.zeros((SIZE, SIZE), np.float32)   # (to, from)
  for name, pieces in SCRIPTS.items():
    for i, piece in enumerate(pieces[1:]):
      following = {EOS: 0, "…": id_of(name, i)}.get(piece, id_of(name, i + 1))
      head[following, id_of(name, i)] = 4
  folder = tiny_model(tmp_path_factory.mktemp("scripts"), tokenizer=False, weights=weights, **sizes)
  (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, id_of("other end", 2)]}))
  model = Tokenizer(models.WordLevel(IDS, unk_token=EOS))
  plain = decoders.Replace(Regex(r"^[a-z ]+:\d+#"), "")
  model.decoder = decoders.Sequence([plain, decoders.ByteFallback(), decoders.Fuse()])
  model.add_special_tokens([EOS])
  model.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
  return LLM(folder, dtype="float32", max_model_len=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=4)


def run(llm, name, max_tokens, **options):
  """Run a script through generate and generate_stream, which must agree. Return the text of each token, and the
  finish_reason and the stop_reason."""
  job = {"prompt_token_ids": [id_of(name, 0)]}
  params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **options})
  whole, parts = llm.generate(job, params, use_tqdm=False)[0].outputs[0], list(llm.generate_stream(job, params))
  parts = [p.outputs[0] for p in parts]
  assert [i for p in parts for i in p.token_ids] == whole.token_ids == script_ids(name, len(whole.token_ids))
  assert "".join(p.text for p in parts) == whole.text and all(len(p.token_ids) == 1 for p in parts)
  assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + [whole.finish_reason]
  assert parts[-1].stop_reason == whole.stop_reason
  return [p.text for p in parts], whole.finish_reason, whole.stop_reason


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: case["about"])
def test_text_of_each_token_up_to_a_stop_string_or_the_end(llm, case):
  """pieces: the text of each token. stop: the stop string that ends it; it is in the text only if included."""
  *pieces, last = case["pieces"]
  stop = case.get("stop")
  for include in (False, True) if stop else (False,):
    finish_reason = "stop" if stop or len(pieces) + 1 < case["max_tokens"] else "length"
    result = run(llm, case["script"], case["max_tokens"], **case["fields"], include_stop_str_in_output=include)
    assert result == ([*pieces, last + (stop or "") * include], finish_reason, stop)


def test_stop_string_of_a_million_characters_is_fast(llm):
  """Comparing each of its prefixes with the text would take minutes."""
  params = SamplingParams(temperature=0.0, max_tokens=6, stop=["x" * 1_000_000, "hello world, and more"])
  assert "".join(x.outputs[0].text for x in llm.generate_stream(SCRIPTS["hello"][0], params)) == ""


@pytest.mark.parametrize("name, n, plain, characters", DATA["partial characters"])
def test_max_tokens_within_character_replaces_preceding_byte_characters(llm, name, n, plain, characters):
  """ByteFallback decodes a run of bytes that ends in a partial character to one U+FFFD per byte. A stream delivers the
  complete characters. A stop token within a character, whose text is dropped, does the same."""
  job, params = {"prompt_token_ids": [id_of(name, 0)]}, {"temperature": 0.0, "max_tokens": 14}
  whole = llm.generate(job, SamplingParams(**params | {"max_tokens": n}))[0].outputs[0]
  num_bytes = n - (name == "bytes")   # its first token is "caf"
  assert whole.text == plain + "\ufffd" * num_bytes and whole.finish_reason == "length"
  parts = llm.generate_stream(job, SamplingParams(**params | {"max_tokens": n}))
  streamed = "".join(p.outputs[0].text for p in parts)
  assert streamed.rstrip("\ufffd") == plain + characters and streamed.endswith("\ufffd")
  stop = id_of(name, n + 1)
  stopped = llm.generate(job, SamplingParams(**params, stop_token_ids=[stop]))[0].outputs[0]
  assert stopped.text == whole.text and stopped.stop_reason == stop and len(stopped.token_ids) == n + 1


# Stop ids and end tokens

@pytest.mark.parametrize("name,max_tokens,fields,pieces,reason,stop", DATA["ends"])
def test_stop_id_or_end_token_ends_the_text(llm, name, max_tokens, fields, pieces, reason, stop):
  """The text of a stop id is kept if included; the text of an end token is hidden. A list is a script's token: its name
  and number. 0 is the end token."""
  def read(x): return id_of(*x) if isinstance(x, list) else x
  fields = {x: [*map(read, value)] if x == "stop_token_ids" else value for x, value in fields.items()}
  assert run(llm, name, max_tokens, **fields) == (pieces, reason, read(stop))


@pytest.mark.parametrize("fields,mode", DATA["sampler modes"])
def test_sampler_mode_is_the_lowest_that_handles_the_parameters(fields, mode):
  assert SamplingParams(**fields).sampler_mode.name == mode
