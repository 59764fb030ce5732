"""The trace of an engine's steps: what its lines add up to, also with failed, overlapped and preempted steps."""
import json
import os
import random
import resource
import signal
import stat
from collections import Counter

import pytest
from helpers.commands import FLAGS, error_line, flags, run_command
from helpers.engines import BS, ENGINE, assert_same_outputs, greedy, ids_of, prompt, set_overlap, tokens
from helpers.faults import break_steps, run_random
from helpers.protocol import SMALL
from helpers.servers import LocalServer, wait_until
from helpers.speculation import NGRAM

from tinyvllm import LLM
from tinyvllm_extra.trace.observer import name_of

SMALL_POOL = {**ENGINE, "num_gpu_blocks_override": 13}   # 12 blocks


def read(path, llm=None):
  """Return the header and the steps of a trace, whose lines must be complete. llm: shut it down before."""
  if llm: llm.shutdown()
  header, *steps = map(json.loads, path.read_text().removesuffix("\n").split("\n"))
  assert path.read_text().endswith("\n")
  assert (header["format"], header["version"]) == ("tinyvllm trace", 1)
  assert [line["step"] for line in steps] == [*range(len(steps))]
  return header, steps


class Pool:
  """Block tables and cached blocks, made from the lines of a trace."""
  def __init__(self): self.tables, self.hashes = {}, {}

  def apply(self, line):
    for change in line["tables"]: self.free(change["id"], change["freed"])
    for change in line["tables"]:
      assert {*change["shared"]} <= {*self.hashes}, "a block that is not cached cannot be shared"
      used = {block for table in self.tables.values() for block in table}
      assert not used & {*change["new"]}, "a block that is in use cannot be new"
      blocks = change["shared"] + change["new"]
      if blocks: self.tables.setdefault(change["id"], []).extend(blocks)
    assert {*line["evicted"]} == {*self.hashes} & {block for change in line["tables"] for block in change["new"]}
    for block in line["evicted"]: del self.hashes[block]
    self.hashes |= line["cached"]
    for change in line["tables_after"]: self.free(change["id"], change["freed"])
    assert not any(change["shared"] or change["new"] for change in line["tables_after"])

  def free(self, name, blocks):
    assert blocks == (self.tables[name][-len(blocks):] if blocks else [])
    if blocks: del self.tables[name][-len(blocks):]
    if blocks and not self.tables[name]: del self.tables[name]


@pytest.mark.parametrize("overlaps", ["", "overlapped", "early"])
def test_tokens_of_a_request_add_up_to_its_prompt_and_output(folder, llm, tmp_path, monkeypatch, overlaps):
  """Each computed token is in one step with its id, prompts in chunks of at most 16 tokens."""
  traced = LLM(folder, **ENGINE, trace=str(tmp_path / "trace"), enable_prefix_caching=False)
  set_overlap(monkeypatch, traced.runner, overlaps)
  jobs = [prompt(n, n) for n in (1, 15, 16, 40, 3)]
  outputs = traced.generate([tokens(ids) for ids in jobs], greedy(7))
  assert_same_outputs(outputs, llm.generate([tokens(ids) for ids in jobs], greedy(7)))
  header, steps = read(tmp_path / "trace", traced)
  assert (header["block_size"], header["num_blocks"]) == (BS, traced.blocks.num_blocks) and "LLMConfig" in str(header)
  computed, sampled = {}, {}
  for entry in (entry for line in steps for entry in line["tokens"]):
    ids = computed.setdefault(entry["id"], [])
    assert entry["from"] == len(ids) and entry["to"] - entry["from"] == len(entry["ids"]) <= 16
    assert entry["kind"] == ("prefill" if not sampled.get(entry["id"]) else "decode")
    ids += entry["ids"]
    sampled.setdefault(entry["id"], []).extend(entry["sampled"])
  assert [*computed.values()] == [ids + ids_of(output)[:-1] for ids, output in zip(jobs, outputs, strict=True)]
  assert [*sampled.values()] == [ids_of(output) for output in outputs]
  assert Counter(x["finished"] for line in steps for x in line["tokens"] if x["finished"]) == {"length": 5}
  assert [line["graph"]["is_new"] for line in steps] == [True] + [False] * (len(steps) - 1)
  assert steps[0]["graph"].items() >= {"tokens": 16, "rows": 8, "sampler": "greedy", "processors": False}.items()
  assert all(line["host_ms"] > 0 and line["device_ms"] > 0 for line in steps)
  assert not {"_update", "_next_step", "_reset"} & {*vars(llm)}, "nothing is wrapped without a trace"
  assert stat.S_IMODE((tmp_path / "trace").stat().st_mode) == 0o600


