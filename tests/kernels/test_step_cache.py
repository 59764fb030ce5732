"""Captured steps on disk: a later engine restores them, and only if nothing that determines them has changed."""
import pytest
from helpers.engines import ENGINE, greedy, prompt, tokens
from tinygrad import codegen, helpers

from tinyvllm import LLM, SamplingParams
from tinyvllm_extra.formats import tuning
from tinyvllm_extra.kernels import FastBackend, kernel_cache

PROMPTS = [prompt(n) for n in (3, 20)]
PARAMS = [greedy(6), SamplingParams(temperature=1.0, top_p=0.9, seed=1, logprobs=2, max_tokens=6)]


class OtherBackend(FastBackend): pass


@pytest.fixture
def run(folder, monkeypatch, tmp_path):
  """A function that makes an engine, generates, and returns the token ids and the number of captures."""
  monkeypatch.setattr(helpers.CACHELEVEL, "value", 2)
  monkeypatch.setattr(codegen.do_to_program, "path", tmp_path)

  def make(**options):
    captures = []
    monkeypatch.setattr(kernel_cache.StoredStep, "save", lambda *args: captures.append(args) or save(*args))
    llm = LLM(folder, **{**ENGINE, **options})
    jobs = [(x, params) for x in PROMPTS for params in PARAMS]
    ids = [llm.generate(tokens(x), params, False)[0].outputs[0].token_ids for x, params in jobs]
    return ids, len(captures)
  save = kernel_cache.StoredStep.save
  return make


def test_engine_restores_the_steps_of_an_earlier_one(run, tmp_path):
  expected, num_captured = run()
  assert num_captured >= 3
  assert run() == (expected, 0)
  for path in tmp_path.iterdir(): path.write_bytes(path.read_bytes()[:-1])
  assert run() == (expected, num_captured), "a damaged file is replaced"
  assert run() == (expected, 0)


@pytest.mark.parametrize("change", ["option", "code", "choices", "backend", "level"])
def test_changed_step_is_captured(run, monkeypatch, tmp_path, change):
  run()
  if change == "code": monkeypatch.setattr(kernel_cache, "source_hash", lambda: "other")
  if change == "level": monkeypatch.setattr(helpers.CACHELEVEL, "value", 1)
  (path := tmp_path / "tuned.json").write_text('{"linear": "4"}')
  if change == "choices": monkeypatch.setattr(tuning, "path", lambda: path)
  options = {"option": {"max_num_seqs": 3}, "backend": {"backend": OtherBackend()}}.get(change, {})
  _, num_captured = run(**options)
  assert bool(num_captured) == (change in ("option", "code", "choices")), "a step of unknown code is not stored"
