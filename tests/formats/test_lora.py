"""Adapters that are merged while a model loads, or that each request chooses; tests/outside/test_adapters.py compares
results with PEFT."""
import asyncio
import json
from unittest.mock import patch

import numpy as np
import pytest
from helpers.data import read_data
from helpers.commands import FLAGS, error_line, run_command
from helpers.engines import ENGINE, greedy, ids_of, prompt, tokens
from helpers.gguf_files import write_gguf
from helpers.models import tensor_shapes, tiny_config
from helpers.protocol import KEY
from helpers.servers import LocalServer, error_of
from safetensors.numpy import save_file
from tinygrad import codegen
from tinygrad.helpers import CACHELEVEL

from tinyvllm import LLM, AsyncLLM, Backend, BeamSearchParams, InputError, LoRARequest

CASES = read_data("adapters.json")
NAME = "model.layers.0.mlp.down_proj"
SHAPES = {x.removesuffix(".weight"): shape for x, shape in tensor_shapes(tiny_config()).items() if "_proj" in x}


def lora_folder(path, seed, rank=4, size=0.4, only="", shapes=SHAPES, **fields):
  """Write an adapter with random matrices of the tiny model, those whose names end with `only`. Return its folder."""
  rng, tensors = np.random.default_rng(seed), {}
  for name, (rows, columns) in shapes.items():
    if not name.endswith(only): continue
    tensors[f"base_model.model.{name}.lora_A.weight"] = rng.standard_normal((rank, columns), np.float32)
    tensors[f"base_model.model.{name}.lora_B.weight"] = size * rng.standard_normal((rows, rank), np.float32)
  path.mkdir(exist_ok=True)
  save_file(tensors, path / "adapter_model.safetensors")
  config = {"peft_type": "LORA", "lora_alpha": 2, "bias": "none", **fields}
  (path / "adapter_config.json").write_text(json.dumps(config))
  return str(path)


@pytest.fixture
def adapter(tmp_path):
  def make(name=NAME, rows=32, **fields):
    return lora_folder(tmp_path, 0, 2, 1.0, shapes={name: (rows, 64)}, lora_alpha=8, **fields)
  return make


@pytest.mark.parametrize("fields,message", CASES["merged"])
def test_adapter_that_does_not_fit_is_refused(folder, adapter, fields, message):
  with pytest.raises(InputError, match=f"merge_lora.*{message}"): LLM(folder, merge_lora=adapter(**fields), **ENGINE)


def test_half_of_an_adapter_is_refused(folder, adapter, tmp_path):
  path, half = adapter(), {f"base_model.model.{NAME}.lora_A.weight": np.zeros((2, 64), np.float32)}
  save_file(half, tmp_path / "adapter_model.safetensors")
  with pytest.raises(InputError, match="layers.0.mlp.down_proj lacks lora_A or lora_B"): LLM(folder, merge_lora=path)


def test_layers_of_the_core_are_merged_too(folder, adapter):
  def ids(**options): return ids_of(LLM(folder, **ENGINE, **options).generate(tokens(prompt(9)), greedy(9), False)[0])
  merged = ids(merge_lora=adapter())
  assert merged != ids() and merged == ids(merge_lora=adapter(), backend=Backend())


def test_adapter_changes_outputs_and_cannot_be_in_a_saved_prefix_cache(folder, adapter, tmp_path):
  with LLM(folder, **ENGINE) as llm: before = ids_of(llm.generate(tokens(prompt(9)), greedy(9), False)[0])
  with LLM(folder, merge_lora=adapter(), quantization="int8", **ENGINE) as llm:
    assert ids_of(llm.generate(tokens(prompt(9)), greedy(9), False)[0]) != before
    with pytest.raises(InputError, match="merge_lora: prefix caches"): llm.save_prefix_cache(tmp_path / "cache")
  command = "generate", "the cat", "--model", folder, *FLAGS, "--merge-lora", tmp_path / "missing"
  assert "has no adapter_config.json: name a folder that PEFT wrote" in error_line(run_command(*command))


