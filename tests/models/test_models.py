"""The architectures of models/ compared with Hugging Face's classes, whose logits and greedy ids record_models.py
recorded in data/models. Prompts are longer than the windows and the original lengths of YaRN and LongRoPE."""
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from helpers.data import read_data
from helpers.engines import LogitsRecorder, check_logits, greedy, ids_of, prompt, tokens
from helpers.gguf_files import write_gguf
from helpers.models import VARIANTS, tiny_model
from helpers.parameters import mark_slow_except, slow
from helpers.record_models import DATA, MODELS, NUM_TOKENS, OPTIONS, make_prompts, make_weights, read, write_model
from tinygrad import dtypes, nn

import tinyvllm
from tinyvllm import LLM, InputError
from tinyvllm.backend import Devices, Linear
from tinyvllm_extra.formats import fit
from tinyvllm_extra.formats.architecture import choose_model, text_config
from tinyvllm_extra.models import MODELS as MODEL_CLASSES
from tinyvllm_extra.models import find_model
from tinyvllm_extra.models.ropes import scaled_rope_table

CONFIGS = read_data("model_configs.json")

CORE = "gemma2", "gpt2", "granite", "granite4", "muse_glimmer", "phi3_long", "qwen3_5"   # all but experts and sinks


def check_ids(llm, name, count=None):
  outputs = llm.generate([tokens(ids) for ids in make_prompts(name)[:count]], greedy(NUM_TOKENS))
  assert [ids_of(output) for output in outputs] == read(name)["ids"][:count]


def check_recorded(llm, name):
  """Compare each prompt's logits and ids, alone."""
  recorder, logits = LogitsRecorder(llm), np.load(DATA / f"{name}.npy")
  for prompt_ids, expected, ids in zip(make_prompts(name), logits, read(name)["ids"], strict=True):
    own_ids, own_logits = recorder.generate(prompt_ids, NUM_TOKENS)
    assert own_ids == ids
    np.testing.assert_allclose(own_logits[0], expected, atol=1e-4)


@pytest.mark.parametrize("name", mark_slow_except(("gemma3_vision",), MODELS))
def test_logits_and_ids_equal_recorded_ones(tmp_path, name):
  """Each prompt alone, then all batched, chunked, preempted (14 blocks) and through the prefix cache."""
  llm = LLM(write_model(tmp_path, name), **OPTIONS, num_gpu_blocks_override=14)
  check_recorded(llm, name)
  before = llm.get_metrics()
  check_ids(llm, name)
  for metric in ("prefix_cache_hits", "num_preemptions"): assert llm.get_metrics()[metric] > before[metric]


def test_matrices_of_all_experts_in_one_tensor_give_recorded_ids(tmp_path):
  """As published files have them: gate_up_proj, (experts, 2 * size, hidden), and down_proj, (experts, hidden, size)."""
  weights = make_weights(read("qwen3_5_moe")["shapes"], False)
  for layer in range(4):
    experts = f"model.layers.{layer}.mlp.experts."
    gate, up, down = [np.stack([weights.pop(f"{experts}{i}.{part}_proj.weight") for i in range(8)])
                      for part in ("gate", "up", "down")]
    weights |= {f"{experts}gate_up_proj": np.concatenate([gate, up], 1), f"{experts}down_proj": down}
  check_ids(LLM(write_model(tmp_path, "qwen3_5_moe", weights), **OPTIONS), "qwen3_5_moe")