@pytest.mark.parametrize("seed", range(4))
def test_tables_and_cached_blocks_equal_the_engines_after_each_step(folder, tmp_path, monkeypatch, seed):
  """Random requests and aborts in a pool of 12 blocks, with two common prefixes; a tenth of the steps fails."""
  rng, pool, states = random.Random(seed), Pool(), {}
  llm = LLM(folder, **SMALL_POOL, trace=str(tmp_path / "trace"))
  break_steps(llm, monkeypatch, lambda place: seed % 2 and rng.random() < 0.02)
  def record():
    cached = {block: key.hex()[:16] for key, block in llm.blocks.cached_blocks.items()}
    tables = {name_of(x): [*x.block_table] for x in llm.scheduler.running}
    states.setdefault(llm.tracer.num_steps - 1, (tables, cached))
  *_, num_failed = run_random(llm, rng, 300, lambda: (
    [*prompt(2 * BS, rng.randrange(2)), *prompt(rng.choice((1, 4, 9)), rng.randrange(9))],
    greedy(rng.choice((1, 3, 12)), n=rng.choice((1, 1, 3)))), record)
  steps = read(tmp_path / "trace", llm)[1]
  for line in steps:
    pool.apply(line)
    assert (pool.tables, pool.hashes) == states[line["step"]]
    assert line["num_waiting"] >= len(line["waiting"]) and {*line["preempted"]} <= {*line["waiting"]}
  assert sum(len(line["preempted"]) for line in steps) > 3 and sum(len(line["evicted"]) for line in steps) > 20
  assert sum(len(x["shared"]) for line in steps for x in line["tables"]) > 20
  assert sum("failed" in line for line in steps) == num_failed and (num_failed > 5) == (seed % 2)


@pytest.mark.parametrize("overlaps", ["overlapped", "early"])
def test_lines_of_overlapped_steps_are_consistent(folder, tmp_path, monkeypatch, overlaps):
  """A sequence may end while the next step, which has it too, is in flight."""
  llm = LLM(folder, **SMALL_POOL, trace=str(tmp_path / "trace"))
  set_overlap(monkeypatch, llm.runner, overlaps)
  jobs, pool = [tokens([*prompt(2 * BS), *prompt(i % 7 + 1, i)]) for i in range(12)], Pool()
  llm.generate(jobs, greedy(20, stop_token_ids=[*range(259, 320, 9)]))
  _, steps = read(tmp_path / "trace", llm)
  for line in steps: pool.apply(line)
  assert not pool.tables and {*pool.hashes} == {*llm.blocks.cached_blocks.values()}
  assert any(line["preempted"] for line in steps)


def test_drafts_are_counted_apart(words_folder, tmp_path):
  llm = LLM(words_folder, **ENGINE, speculative_config=NGRAM, trace=str(tmp_path / "trace"))
  outputs = llm.generate([tokens(prompt(5, i)) for i in range(2)], greedy(60, logit_bias={300: 100}))
  _, steps = read(tmp_path / "trace", llm)
  sums = Counter()
  for entry in (entry for line in steps for entry in line["tokens"]):
    assert entry["accepted"] <= entry["drafts"] and entry["to"] - entry["from"] == len(entry["ids"])
    for name in ("ids", "accepted", "sampled"):
      sums[entry["id"], name] += entry[name] if name == "accepted" else len(entry[name])
  names = dict.fromkeys(name for name, _ in sums)
  accepted = [sums[name, "accepted"] for name in names]
  assert accepted == [output.metrics.num_accepted_tokens for output in outputs] and sum(accepted) > 60
  assert all((sums[x, "ids"] + sums[x, "accepted"], sums[x, "sampled"]) == (5 + 60 - 1, 60) for x in names)


def test_file_is_overwritten_and_a_killed_process_leaves_complete_lines(folder, tmp_path):
  path = tmp_path / "trace"
  path.write_text("old " * 9999)
  child = os.fork()
  if not child:
    llm = LLM(folder, **ENGINE, trace=str(path))
    while True: llm.generate(tokens(prompt(4)), greedy(50))
  try: wait_until(lambda: "old" not in path.read_text() and path.stat().st_size > 100_000, "lines are written")
  finally: os.kill(child, signal.SIGKILL)
  os.waitpid(child, 0)
  assert len(read(path)[1]) > 100


def test_trace_that_cannot_grow_ends_with_a_warning_and_the_engine_continues(folder, tmp_path, caplog):
  path, (soft, hard) = tmp_path / "trace", resource.getrlimit(resource.RLIMIT_FSIZE)
  llm = LLM(folder, **ENGINE, trace=str(path))
  resource.setrlimit(resource.RLIMIT_FSIZE, (2500, hard))
  try:
    output, = llm.generate(tokens(prompt(4)), greedy(50))
    _, steps = read(path, llm)
  finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert len(ids_of(output)) == 50 and 1 < len(steps) < 10
  warning, = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
  assert warning.startswith(f"trace: {str(path)!r} ends before step {len(steps)}: ")


def test_commands_write_a_trace(words_folder, tmp_path):
  command = "generate", "the cat", "--model", words_folder, *FLAGS, "-n", 5, "--temperature", 0
  assert run_command(*command, "--trace", tmp_path / "one").stdout == run_command(*command).stdout
  assert f"'{tmp_path}' cannot be written: Is a directory" in error_line(run_command(*command, "--trace", tmp_path))
  error_line(run_command(*command, "--trace", tmp_path / "one", "--max-model-len", 10**6))   # the file stays
  assert len(read(tmp_path / "one")[1]) == 5
  (tmp_path / "other").write_bytes(b"\xff\n")
  for name, output, error in (("other", "a", "was not written with --trace"), ("one", "b/c", "cannot be written")):
    assert error in error_line(run_command("trace", "show", tmp_path / name, "--output", tmp_path / output))
  with LocalServer(words_folder, *flags(**SMALL), "--trace", tmp_path / "two") as server:
    body = {"prompt": "the cat", "max_tokens": 5, "ignore_eos": True}
    name = server.post("/v1/completions", body).json()["id"]
  assert {entry["id"].partition("#")[0] in name for line in read(tmp_path / "two")[1] for entry in line["tokens"]}