# Adapters by request. The reference is a model into which the adapter is merged, which tests/outside compares with PEFT

JOBS = [(tokens(prompt(n, n, adapter)), adapter) for n in (3, 30, 9) for adapter in ("", "a", "b")]


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
  """Two adapters of other ranks and matrices, and none."""
  path = tmp_path_factory.mktemp("loras")
  a, b = lora_folder(path / "a", 1), lora_folder(path / "b", 2, rank=7, only=("q_proj", "o_proj", "down_proj"))
  return {"": None, "a": LoRARequest("a", 1, a), "b": LoRARequest("b", 2, b)}


@pytest.fixture(scope="module")
def llm(folder):
  with LLM(folder, enable_lora=True, max_loras=2, **ENGINE) as llm: yield llm


@pytest.fixture(scope="module")
def expected(folder, loras):
  """The ids of each job, from three models."""
  ids = {}
  for name, lora in loras.items():
    with LLM(folder, **ENGINE, merge_lora=lora and lora.lora_path) as llm:
      ids |= {str(job): ids_of(llm.generate(job, greedy(12), False)[0]) for job, adapter in JOBS if adapter == name}
  assert len({*map(str, ids.values())}) == len(JOBS)
  return [ids[str(job)] for job, _ in JOBS]


def generate(llm, loras):
  outputs = llm.generate([job for job, _ in JOBS], greedy(12), False, lora_request=[loras[name] for _, name in JOBS])
  return [*map(ids_of, outputs)], [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("options", CASES["options"])
def test_sequences_of_a_batch_have_their_own_adapters(folder, loras, expected, options):
  with LLM(folder, enable_lora=True, **{"max_loras": 2, **ENGINE, **options}) as llm:
    ids, cached = generate(llm, loras)
    assert ids == expected and not any(cached)
    ids, cached = generate(llm, loras)   # of each adapter's own blocks
    assert ids == expected and (cached == [0] * 3 + [28] * 3 + [8] * 3 or "num_gpu_blocks_override" in options)
    assert bool(llm.get_metrics()["num_preemptions"]) == ("num_gpu_blocks_override" in options)


def test_steps_without_adapters_have_graphs_of_their_own(folder, loras, monkeypatch):
  with LLM(folder, enable_lora=True, cudagraph_capture_sizes=[4], **ENGINE) as llm:
    launch, plans = llm.runner.launch, []
    monkeypatch.setattr(llm.runner, "launch", lambda step: plans.append(step.key.plan) or launch(step))
    for lora in (None, loras["a"], None):
      plans.clear()
      llm.generate("the", greedy(2), False, lora_request=lora)
      assert [bool(plan and plan.has_adapters) for plan in plans] == [bool(lora)] * 2


def test_steps_from_disk_read_this_engines_adapters(folder, loras, expected, monkeypatch, tmp_path):
  monkeypatch.setattr(CACHELEVEL, "value", 2)
  monkeypatch.setattr(codegen.do_to_program, "path", tmp_path)
  files = []
  for _ in range(2):
    with LLM(folder, enable_lora=True, max_loras=2, **ENGINE) as llm: assert generate(llm, loras)[0] == expected
    files.append({*tmp_path.iterdir()})
  assert files[0] == files[1], "the second engine captured a step"


def test_adapter_of_a_quantized_or_gguf_model_stays_separate(folder, loras, expected, tmp_path):
  write_gguf(tmp_path / "tiny.gguf", folder)
  with LLM(tmp_path / "tiny.gguf", enable_lora=True, max_loras=2, **ENGINE) as llm:
    assert generate(llm, loras)[0] == expected
  nothing = LoRARequest("nothing", 3, lora_folder(tmp_path / "nothing", 3, size=0))
  with LLM(folder, enable_lora=True, quantization="int8", **ENGINE) as llm:
    plain, zeros, other = [llm.generate([job for job, _ in JOBS], greedy(12), False, lora_request=x)
                           for x in (None, nothing, loras["a"])]
    assert [*map(ids_of, plain)] == [*map(ids_of, zeros)] != [*map(ids_of, other)]


def test_other_methods_take_an_adapter(folder, llm, loras):
  params, job, lora = BeamSearchParams(beam_width=2, max_tokens=4), tokens(prompt(9)), loras["a"]
  engine = AsyncLLM(folder, enable_lora=True, **ENGINE)
  async def run():
    return [i async for output in engine.generate(job, greedy(6), lora_request=lora) for i in ids_of(output)]
  with LLM(folder, merge_lora=lora.lora_path, **ENGINE) as merged:
    beams = llm.beam_search([job], params, lora_request=lora), merged.beam_search([job], params)
    assert [x.tokens for x in beams[0][0].sequences] == [x.tokens for x in beams[1][0].sequences]
    expected = ids_of(merged.generate(job, greedy(6), False)[0])
  assert asyncio.run(run()) == expected
  engine.shutdown()


def test_embedding_with_an_adapter(folder, loras):
  def vector(prompt, **options):
    with LLM(folder, runner="pooling", **options, **ENGINE) as llm: return llm.embed(prompt)[0].outputs.embedding
  job, adapter = tokens(prompt(9)), loras["a"]
  own = vector({**job, "lora_request": adapter}, enable_lora=True)
  assert own == pytest.approx(vector(job, merge_lora=adapter.lora_path), abs=1e-5)
  assert own != pytest.approx(vector(job), abs=0.1)


def test_adapters_are_loaded_and_removed_while_requests_run(folder, loras, expected, tmp_path):
  with LLM(folder, enable_lora=True, **ENGINE) as llm:
    for i, (job, name) in enumerate(JOBS):
      llm.add_request(str(i), {**job, "lora_request": loras[name]} if name else job, greedy(12))
    outputs, other = {}, LoRARequest("a", 1, lora_folder(tmp_path / "a", 4))   # the same name and id, other weights
    while llm.has_unfinished_requests():
      outputs |= {output.request_id: ids_of(output) for output in llm.step()}
      llm.remove_lora(1)   # requests finish with it
      llm.add_lora(other)
    assert [outputs[str(i)] for i in range(len(JOBS))] == expected
    ids, cached = generate(llm, {**loras, "a": other})
    with LLM(folder, merge_lora=other.lora_path, **ENGINE) as merged:
      right = [ids_of(merged.generate(job, greedy(12), False)[0]) if name == "a" else ids
               for (job, name), ids in zip(JOBS, expected, strict=True)]
    assert ids == right and cached == [0, 0, 0, 28, 0, 28, 8, 0, 8]
    assert llm.remove_lora(1) and not llm.remove_lora(1)


def test_failed_copy_to_the_device_is_repeated(folder, loras, expected):
  with LLM(folder, enable_lora=True, **ENGINE) as llm:
    def ids(): return ids_of(llm.generate(JOBS[1][0], greedy(12), False, lora_request=loras["a"])[0])
    failure = patch("tinyvllm_extra.kernels.buffers.copy_to_devices", side_effect=[None, MemoryError])
    with failure, pytest.raises(MemoryError): ids()
    assert ids() == expected[1]


@pytest.mark.parametrize("change,message", CASES["requested"])
def test_adapter_of_a_request_that_does_not_fit_is_refused(llm, loras, expected, tmp_path, change, message):
  with pytest.raises(InputError, match=message):
    llm.generate("the", greedy(2), lora_request=LoRARequest("c", 3, lora_folder(tmp_path / "c", 3, **change)))
  assert generate(llm, loras)[0] == expected   # it works as before


def test_mistakes_with_adapters_are_explained(folder, llm, loras, tmp_path):
  llm.add_lora(loras["a"])
  for lora, message in (([loras["a"]] * 2, "lora_request: 2 for 1 prompts"),
                        (LoRARequest("b", 5, str(tmp_path)), "lora_path='.*' has no adapter_config.json"),
                        (LoRARequest("b", 1, loras["b"].lora_path), "lora_int_id=1 is LoRAReq.*: choose another id")):
    with pytest.raises(InputError, match=message): llm.generate("the", greedy(2), False, lora_request=lora)
  with pytest.raises(InputError, match="enable_lora=True must be False: this backend"):
    LLM(folder, enable_lora=True, backend=Backend(), **ENGINE)
  with pytest.raises(InputError, match="tensor_parallel_size=2 must be 1 with enable_lora"):
    LLM(folder, enable_lora=True, tensor_parallel_size=2, **ENGINE)


# The server

FLAGS_OF_LORA = "--enable-lora", "--max-loras", "2", "--served-model-name", "base", "--dtype", "float32"


def test_server_lists_loads_and_unloads_adapters(chat_folder, loras, tmp_path, monkeypatch):
  monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "true")
  body = {"prompt": "the cat", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
  a, b = (loras[name].lora_path for name in "ab")
  texts = [LLM(chat_folder, **ENGINE, merge_lora=path).generate("the cat", greedy(8), False)[0].outputs[0].text
           for path in (None, a, b)]
  with LocalServer(chat_folder, *FLAGS_OF_LORA, "--lora-modules", f"a={a}") as server:
    def text(model):
      answer = server.post("/v1/completions", {**body, "model": model}).json()
      assert answer["model"] == model
      return answer["choices"][0]["text"]
    assert [text("base"), text("a")] == texts[:2]
    def load(status, **fields):
      response = server.post("/v1/load_lora_adapter", {"lora_name": "b", "lora_path": b, **fields})
      return response.text if response.status_code == status == 200 else error_of(response, status)["message"]
    assert load(404, lora_path="/missing") == "lora_path='/missing' is not a folder of the server: choose one"
    assert "has no adapter_config.json" in load(400, lora_path=str(tmp_path))
    assert load(409, lora_name="a") == load(409, lora_name="base").replace("base", "a") == (
      "lora_name='a' is in use: unload that one or choose another name")
    assert load(200) == "Success: LoRA adapter 'b' added successfully."
    assert text("b") == texts[2]
    chat = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 3}
    assert server.post("/v1/chat/completions", {**chat, "model": "b"}).json()["model"] == "b"
    models = [(x["id"], x["root"], x["parent"]) for x in server.get("/v1/models").json()["data"]]
    assert models == [("base", "base", None), ("a", a, "base"), ("b", b, "base")]
    error = error_of(server.post("/v1/embeddings", {"model": "a", "input": "a"}), 400)
    assert error["message"] == "model='a' is an adapter: use 'base'"
    removed = server.post("/v1/unload_lora_adapter", {"lora_name": "a"})
    assert removed.text == "Success: LoRA adapter 'a' removed successfully."
    assert error_of(server.post("/v1/completions", {**body, "model": "a"}), 404)["param"] == "model"
    error_of(server.post("/v1/unload_lora_adapter", {"lora_name": "a"}), 404)
    assert [text("base"), text("b")] == [texts[0], texts[2]]


def test_adapter_with_the_models_name_is_refused_at_start_in_one_line(chat_folder, loras):
  words = "--lora-modules", f"base={loras['a'].lora_path}"
  with pytest.raises(RuntimeError, match="^lora_name='base' is in use"):
    LocalServer(chat_folder, *FLAGS_OF_LORA, *words)


def test_routes_that_load_adapters_need_a_key_or_a_variable(chat_folder, loras, monkeypatch):
  body = {"lora_name": "a", "lora_path": loras["a"].lora_path}
  for value, options, status in (("", (), 404), ("0", (), 404), ("0", ("--api-key", "secret"), 200)):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", value)
    with LocalServer(chat_folder, *FLAGS_OF_LORA, *options) as server:
      assert server.post("/v1/load_lora_adapter", body, headers=KEY).status_code == status