@pytest.mark.parametrize("name", slow(*CORE))
def test_core_backend_equals_recorded_logits(tmp_path, name):
  check_recorded(LLM(write_model(tmp_path, name), backend=tinyvllm.Backend(), **{**OPTIONS, "max_num_seqs": 1}), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite", "ministral", "qwen3_vl", "smollm3"])
def test_two_devices_give_recorded_ids(tmp_path, name):
  check_ids(LLM(write_model(tmp_path, name), **OPTIONS, tensor_parallel_size=2), name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_variant_equals_reference(tmp_path, variant):
  """LLaMA against the numpy reference: a prompt in 3 chunks, then decodes, with graphs of 1, 2 and 4 tokens."""
  folder = tiny_model(tmp_path, seed=1, **VARIANTS[variant])
  check_logits(folder, folder, prompt(12), 12, max_num_seqs=4, max_num_batched_tokens=4)


# Checkpoints

@pytest.mark.parametrize("name,record", read_data("gguf_hybrids.json").items())
def test_gguf_of_hybrids_gives_recorded_logits(tmp_path, name, record):
  """record: of a file by llama.cpp's convert_hf_to_gguf.py, fields, CRC-32 of the tensors in float16, and shapes of a
  layer that drafts tokens, which is not loaded."""
  drafts, folder = {x: np.ones(shape) for x, shape in record["drafts"].items()}, write_model(tmp_path / "hf", name)
  path = write_gguf(tmp_path / "model.gguf", folder, metadata=record["fields"], tensors=drafts)
  tensors = {x.name: x.data.astype(np.float16) for x in GGUFReader(path).tensors if x.name not in drafts}
  assert {x: zlib.crc32(data.tobytes()) for x, data in tensors.items()} == record["tensors"]
  check_recorded(LLM(path, **OPTIONS), name)


@pytest.mark.parametrize("name,record", read_data("gguf_hybrids.json").items())
def test_quantized_gguf_of_hybrids_equals_dequantized(tmp_path, name, record):
  """Convolutions are not quantized, as in llama.cpp's files."""
  folder, metadata = write_model(tmp_path / "hf", name), record["fields"]
  drafts = {x: np.ones(shape) for x, shape in record["drafts"].items()}
  path = write_gguf(tmp_path / "quantized.gguf", folder, "Q8_0", kinds={"conv": "F32", "ssm_conv1d": "F32"},
                    metadata=metadata, tensors=drafts)
  tensors = {x.name: dequantize(x.data, x.tensor_type) for x in GGUFReader(path).tensors}
  plain = write_gguf(tmp_path / "plain.gguf", folder, metadata=metadata, tensors=tensors)
  llms = [LLM(x, **OPTIONS, activation_quantization="none") for x in (path, plain)]
  assert llms[0].runner.model.layers[0].in_proj.number_format.bits == 8
  ids, logits = zip(*[LogitsRecorder(llm).generate(make_prompts(name)[5], NUM_TOKENS) for llm in llms], strict=True)
  assert ids[0] == ids[1]
  np.testing.assert_allclose(*logits, atol=1e-4)


def add_prefix(name): return f"model.{name.replace('language_model.model.', 'language_model.')}"


@pytest.mark.parametrize("name,rename", [
  ("gemma3_vision", add_prefix), *slow(("mistral3", add_prefix)),
  ("gpt2", str), ("gpt2", lambda name: name.removeprefix("transformer.")), ("qwen3_5", str)])
def test_other_tensor_names_give_recorded_ids(tmp_path, name, rename):
  """Newer multimodal checkpoints have a prefix. Some of GPT-2 have none, and stored masks. Qwen3.5 may have an MTP."""
  weights = make_weights(read(name)["shapes"], "gemma" in name)
  if name == "gpt2":
    weights["transformer.h.0.attn.bias"] = np.tril(np.ones((1, 1, 128, 128)))
    weights["transformer.h.0.attn.masked_bias"] = np.full(1, -1e4)
  if name == "qwen3_5": weights["mtp.layers.0.input_layernorm.weight"] = np.ones(64)
  folder = write_model(tmp_path, name, {rename(x): weight for x, weight in weights.items()})
  check_ids(LLM(folder, **OPTIONS), name, 2)


# The least correlation measured on the CPU: 0.99998 in float16, 0.9976 in int8, 0.874 in int4; phi3_short has 0.9893 if
# its activations are int8, too
@pytest.mark.parametrize("name,options,limit", [
  ("gpt2", {"quantization": "int8"}, 0.995), *slow(
    ("phi3_short", {"quantization": "int8", "activation_quantization": "none"}, 0.99),
    ("gemma2", {"quantization": "int8"}, 0.99), ("qwen3_5", {"quantization": "int8"}, 0.98),
    ("gpt2", {"dtype": "float16"}, 0.9999), ("gpt2", {"quantization": "int4"}, 0.85))])
def test_narrow_weights_give_similar_logits(tmp_path, name, options, limit):
  recorder = LogitsRecorder(LLM(write_model(tmp_path, name), **OPTIONS | options))
  for ids, expected in zip(make_prompts(name), np.load(DATA / f"{name}.npy"), strict=True):
    assert np.corrcoef(recorder.generate(ids, 1)[1][0], expected)[0, 1] > limit


def config_of(name, remove=(), **fields):
  """Return a recorded model's options and tables of RoPE, read from config.json with other fields."""
  hf = {**text_config(read(name)["config"]), **fields}
  config, _ = find_model({x: value for x, value in hf.items() if x not in remove}, Path("x"))
  options = {x: value for x, value in vars(config).items() if x not in ("ropes", "rope_theta")}
  return options, np.stack([scaled_rope_table(config, rope, 64).numpy() for rope in config.ropes])


def test_position_embedding_type_counts_only_for_granite():
  """As transformers 5.24, whose other models ignore the field."""
  for name, counts in (("qwen3", False), ("granite4", True)):
    tables, others = config_of(name)[1], config_of(name, position_embedding_type="learned")[1]
    assert np.array_equal(tables, others) != counts


def test_muse_glimmer_reads_from_layer_rope_theta_only_which_layers_rotate():
  """As transformers 5.24: values other than 0 do not count."""
  thetas = text_config(read("muse_glimmer")["config"])["layer_rope_theta"]
  assert 0 in thetas and any(thetas)
  options, tables = config_of("muse_glimmer", layer_rope_theta=[7.0 * x for x in thetas])
  expected, expected_tables = config_of("muse_glimmer")
  assert options == expected
  np.testing.assert_array_equal(tables, expected_tables)


@pytest.mark.parametrize("name,fields", CONFIGS["older"])
def test_older_config_equals_newer(name, fields):
  """Before transformers 5, RoPE of windows had a field of its own or none, and layer_types was missing."""
  older, older_tables = config_of(name, ("rope_parameters", "layer_types"), **fields)
  newer, newer_tables = config_of(name)
  assert older == newer
  np.testing.assert_array_equal(older_tables, newer_tables)


@pytest.mark.parametrize("hf,options", CONFIGS["published"])
def test_published_config_gives_the_models_options(hf, options):
  """google/gemma-3-4b-it has only these fields. YaRN extends the context as Qwen's model cards say."""
  config, _ = choose_model(hf, Path("x"))
  assert json.loads(json.dumps({name: getattr(config, name) for name in options})) == options


def test_every_architecture_is_recorded_and_documented():
  page = (Path(tinyvllm.__file__).parents[1] / "examples/docs/models-and-quantization.md").read_text()
  assert not [name for name in MODEL_CLASSES if f"`{name}`" not in page]
  recorded = {architecture for name in MODELS for architecture in read(name)["config"]["architectures"]}
  assert recorded | {"LlamaForCausalLM"} == {*MODEL_CLASSES}


@pytest.mark.parametrize("name,limit", [("gpt2", 128), ("ministral3", 64)])
def test_positions_limit_max_model_len(tmp_path, name, limit):
  """GPT-2 has learned positions, Ministral 3 scales of positions."""
  with pytest.raises(InputError, match=f"max_model_len={limit + 1} must be at most the model's {limit}"):
    LLM(write_model(tmp_path, name), **{**OPTIONS, "max_model_len": limit + 1})


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "granite4", "granite_swa", "mixtral", "olmo2", "phi3", "qwen3_5"])
def test_several_devices_raise(name):
  config, model_class = find_model(read(name)["config"], Path("x"))
  with pytest.raises(InputError, match="tensor_parallel_size=2 must be 1"):
    model_class(config, dtypes.float32, tinyvllm.Backend(), Devices(("CPU", "CPU:1")))


