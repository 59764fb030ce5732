"""Engines of the tests of speculative decoding: with a fake model, whose texts are known, and without drafts."""
import pytest
from helpers.engines import ENGINE
from helpers.hash_model import HashDevice, HashModel
from helpers.speculation import NGRAM, check_preemptions

from tinyvllm import LLM


@pytest.fixture(autouse=True)
def wide_registers(monkeypatch):
  """Assume AVX-512 registers: the best number of drafts depends on the CPU."""
  monkeypatch.setattr("tinyvllm_extra.speculation.cpu_sums", lambda: 8)


@pytest.fixture
def fake(words_folder, monkeypatch):
  """Makes an engine with a fake device. Returns the engine and its model."""
  def make(drafts=NGRAM, alphabet=range(259, 320), overlaps=False, **options):
    engine = LLM(words_folder, **{**ENGINE, "max_model_len": 512, **options}, speculative_config=drafts)
    engine.runner.is_async, model = overlaps, HashModel([*alphabet])
    engine.device, *_ = [HashDevice(engine, runner, model) for runner in engine.runners]
    check_preemptions(engine)
    return engine, model
  return make


@pytest.fixture(scope="module")
def plain(words_folder):
  engine = LLM(words_folder, **{**ENGINE, "max_num_seqs": 16})
  for _ in engine.capture([16], optional=True): pass
  return engine
