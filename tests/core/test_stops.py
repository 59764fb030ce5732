"""Stop conditions of LLM.generate and LLM.generate_stream: the exact character and token at which output ends. The
model follows scripts: its tokens are the pieces of the scripts, and the greedy next token is the next piece."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from helpers.models import random_weights, tiny_config, tiny_model, write_safetensors
from tokenizers import decoders, models

from tinyvllm import LLM, SamplingParams

EOS = "</s>"
# The first piece is the prompt. EOS ends a script; "…" repeats the piece before it. A piece is text or a byte (<0xC3>).
# Scripts share no tokens, except the byte tokens of "long".
SCRIPTS = {
  "hello": ["Say: ", "he", "llo", " wor", "ld", ", and", " more", EOS],
  "prompt": ["the c", "at", " and the ", "c", "at", " sat", "…"],
  "twins": ["> ", "ab", "cd", "ef", "gh", "…"],
  "tail": ["> ", "xab", "a", "bc", "d", "…"],
  "bytes": ["> ", "caf", "<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "a",
            "<0xF0>", "<0x9F>", "<0x99>", "<0x83>", "b", "…"],
  "long": ["> ", *(f"<0x{byte:02X}>" for byte in "日語の한".encode()), ".", "…"],
  "longer": ["> ", *(f"<0x{byte:02X}>" for byte in ("日本語" * 5).encode()), ".", "…"],
  "one token": ["> ", "one END two", "…"],
  "overlap": ["> ", "aa", "ab", "aab", "…"],
  "end": ["> ", "done", EOS],
  "again": ["> ", "a", "…"],
}


def token(name, i):
  """Return the vocabulary entry of the script's piece `i`."""
  piece = SCRIPTS[name][i]
  return piece if name == "long" and piece.startswith("<0x") else f"{name}:{i}#{piece}"


SCRIPTED = [token(name, i) for name, pieces in SCRIPTS.items() for i in range(len(pieces))]
VOCAB = list(dict.fromkeys([EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *SCRIPTED]))
IDS = {text: i for i, text in enumerate(VOCAB)}
SIZE = -(-len(VOCAB) // 8) * 8
COIN = "again:1#a", "one token:1#one END two"   # after the first token, both are equally probable


def id_of(name, i): return IDS[token(name, i)]


def following(name, i):
  """Return the id that follows the script's piece `i`."""
  piece = SCRIPTS[name][i + 1]
  return {EOS: 0, "…": id_of(name, i)}.get(piece) if piece in (EOS, "…") else id_of(name, i + 1)


def script_ids(name, n):
  """Return the first `n` ids after the script's prompt."""
  ids = [id_of(name, i) for i in range(1, len(SCRIPTS[name]) - 1)]
  return (ids + [0 if SCRIPTS[name][-1] == EOS else ids[-1]] * n)[:n]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
  """Attention and MLP output zeros, embeddings are one-hot, and the head maps each token to the next one."""
  folder = tiny_model(tmp_path_factory.mktemp("scripts"), tokenizer=False, hidden_size=SIZE, vocab_size=SIZE,
                      eos_token_id=0, num_hidden_layers=1)
  weights = random_weights(tiny_config(hidden_size=SIZE, vocab_size=SIZE, num_hidden_layers=1))
  for name in weights:
    if name.endswith(("o_proj.weight", "down_proj.weight")): weights[name][:] = 0
    if name.endswith("norm.weight"): weights[name][:] = 1
  weights["model.embed_tokens.weight"] = np.eye(SIZE, dtype=np.float32)
  head = weights["lm_head.weight"] = np.zeros((SIZE, SIZE), np.float32)   # (to, from)
  for name, pieces in SCRIPTS.items():
    for i in range(len(pieces) - 1): head[following(name, i), id_of(name, i)] = 4
  head[IDS[COIN[1]], IDS[COIN[0]]] = 3.96   # greedy decoding repeats "a", sampling picks either
  write_safetensors(folder / "model.safetensors", weights)
  model = tokenizers.Tokenizer(models.WordLevel(IDS, unk_token=EOS))
  plain = decoders.Replace(tokenizers.Regex(r"^[a-z ]+:\d+#"), "")
  model.decoder = decoders.Sequence([plain, decoders.ByteFallback(), decoders.Fuse()])
  model.add_special_tokens([EOS])
  model.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
  return LLM(folder, dtype="float32", max_model_len=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=4)


def run(llm, name, max_tokens=8, **options):
  """Run a script through generate and generate_stream, which must agree. Return its text, the text delta of each token,
  the number of tokens, and (finish_reason, stop_reason)."""
  job = {"prompt_token_ids": [id_of(name, 0)]}
  params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **options})
  whole, parts = llm.generate(job, params, use_tqdm=False)[0].outputs[0], list(llm.generate_stream(job, params))
  parts = [p.outputs[0] for p in parts]
  assert [i for p in parts for i in p.token_ids] == whole.token_ids == script_ids(name, len(whole.token_ids))
  assert "".join(p.text for p in parts) == whole.text and all(len(p.token_ids) == 1 for p in parts)
  reason = whole.finish_reason, whole.stop_reason
  assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + [reason[0]]
  assert parts[-1].stop_reason == reason[1]
  return SimpleNamespace(text=whole.text, pieces=[p.text for p in parts], n=len(parts), reason=reason)