@pytest.mark.parametrize("name", ["gemma3_vision", "gpt2", "gpt_oss", "qwen3_moe"])
def test_estimated_weights_equal_loaded_ones(tmp_path, monkeypatch, name):
  """From the tensors and from config.json. Also of layers that are named differently, and of experts in one tensor."""
  sizes: dict = {}
  monkeypatch.setattr(fit, "check_memory", lambda checkpoint, _: sizes.update(
    {quantization: fit.checkpoint_bytes(checkpoint, quantization) for quantization in (None, "int8")}))
  model = LLM(write_model(tmp_path, name), **OPTIONS).runner.model
  assert sizes[None] == sum(x.nbytes() for module in model.modules() for x in nn.state.get_parameters(module))
  facts = read_data("doctor.json")["facts"]["CPU"]
  estimate = fit.estimate_fit(name, json.loads((tmp_path / "config.json").read_text()), facts)
  assert estimate["weights_gib"] * fit.GIB == sizes[None] and estimate["fits"]
  matrices = sum(x.weight.nbytes() for layer in model.layers for x in vars(layer).values() if isinstance(x, Linear))
  assert sizes["int8"] == sizes[None] - matrices + int(matrices / 32 * fit.QUANTIZED["int8"])


@pytest.mark.parametrize("name,field,value", CONFIGS["unsupported"])
def test_unsupported_value_raises_with_architecture(name, field, value):
  hf = {**text_config(read(name)["config"]), field: value}
  with pytest.raises(InputError, match=f"{field}=.* is not supported in {hf['architectures'][0]}; supported: "):
    find_model(hf, Path("x"))


@pytest.mark.parametrize("name", CONFIGS["unsupported architectures"])
def test_unsupported_architecture_raises_with_supported_ones(name):
  with pytest.raises(InputError, match=f"'{name}' is not supported; supported: .*Qwen3_5ForCausalLM"):
    choose_model({"architectures": [name], "text_config": {"layer_types": ["linear_attention"]}}, Path("x"))


@pytest.mark.parametrize("backend", [None, tinyvllm.Backend()], ids=["fast", "core"])
@pytest.mark.parametrize("dtype", ["float16", "half"])
def test_float16_that_overflows_raises_with_remedy(tmp_path, dtype, backend):
  folder = write_model(tmp_path, "gemma2")
  with pytest.raises(InputError, match="dtype='(float16|half)' overflows .*use 'auto', 'bfloat16' or 'float32'"):
    LLM(folder, backend=backend, **{**OPTIONS, "dtype": dtype})


def test_auto_dtype_of_model_that_overflows_is_not_float16(tmp_path):
  assert LLM(write_model(tmp_path, "gemma2"), **{**OPTIONS, "dtype": "auto"}).config.dtype in ("bfloat16", "float32")
