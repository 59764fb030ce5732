"""Faults that readers of the code found, one test each."""
import ctypes
import json
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pytest
from helpers.commands import parse_command
from helpers.engines import check_invariants, greedy, ids_of, prompt, run_to_end, tokens
from helpers.models import tiny_model
from helpers.reference import reference_greedy
from tinygrad import Tensor

from tinyvllm import InputError, SamplingParams
from tinyvllm_extra.sampling import logits
from tinyvllm_extra.kernels import cuda
from tinyvllm_extra.cli import serve


@pytest.mark.parametrize("is_read", [True, False])
def test_read_back_of_a_gpu_frees_its_memory_also_if_it_is_dropped(monkeypatch, is_read):
  """A step that fails after its launch never reads its results."""
  values, driver, allocator = np.arange(6, dtype=np.float32), Mock(), Mock()
  device = SimpleNamespace(context=None, allocator=allocator, pending_copyin=[("upload", 8, None)])
  allocator.alloc.return_value = ctypes.addressof(ctypes.c_char.from_buffer(values))
  for name, x in (("cuda", driver), ("check", lambda status: None), ("init_c_var", lambda *_: "event")):
    monkeypatch.setattr(cuda, name, x)
  tensor = Tensor.zeros(2, 3).contiguous().realize()
  monkeypatch.setattr(tensor.uop.buffer.allocator, "dev", device)
  read = cuda.CUDABackend().start_reading(tensor)
  assert not allocator.free.called and not device.pending_copyin
  if is_read: assert read() == values.reshape(2, 3).tolist()
  del read
  assert [call.args[1] for call in allocator.free.mock_calls] == [8, 24]
  driver.cuEventDestroy_v2.assert_called_once_with("event")


@pytest.mark.parametrize("count,size", [(1, 16), (16, 16), (17, 128), (128, 128), (129, 1024)])
def test_adjustments_take_the_smallest_graph_that_holds_them(words_llm, count, size):
  params = SamplingParams(logit_bias=dict.fromkeys(range(3, 3 + min(count, 16)), 1.0), max_tokens=1)
  seqs = words_llm.make_request("a", "the cat", params).sequences
  processor = seqs[0].processor
  processor.adjustments = lambda seq, position: [(i, 1.0, 1.0, 0.0) for i in range(count)]
  row = logits.Row(seqs[0], len(seqs[0].tokens), 0)
  assert logits.LogitsBatch([row], words_llm.runner).plan.num_adjustments == size


def test_bitmask_of_allowed_tokens_is_computed_once(words_llm):
  processor = words_llm.make_request("a", "the cat", SamplingParams(allowed_token_ids=[5, 40])).sequences[0].processor
  mask = processor.bitmask()
  assert processor.bitmask() is mask
  assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [5, 40]


def test_generate_leaves_outputs_of_other_requests_to_step(llm):
  llm.add_request("x", tokens(prompt(5)), greedy(3))
  expected = llm.generate(tokens(prompt(5)), greedy(3), use_tqdm=False)[0].outputs[0].token_ids
  next(llm.generate_stream(tokens(prompt(6)), greedy(9)))
  assert {name: ids_of(o) for name, o in run_to_end(llm, 100).items() if o.finished} == {"x": expected}


class OnlyTheProtocol:
  """Exactly the members of LogitsProcessor: only one token may come next."""
  depends_on_output = False
  def __init__(self, token, vocab_size): self.bits = np.arange(-(-vocab_size // 32) * 32) == token
  def accept(self, token): return False
  def bitmask(self): return np.packbits(self.bits, bitorder="little").view(np.int32)
  def adjustments(self, seq, position): return []
  def output_logprobs(self, seq, start): return None, None


def test_object_with_the_methods_of_logits_processor_works(words_llm, monkeypatch):
  monkeypatch.setattr(SamplingParams, "processor", lambda self, tokenizer, model: OnlyTheProtocol(40, model.vocab_size))
  output, = words_llm.generate(tokens(prompt(5)), greedy(3), use_tqdm=False)
  assert output.outputs[0].token_ids == [40, 40, 40]


@pytest.mark.parametrize("runner,message", [("auto", "modules.json has"), ("generate", "started")])
def test_serve_command_loads_a_model_as_its_runner_says(tmp_path, monkeypatch, runner, message):
  modules = [{"type": "sentence_transformers.models.CLSPooling"}]
  (tiny_model(tmp_path, words=True) / "modules.json").write_text(json.dumps(modules))
  monkeypatch.setattr(serve, "Server", Mock(side_effect=InputError("started")))
  args = parse_command("serve", tmp_path, "--port", 0, "--runner", runner)
  with pytest.raises(InputError, match=message): serve.main(args)


@pytest.mark.parametrize("function", ["concatenate", "zeros"])
def test_internal_value_error_is_not_an_input_error(llm, folder, function):
  ids = [5, 6, 7]
  error = ValueError("all the input array dimensions must match exactly")
  llm.add_request("a", tokens(ids), greedy(8))
  llm.step()
  with patch.object(np, function, side_effect=error), pytest.raises(ValueError, match="must match") as e: llm.step()
  assert not isinstance(e.value, InputError)
  check_invariants(llm)
  assert ids_of(run_to_end(llm, 100)["a"]) == reference_greedy(folder, ids, 8)
