"""`tinyvllm bench`: the table of rates, throughput, and the metrics of a server."""
import http.client
import math
import re
from unittest.mock import MagicMock

import pytest
from helpers.commands import FLAGS, error_line, run_command
from helpers.data import read_data
from helpers.servers import LocalServer, checked
from safetensors.numpy import load_file

from tinyvllm_extra.cli import bench

COMMANDS = read_data("command_lines.json")
LOAD = "--random-input-len", 8, "--random-output-len", 5


@pytest.fixture(scope="module")
def server(words_folder): yield from checked(LocalServer(words_folder, *FLAGS))


def figures(out): return {name: float(value) for name, value in re.findall(r"^(\S.+?): +([\d.]+)\s*$", out, re.M)}


@pytest.mark.parametrize("options,tests", COMMANDS["bench tests"])
def test_bench_prints_a_row_for_each_test_without_captures_in_it(words_folder, monkeypatch, options, tests):
  graphs, run = [], bench.run
  def spy(llm, *shape):
    seconds = run(llm, *shape)
    graphs.append(len(llm.runner.graphs))
    return seconds
  monkeypatch.setattr(bench, "run", spy)
  out = run_command("bench", words_folder, *FLAGS, *options)
  table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.stdout.splitlines()]
  assert table[0] == ["model", "size", "params", "backend", "threads", "test", "t/s"], out.stderr
  num_params = sum(x.size for x in load_file(words_folder / "model.safetensors").values())
  for row, test in zip(table[2:], tests, strict=True):
    assert row[:1] + row[2:3] + row[5:6] == [words_folder.name, f"{num_params / 1e6:.2f} M", test]
    assert re.fullmatch(r"[1-9]\d*\.\d\d ± +\d+\.\d\d", row[6])
  assert len({*graphs}) == 1 and len(graphs) == len(tests) * (2 if "-r" in options else 6)


def test_bench_prints_mean_and_deviation_of_the_runs_after_the_first(words_folder, monkeypatch):
  seconds = iter([9.0, 1.0, 2.0, 4.0])
  monkeypatch.setattr(bench, "run", lambda *_: [bench.Answer([1.0, 1.5, 1 + next(seconds)], 1)])
  out = run_command("bench", words_folder, *FLAGS, "-p", 8, "-n", 0, "-r", 3).stdout
  assert out.endswith(f"|     pp8 | {14 / 3:9.2f} ± {(28 / 3) ** 0.5:6.2f} |\n")


def test_bench_throughput_prints_rates_of_all_requests_together(words_folder):
  values = figures(run_command("bench", "throughput", words_folder, *FLAGS, *LOAD, "--num-prompts", 9).stdout)
  counts = {"Successful requests": 9, "Failed requests": 0, "Total input tokens": 72, "Total generated tokens": 45}
  assert {name: values[name] for name in counts} == counts and "Mean ITL (ms)" not in values
  assert values["Output token throughput (tok/s)"] == pytest.approx(5 * values["Request throughput (req/s)"], rel=1e-3)


def test_bench_serve_sends_a_warm_up_and_a_poisson_process(server, monkeypatch):
  rates = []
  monkeypatch.setattr("random.expovariate", lambda rate: rates.append(rate) or 0.0)
  before = server.metrics()["generation_tokens_total"]
  out = run_command("bench", "serve", "--base-url", server.url, *LOAD, "--num-prompts", 6, "--max-concurrency", 2,
                    "--request-rate", 50, "--dataset-name", "random")
  values = figures(out.stdout)
  assert values["Successful requests"] == 6 and rates == [math.inf] * 6 + [50.0] * 6, out.stderr
  assert values["Total generated tokens"] == 30
  assert server.metrics()["generation_tokens_total"] - before == 2 * 30


def test_bench_serve_prints_metrics_of_the_answers_under_names_of_vllm(monkeypatch):
  """The last of three requests fails. Events of the first answer may have several tokens."""
  answers = iter([0, 0, 0, bench.Answer([0.0, 1.0, 2.0, 4.0], 5),   # after three of the warm-up
                  bench.Answer([1.0, 3.0, 11.0], 5), None])
  def send(*_):
    result = next(answers)
    if result is None: raise ValueError("broken")
    return result
  monkeypatch.setattr(bench, "send", send)
  run = run_command("bench", "serve", *LOAD, "--num-prompts", 3, "--max-concurrency", 1)
  assert figures(run.stdout) == COMMANDS["bench metrics"]
  assert "a request failed: broken" in run.stderr


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), http.client.IncompleteRead(b"")])
def test_bench_serve_prints_the_end_of_a_server_in_one_line(monkeypatch, error):
  response = MagicMock()
  response.__enter__.return_value.closed = False
  response.__enter__.return_value.read1.side_effect = [b": the first line", error]
  monkeypatch.setattr("urllib.request.urlopen", lambda _: response)
  assert f"no connection to a server: {error}" in error_line(run_command("bench", "serve", "--num-prompts", 1))


@pytest.mark.parametrize("arguments,message", COMMANDS["bench errors"])
def test_bench_prints_errors_in_one_line(server, words_folder, arguments, message):
  words = arguments.replace("URL", server.url).split()
  model = [] if words[0] == "serve" else ["--model", words_folder, *FLAGS]
  assert message in error_line(run_command("bench", *words, *model))
