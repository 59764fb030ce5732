"""Engines of the tests of speculative decoding: with a fake model, whose texts are known, and without drafts."""
import pytest
from helpers.engines import ENGINE
from helpers.hash_model import HashDevice, HashModel
from helpers.speculation import NGRAM, Counts, Oracle, check_preemptions

from tinyvllm import LLM


@pytest.fixture(autouse=True)
def wide_registers(monkeypatch):
  """Assume AVX-512 registers: the best number of drafts depends on the CPU."""
  monkeypatch.setattr("tinyvllm_extra.sampling.speculation.SUMS", 8)


@pytest.fixture
def fake(words_folder, monkeypatch):
  """Makes an engine with a fake device. Returns the engine, its oracle and its counts of drafts."""
  def make(drafts=NGRAM, style="right", overlaps=False, **options):
    engine = LLM(words_folder, **{**ENGINE, "max_model_len": 512, **options}, speculative_config=drafts)
    engine.runner.is_async, model = overlaps, HashModel([*range(259, 320)])
    for runner in engine.runners: HashDevice(engine, runner, model)
    check_preemptions(engine)
    return engine, Oracle(monkeypatch, style, model=model), Counts(engine)
  return make


@pytest.fixture(scope="module")
def plain(words_folder): return LLM(words_folder, **{**ENGINE, "max_num_seqs": 16})