def test_model_follows_scripts(llm):
  assert run(llm, "hello").text == "hello world, and more" and run(llm, "hello").reason == ("stop", None)
  assert run(llm, "bytes", 14).text == "café🙂a🙃bb"
  assert run(llm, "again", 3).pieces == ["a", "a", "a"]


# Position of a stop string

@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop, n, pieces", [
  ("llo", 2, ["he", ""]), ("lo wo", 3, ["he", "l", ""]), ("o world,", 5, ["he", "ll", "", "", ""]),
  ("hello", 2, ["", ""]), ("h", 1, [""]), (" world", 4, ["he", "llo", "", ""])])
def test_stop_string_at_any_position_ends_text(llm, stop, n, pieces, include):
  result = run(llm, "hello", stop=stop, include_stop_str_in_output=include)
  assert result.text == "".join(pieces) + stop * include and result.n == n and result.reason == ("stop", stop)
  assert result.pieces == pieces[:-1] + [pieces[-1] + stop * include]


def test_stop_string_within_token_drops_rest(llm):
  for include, text in ((False, "one "), (True, "one END")):
    result = run(llm, "one token", stop="END", include_stop_str_in_output=include)
    assert (result.text, result.n, result.reason) == (text, 1, ("stop", "END"))


def test_stop_string_matches_output_only(llm):
  result = run(llm, "prompt", stop="the cat")
  assert result.text == "at and " and result.n == 4, "the first 'cat' begins in the prompt"
  assert run(llm, "prompt", 3, stop=["the cat", "cat", "c"]).reason == ("stop", "c"), "the prompt's 'c' does not match"
  assert run(llm, "prompt", 1, stop=["cat", "the c"]).reason == ("length", None)


def test_stop_string_within_partial_match_ends_text(llm):
  result = run(llm, "overlap", stop="aab")   # aaab…
  assert (result.text, result.n, result.pieces) == ("a", 2, ["", "a"]) and result.reason == ("stop", "aab")
  result = run(llm, "overlap", 3, stop="abaaba")
  assert result.text == "aaabaab" and result.pieces == ["a", "a", "abaab"] and result.reason == ("length", None)


def test_stop_string_in_last_token_overrides_length(llm):
  for include, text in ((False, "hel"), (True, "hello w")):
    result = run(llm, "hello", 3, stop="lo w", include_stop_str_in_output=include)
    assert result.text == text and result.reason == ("stop", "lo w") and result.n == 3


def test_held_back_text_is_delivered_at_end(llm):
  result = run(llm, "hello", 3, stop=["lo world", "o wx"])
  assert result.text == "hello wor" and result.pieces == ["he", "l", "lo wor"] and result.reason == ("length", None)
  result = run(llm, "end", stop="ne!")
  assert result.text == "done" and result.pieces == ["do", "ne"] and result.reason == ("stop", None)
  result = run(llm, "hello", stop="llo world", stop_token_ids=[id_of("hello", 4)])
  assert result.text == "hello wor" and result.pieces == ["he", "", "", "llo wor"]


def test_held_back_text_is_delivered_after_mismatch(llm):
  result = run(llm, "hello", 6, stop=["llo wax", "world!"])
  assert result.pieces == ["he", "", "llo ", "", "world, and", " more"] and result.text == "hello world, and more"


def test_max_tokens_1_gives_one_token(llm):
  result = run(llm, "hello", 1)
  assert (result.text, result.n, result.reason) == ("he", 1, ("length", None))
  assert run(llm, "hello", 1, stop="hel").pieces == ["he"], "held back, then delivered"
  assert run(llm, "hello", 1, stop="e").reason == ("stop", "e") and run(llm, "hello", 1, stop="e").text == "h"
  result = run(llm, "bytes", 2)
  assert result.pieces == ["caf", "\ufffd"] and result.reason == ("length", None), "a partial character at the end"


# Several stop strings

