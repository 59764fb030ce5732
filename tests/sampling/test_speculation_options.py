"""Speculative decoding: its options and the server's metrics."""
import json
import re

import pytest
from helpers.engines import ENGINE
from helpers.requests import flags
from helpers.servers import LocalServer
from helpers.speculation import NGRAM

from tinyvllm import LLM
from tinyvllm_extra.cli import main


# Options

@pytest.mark.parametrize("config, parts", [
  ({**NGRAM, "num_speculative_token": 3}, ["num_speculative_token'", "num_speculative_tokens"]),
  ({**NGRAM, "method": "eagle"}, ["method='eagle'", "ngram"]),
  ({**NGRAM, "num_speculative_tokens": 0}, ["num_speculative_tokens=0", "1", "16"]),
  ({**NGRAM, "num_speculative_tokens": 17}, ["num_speculative_tokens=17", "1", "16"]),
  ({**NGRAM, "num_speculative_tokens": "5"}, ["num_speculative_tokens='5'", "int"]),
  ({**NGRAM, "num_speculative_tokens": True}, ["num_speculative_tokens=True", "int"]),
  ({"method": "ngram"}, ["num_speculative_tokens", "missing"]),
  ({**NGRAM, "prompt_lookup_min": 5}, ["prompt_lookup_min=5", "prompt_lookup_max=4"]),
  ({**NGRAM, "prompt_lookup_min": 0}, ["prompt_lookup_min=0", "1"]),
  ({**NGRAM, "prompt_lookup_max": -1}, ["prompt_lookup_max=-1", "1"]),
  ({"num_speculative_tokens": 5}, ["method", "model", "ngram"]),
  ({"num_speculative_tokens": 5, "method": "draft_model"}, ["method='draft_model'", "model"]),
  ({}, ["num_speculative_tokens"]),
  ([("method", "ngram")], ["speculative_config", "dict"]), ("ngram", ["speculative_config='ngram'", "dict"]),
  (5, ["speculative_config=5", "dict"]), (True, ["speculative_config=True", "dict"]),
])
def test_invalid_config_raises_with_remedy(words_folder, config, parts):
  with pytest.raises(ValueError) as error: LLM(words_folder, **ENGINE, speculative_config=config)
  assert all(x in str(error.value) for x in parts), str(error.value)


SMALL = {**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 4}


def test_command_line_takes_json_config(words_folder, plain, capsys):
  command = ["generate", "the cat", "--model", str(words_folder), *flags(**SMALL), "--max-tokens", "12"]
  assert main(command) == 0
  expected = capsys.readouterr().out
  assert main([*command, "--speculative-config", json.dumps(NGRAM)]) == 0
  assert capsys.readouterr().out == expected
  assert main([*command, "--speculative-config", '{"method": "eagle", "num_speculative_tokens": 2}']) == 1
  assert "method='eagle'" in capsys.readouterr().err


def test_server_metrics_count_drafts(words_folder):
  with LocalServer(words_folder, *flags(**SMALL), "--speculative-config", json.dumps(NGRAM)) as server:
    help_texts = dict(re.findall(r"^# HELP tinyvllm:(\w+) (.*)$", server.get("/metrics").text, re.M))
    before = server.metrics()
    body = {"prompt": "the cat", "temperature": 0, "max_tokens": 60, "logit_bias": {"300": 100}, "ignore_eos": True}
    assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 60
    metrics = server.metrics()
    names = ["drafts_total", "draft_tokens_total", "accepted_tokens_total"]
    drafts, proposed, accepted = (metrics["spec_decode_num_" + name] for name in names)
    assert [before["spec_decode_num_" + name] for name in names] == [0, 0, 0]
    assert 10 <= drafts <= proposed and 30 < accepted <= proposed
    per_position = {name: x for name, x in metrics.items() if "per_pos" in name}
    assert metrics["spec_decode_num_accepted_tokens_per_pos_total{position=0}"] == max(per_position.values()) <= drafts
    assert sum(per_position.values()) == accepted
    assert {"spec_decode_num_drafts", "spec_decode_num_accepted_tokens_per_pos"} <= {
      name.removesuffix("_total") for name in help_texts}
    assert server.stop() == 0
