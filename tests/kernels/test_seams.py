"""Seams of the core: an object with exactly the members of the core's own class works with the extension's backend."""
from helpers.engines import ENGINE, greedy, ids_of_batch, prompt
from helpers.reference import reference_greedy
from tinygrad import Device, TinyJit

from tinyvllm import Parts, llama
from tinyvllm.engine import Engine
from tinyvllm_extra import kernels
from tinyvllm_extra.options import LLMConfig


class CoreCheckpoint:
  """The core's Checkpoint, with its methods only."""
  def __init__(self, path, config):
    self.inner = llama.Checkpoint(path)
    self.hf_config = self.inner.hf_config

  def describe(self): return "core"
  def tokenizer(self): return self.inner.tokenizer()
  def load(self, model): self.inner.load(model)


class OneDevice:
  names = shards = (Device.DEFAULT,)
  def __init__(self, config): pass
  def shard(self, model): return model
  def jit(self, step): return TinyJit(step)
  def gather(self, logits): return logits


class NoDrafts:
  """A Proposer without drafts."""
  num_behind = 0
  def needs_sync(self, seq): return False
  def propose(self, scheduler, batch): pass

  def update(self, engine, results):
    rows = zip(results.token_ids, results.step.rows, strict=False)
    engine.append(results.step.computed, {row.seq: token for token, row in rows if row.position == len(row.seq.tokens)})


class PlainParts(Engine):
  parts = Parts(config_class=LLMConfig, make_backend=kernels.make_backend, open_checkpoint=CoreCheckpoint,
                open_devices=OneDevice, open_proposer=lambda _, new_runner, size: (NoDrafts(), [new_runner(size)]))


def test_checkpoint_devices_and_proposer_with_only_the_protocols_methods_work(folder):
  engine = PlainParts(folder, **ENGINE)
  jobs = [prompt(n, n) for n in (3, 9, 20)]
  assert ids_of_batch(engine, jobs, greedy(5)) == [reference_greedy(folder, ids, 5) for ids in jobs]