@pytest.mark.parametrize("stop, text, reason", [
  (["cd", "de"], "ab", "cd"), (["de", "cd"], "ab", "cd"),               # the earliest match wins
  (["bcd", "cd"], "a", "bcd"), (["ef", "f"], "abcd", "ef"),             # one is a suffix of the other
  (["cd", "cde"], "ab", "cd"), (["cde", "cd"], "ab", "cd"),             # one is a prefix of the other
  (["bcdef", "d"], "abc", "d"), (["abcdefgx", "e"], "abcd", "e"),       # the longer one is incomplete
  (["x", "gh", "h"], "abcdef", "gh")])
def test_stop_strings_first_complete_one_wins(llm, stop, text, reason):
  for include in (False, True):
    result = run(llm, "twins", 4, stop=stop, include_stop_str_in_output=include)
    assert result.text == text + reason * include and result.reason == ("stop", reason)


def test_stop_strings_at_same_position_smaller_wins(llm):
  for stop in (["one EN", "one E"], ["one E", "one EN"]):
    result = run(llm, "one token", stop=stop, include_stop_str_in_output=True)
    assert result.text == "one E" and result.reason == ("stop", "one E")


def test_stop_string_of_a_million_characters_is_fast(llm):
  """Comparing each of its prefixes with the text would take minutes."""
  params = SamplingParams(temperature=0.0, max_tokens=6, stop=["x" * 1_000_000, "hello world, and more"])
  assert "".join(x.outputs[0].text for x in llm.generate_stream(SCRIPTS["hello"][0], params)) == ""


def test_stop_string_within_other_partial_match_ends_text(llm):
  result = run(llm, "tail", stop=["xabb", "abc"])   # xab a bc: the second match starts within the failed first
  assert result.text == "xab" and result.pieces == ["", "xab", ""] and result.reason == ("stop", "abc")
  result = run(llm, "tail", 4, stop=["abx", "bcde"])
  assert result.text == "xababcd" and result.pieces == ["x", "ab", "a", "bcd"] and result.reason == ("length", None)


# Characters of several tokens

def test_stop_string_of_multi_token_character_ends_text(llm):
  result = run(llm, "bytes", 14, stop="é")
  assert result.pieces == ["caf", "", ""] and result.n == 3 and result.reason == ("stop", "é")
  result = run(llm, "bytes", 14, stop="🙃")   # shares three bytes with the other emoji
  assert result.pieces == ["caf", "", "é", "", "", "", "🙂", "a", "", "", "", ""] and result.n == 12
  result = run(llm, "bytes", 14, stop="🙂a🙃b", include_stop_str_in_output=True)
  assert result.text == "café🙂a🙃b" and result.pieces[-1] == "🙂a🙃b" and result.n == 13
  assert run(llm, "bytes", 14, stop="fé🙃").text == "café🙂a🙃bb"


def test_multi_token_characters_are_delivered_one_by_one(llm):
  """12 tokens of one byte each. A stop string makes every step decode its text."""
  characters = [part for c in "日語の한" for part in ("", "", c)]
  for options in ({}, {"stop": "#"}):
    result = run(llm, "long", 13, **options)
    assert result.text == "日語の한." and result.pieces == [*characters, "."], options
  result = run(llm, "long", 13, stop="한.")
  assert result.text == "日語の" and result.n == 13 and result.reason == ("stop", "한.")


def test_context_that_begins_within_a_character_keeps_its_text(llm):
  """45 tokens of one byte: the last 8 of them, which give the next one's context, begin within a character."""
  assert run(llm, "longer", 46).text == "日本語" * 5 + "."


@pytest.mark.parametrize("name, n, plain, characters", [
  ("bytes", 2, "caf", ""), ("bytes", 5, "caf", "é"), ("long", 5, "", "日"), ("long", 11, "", "日語の")])
def test_max_tokens_within_character_replaces_preceding_byte_characters(llm, name, n, plain, characters):
  """ByteFallback decodes a run of bytes that ends in a partial character to one U+FFFD per byte. A stream delivers the
  complete characters."""
  job, params = {"prompt_token_ids": [id_of(name, 0)]}, SamplingParams(temperature=0.0, max_tokens=n)
  whole, parts = llm.generate(job, params)[0].outputs[0], list(llm.generate_stream(job, params))
  num_bytes = n - (name == "bytes")   # its first token is "caf"
  assert whole.text == plain + "\ufffd" * num_bytes and whole.finish_reason == "length"
  streamed = "".join(p.outputs[0].text for p in parts)
  assert streamed.rstrip("\ufffd") == plain + characters and streamed.endswith("\ufffd")


def test_stop_id_within_character_replaces_preceding_byte_characters(llm):
  stop = id_of("long", 5)   # its text is dropped, which leaves one byte of 語
  job, params = {"prompt_token_ids": [id_of("long", 0)]}, SamplingParams(temperature=0.0, stop_token_ids=[stop])
  output = llm.generate(job, params)[0].outputs[0]
  assert output.text == "\ufffd" * 4 and output.stop_reason == stop and len(output.token_ids) == 5


def test_stop_string_does_not_match_partial_character(llm):
  result = run(llm, "bytes", 14, stop="\ufffd")
  assert result.text == "café🙂a🙃bb" and result.reason == ("length", None)


def test_stop_string_counts_after_min_tokens(llm):
  for n, text in ((2, "hel"), (3, "hello world, and more")):
    assert run(llm, "hello", 6, stop="lo w", min_tokens=n).text == text, "the third token completes it"
  result = run(llm, "again", 6, stop="aa", min_tokens=3)
  assert result.text == "aa" and result.n == 4 and result.reason == ("stop", "aa"), "third and fourth token"


def test_stop_id_is_banned_before_min_tokens(llm):
  stop = id_of("again", 1)
  job, params = {"prompt_token_ids": [id_of("again", 0)]}, {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
  output = llm.generate(job, SamplingParams(**params, stop_token_ids=[stop], min_tokens=2))[0].outputs[0]
  assert stop not in output.token_ids[:2]
  assert llm.generate(job, SamplingParams(**params, stop_token_ids=[stop]))[0].outputs[0].token_ids == [stop]


# Stop ids and end tokens

@pytest.mark.parametrize("include", [False, True])
def test_stop_id_text_is_kept_if_included(llm, include):
  stop = id_of("hello", 3)
  result = run(llm, "hello", stop_token_ids=[stop, 0], include_stop_str_in_output=include)
  assert result.pieces == ["he", "llo", " wor" * include] and result.reason == ("stop", stop)
  result = run(llm, "hello", 3, stop_token_ids=[stop], include_stop_str_in_output=include)
  assert result.n == 3 and result.reason == ("stop", stop), "the token at max_tokens"
  result = run(llm, "again", stop_token_ids=[id_of("again", 1)], include_stop_str_in_output=include)
  assert result.text == "a" * include and result.n == 1, "the first token"


def test_stop_string_within_stop_id_text_matches_if_included(llm):
  stop, both = id_of("hello", 3), {"stop_token_ids": [id_of("hello", 3)], "stop": "o w"}
  result = run(llm, "hello", **both)
  assert result.text == "hello" and result.reason == ("stop", stop), "hidden text has no stop string"
  assert run(llm, "hello", **both, include_stop_str_in_output=True).text == "hello w"


def test_end_token_text_is_hidden(llm):
  for options in ({}, {"skip_special_tokens": False}, {"include_stop_str_in_output": True}, {"stop_token_ids": [0]}):
    result = run(llm, "end", **options)
    assert result.text == "done" and result.n == 2 and result.pieces == ["done", ""], options
    assert result.reason == ("stop", 0 if "stop_token_ids" in options else None)
  assert run(llm, "end", stop=EOS, skip_special_tokens=False).reason == ("stop", None)


def test_ignored_end_token_is_text_without_skip_special_tokens(llm):
  job, params = {"prompt_token_ids": [id_of("end", 0)]}, {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}
  for skip, text in ((True, "done"), (False, "done" + EOS)):
    output = llm.generate(job, SamplingParams(**params, skip_special_tokens=skip))[0].outputs[0]
    assert output.text == text and output.finish_reason == "length"
  output = llm.generate(job, SamplingParams(**params, skip_special_tokens=False, stop="e</"))[0].outputs[0]
  assert output.text == "don" and output.stop_reason == "e</"


# Samples

@pytest.mark.slow
def test_samples_end_independently(llm):
  job, options = {"prompt_token_ids": [id_of("again", 1)]}, {"max_tokens": 12, "stop": ["END", "aaaaaaa"], "top_k": 2}
  lengths = set()
  for seed in range(0, 60, 3):
    params = SamplingParams(n=3, seed=seed, **options)
    whole, parts = llm.generate(job, params)[0].outputs, list(llm.generate_stream(job, params))
    for i, output in enumerate(whole):
      single = llm.generate(job, SamplingParams(seed=seed + i, **options))[0].outputs[0]
      assert (output.text, output.token_ids, output.stop_reason) == (single.text, single.token_ids, single.stop_reason)
      assert "".join(p.outputs[i].text for p in parts) == output.text
      assert [x for p in parts for x in p.outputs[i].token_ids] == output.token_ids
      n = len(output.token_ids)
      expected = ("a" * (n - 1) + "one ", "END") if output.token_ids[-1] == IDS[COIN[1]] else ("", "aaaaaaa")
      assert (output.text, output.stop_reason) == expected and output.finish_reason == "stop"
    lengths.add(tuple(len(c.token_ids) for c in whole))
  assert any(len(set(x)) == 3 for x in lengths), "no request had samples of three lengths"
