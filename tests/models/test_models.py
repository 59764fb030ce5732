"""The architectures of models/ compared with Hugging Face's classes, whose logits and greedy ids record_models.py
recorded in data/models. Prompts are longer than the windows and the original lengths of YaRN and LongRoPE. Models with
recurrent states, and the delta rule."""
import functools
import json
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from helpers.commands import ROOT
from helpers.data import read_data
from helpers.engines import (LogitsRecorder, assert_all_blocks_freed, check_logits, check_states, greedy, ids_of,
                             ids_of_batch, prompt, set_overlap, tokens)
from helpers.faults import break_steps, run_random
from helpers.gguf_files import write_gguf
from helpers.kernels import on_device
from helpers.models import VARIANTS, tiny_model
from helpers.parameters import mark_slow_except, slow
from helpers.record_models import DATA, MODELS, NUM_TOKENS, OPTIONS, make_prompts, make_weights, read, write_model
from tinygrad import Device, Tensor, dtypes, nn

from tinyvllm import LLM, Backend, InputError
from tinyvllm.backend import Linear
from tinyvllm_extra.cache import snapshots
from tinyvllm_extra.formats import fit
from tinyvllm_extra.kernels import parallel
from tinyvllm_extra.models import choose_model, text_config
from tinyvllm_extra.models import MODELS as MODEL_CLASSES, find_model
from tinyvllm_extra.models.layers import scaled_rope_table
from tinyvllm_extra.models.recurrent import POSITION, SLOT, delta_kernel
from tinyvllm_extra.sampling import speculation

CONFIGS = read_data("model_configs.json")

TWO_DEVICES = pytest.mark.skipif(Device.DEFAULT != "CPU" and Device.default.count() < 2, reason="needs two devices")
CORE = "gemma2", "gpt2", "granite", "granite4", "muse_glimmer", "phi3_long", "qwen3_5"   # all but experts and sinks


def check_ids(llm, name, count=None):
  assert ids_of_batch(llm, make_prompts(name)[:count], greedy(NUM_TOKENS)) == read(name)["ids"][:count]


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
  check_recorded(LLM(write_model(tmp_path, name), backend=Backend(), **{**OPTIONS, "max_num_seqs": 1}), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite", "ministral", "qwen3_vl", "smollm3"])
def test_two_devices_give_recorded_ids(tmp_path, name):
  check_ids(LLM(write_model(tmp_path, name), **OPTIONS, tensor_parallel_size=2), name)


@TWO_DEVICES
@pytest.mark.parametrize("name", mark_slow_except(("gemma3", "gpt2", "gpt_oss", "qwen3_5"), MODELS))
def test_layers_on_two_devices_give_recorded_ids(tmp_path, name, monkeypatch):
  """In micro-batches of 4 tokens, and decodes in groups."""
  monkeypatch.setattr(parallel, "MICRO_BATCH", 4)
  llm = LLM(write_model(tmp_path, name), **OPTIONS, pipeline_parallel_size=2)
  set_overlap(monkeypatch, llm.runner, "early")
  check_ids(llm, name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_variant_equals_reference(tmp_path, variant):
  """LLaMA against the numpy reference: a prompt in 3 chunks, then decodes, with graphs of 1, 2 and 4 tokens."""
  folder = tiny_model(tmp_path, seed=1, **VARIANTS[variant])
  check_logits(folder, folder, prompt(12), 12, max_num_seqs=4, max_num_batched_tokens=4)


# Checkpoints

@pytest.mark.parametrize("name,record", read_data("gguf_hybrids.json").items())
def test_gguf_of_hybrids_gives_recorded_logits_or_its_quantized_ones(tmp_path, name, record):
  """record: of a file by llama.cpp's convert_hf_to_gguf.py, fields, CRC-32 of the tensors in float16, and shapes of a
  layer that drafts tokens, which is not loaded."""
  drafts, folder = {x: np.ones(shape) for x, shape in record["drafts"].items()}, write_model(tmp_path / "hf", name)
  write = functools.partial(write_gguf, folder=folder, metadata=record["fields"])
  path = write(tmp_path / "model.gguf", tensors=drafts)
  tensors = {x.name: x.data.astype(np.float16) for x in GGUFReader(path).tensors if x.name not in drafts}
  assert {x: zlib.crc32(data.tobytes()) for x, data in tensors.items()} == record["tensors"]
  check_recorded(LLM(path, **OPTIONS), name)
  kinds = {"conv": "F32", "ssm_conv1d": "F32"}   # convolutions are not quantized, as in llama.cpp's files
  path = write(tmp_path / "quantized.gguf", kind="Q8_0", kinds=kinds, tensors=drafts)
  plain = write(tmp_path / "plain.gguf", tensors={
    x.name: dequantize(x.data, x.tensor_type) for x in GGUFReader(path).tensors})
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
NARROW = [*map(tuple, CONFIGS["narrow weights"])]


@pytest.mark.parametrize("name,options,limit", mark_slow_except(NARROW[:1], NARROW))
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


@pytest.mark.parametrize("name,removed,fields", CONFIGS["equal"])
def test_older_or_other_fields_give_the_same_config(name, removed, fields):
  other, other_tables = config_of(name, removed, **fields)
  options, tables = config_of(name)
  assert other == options
  np.testing.assert_array_equal(other_tables, tables)


@pytest.mark.parametrize("hf,options", CONFIGS["published"])
def test_published_config_gives_the_models_options(hf, options):
  """google/gemma-3-4b-it has only these fields. YaRN extends the context as Qwen's model cards say."""
  config, _ = choose_model(hf, Path("x"))
  assert json.loads(json.dumps({name: getattr(config, name) for name in options})) == options


def test_every_architecture_is_recorded_and_documented():
  page = (ROOT / "examples/docs/models-and-quantization.md").read_text()
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
    model_class(config, dtypes.float32, Backend(), parallel.ShardedDevices(("CPU", "CPU:1")))


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


@pytest.mark.parametrize("backend", [None, Backend()], ids=["fast", "core"])
@pytest.mark.parametrize("dtype", ["float16", "half"])
def test_float16_that_overflows_raises_with_remedy(tmp_path, dtype, backend):
  folder = write_model(tmp_path, "gemma2")
  with pytest.raises(InputError, match="dtype='(float16|half)' overflows .*use 'auto', 'bfloat16' or 'float32'"):
    LLM(folder, backend=backend, **{**OPTIONS, "dtype": dtype})


def test_auto_dtype_of_model_that_overflows_is_not_float16(tmp_path):
  assert LLM(write_model(tmp_path, "gemma2"), **{**OPTIONS, "dtype": "auto"}).config.dtype in ("bfloat16", "float32")


# Models with recurrent states: what a step writes in place, snapshots, drafts and failures

PROMPTS = make_prompts("lfm2")   # of all hybrids
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5", *slow("qwen3_5_moe")])
def folder(request, tmp_path_factory):
  return write_model(tmp_path_factory.mktemp("hybrid") / request.param, request.param)


@pytest.fixture
def ids(folder): return read(folder.name)["ids"]


@pytest.fixture(scope="module")
def llm(folder): return LLM(folder, **OPTIONS)


@pytest.mark.parametrize("overlaps", ["", "overlapped", "early"])
def test_ids_do_not_depend_on_when_results_are_read(llm, ids, monkeypatch, overlaps):
  set_overlap(monkeypatch, llm.runner, overlaps)
  for _ in range(2): assert ids_of_batch(llm, PROMPTS, greedy(NUM_TOKENS)) == ids


def test_next_turns_compute_only_the_new_tokens(llm):
  """Each turn's prompt is the whole conversation so far, with the generated answers."""
  conversation = [*PROMPTS[4]]
  whole = LLM(llm.path, **OPTIONS, enable_prefix_caching=False)
  for turn in range(3):
    with assert_all_blocks_freed(llm) as before: output, = llm.generate([tokens(conversation)], greedy(7))
    assert ids_of(output) == ids_of_batch(whole, [conversation], greedy(7))[0]
    hits = llm.get_metrics()["prefix_cache_hits"] - before["prefix_cache_hits"]
    if turn: assert hits >= len(conversation) - 3 - 2 * OPTIONS["block_size"]
    conversation += [*ids_of(output), 5, 6, 7]


def test_snapshots_are_before_the_last_block_of_a_prompt_and_at_the_end_of_an_answer(folder, ids, tmp_path):
  """A prompt of 23 tokens in chunks of at most 8: steps end at 8, 16, 20 and 23, then at 24, 25, ..., 39."""
  llm, conversation = LLM(folder, **OPTIONS, trace=str(tmp_path / "trace")), PROMPTS[5] + ids[5]
  ids_of_batch(llm, [PROMPTS[5]], greedy(17))
  for length, num_cached in ((23, 20), (33, 20), (23, 20)):
    output, = llm.generate([tokens(conversation[:length])], greedy(1))
    assert output.num_cached_tokens == num_cached
  ids_of_batch(llm, [PROMPTS[5]], greedy(NUM_TOKENS))
  output, = llm.generate([tokens(conversation)], greedy(1))
  assert output.num_cached_tokens == 32
  assert llm.get_metrics()["state_snapshots"] == 3, "at 20, 32 and 36"
  assert llm.get_metrics()["state_snapshot_hits"] == 5
  llm.shutdown()
  states = [json.loads(line)["states"] for line in (tmp_path / "trace").read_text().splitlines()[1:]]
  assert [position for x in states[:6] for _, position in x["positions"]] == [8, 16, 20, 23, 24, 25]
  assert states[-1].items() >= {"state_snapshots": 3, "state_snapshot_hits": 5}.items()


def test_samples_of_a_prompt_share_its_snapshot(llm, ids):
  output, = llm.generate([tokens(PROMPTS[6])], greedy(NUM_TOKENS, n=3, temperature=0.0))
  assert [sample.token_ids for sample in output.outputs] == [ids[6]] * 3


@pytest.mark.parametrize("seed", [0, 1, 2, pytest.param(3, marks=TWO_DEVICES)])
def test_random_failures_and_aborts_change_no_ids(folder, ids, monkeypatch, seed):
  """Few blocks, so that sequences are preempted, and snapshots, so that they are replaced. The last seed's layers are
  on two devices."""
  rng = random.Random(seed)
  monkeypatch.setattr(parallel, "MICRO_BATCH", 2)
  monkeypatch.setattr("tinyvllm_extra.cache.snapshots.MAX_SNAPSHOTS", 1)
  llm = LLM(folder, **OPTIONS, num_gpu_blocks_override=18, pipeline_parallel_size=1 + seed // 3)
  num_rows = len(llm.states.free_rows)
  set_overlap(monkeypatch, llm.runner, ["", "overlapped", "early", "overlapped"][seed])
  break_steps(llm, monkeypatch, lambda place: rng.random() < 0.03)
  requests, last, _ = run_random(llm, rng, 240, lambda: (rng.choice(PROMPTS[:8]), greedy(rng.randint(1, NUM_TOKENS))),
                                 lambda: check_states(llm.states, num_rows))
  assert len(last) > 20
  for name, (prompt_ids, params) in requests.items():
    assert ids_of(last[name]) == ids[PROMPTS.index(prompt_ids)][:params.max_tokens]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=TWO_DEVICES)])
def test_drafts_change_no_ids(folder, ids, monkeypatch, count):
  """Drafts with errors at random places: the state before them returns, and accepted tokens are computed again."""
  rng = random.Random(1)
  known = [prompt + answer for prompt, answer in zip(PROMPTS, ids, strict=True)]

  def propose(self, seen, n):
    rest = next((x[len(seen):] for x in known if x[:len(seen)] == seen), [])[:n]
    return [token if rng.random() < 0.7 else token ^ 1 for token in rest]
  monkeypatch.setattr(speculation.Drafter, "propose", propose)
  monkeypatch.setattr(speculation.SpeculativeProposer, "needs_sync", lambda *_: True)
  llm = LLM(folder, **OPTIONS, speculative_config=DRAFTS, pipeline_parallel_size=count)
  for _ in range(2): assert ids_of_batch(llm, PROMPTS, greedy(NUM_TOKENS)) == ids
  metrics = llm.get_metrics()
  assert 0 < metrics["spec_decode_num_accepted_tokens"] < metrics["spec_decode_num_draft_tokens"]


def test_what_states_do_not_support_is_refused(folder, llm, tmp_path, monkeypatch):
  with pytest.raises(InputError, match="tensor_parallel_size"): LLM(folder, **OPTIONS, tensor_parallel_size=2)
  ids_of_batch(llm, [PROMPTS[6]], greedy(NUM_TOKENS))
  with pytest.raises(InputError, match="recurrent layers cannot be saved"): llm.save_prefix_cache(tmp_path / "cache")
  draft = {"model": str(folder), "num_speculative_tokens": 2}
  with pytest.raises(InputError, match="recurrent layers, which a draft model must not have"):
    LLM(folder, **OPTIONS, speculative_config=draft)
  monkeypatch.setattr(snapshots, "state_shapes", lambda config: [(2, 2**40), ()])
  with pytest.raises(InputError, match="max_num_seqs=4 needs .* of recurrent states"): LLM(folder, **OPTIONS)


# The kernel of the gated delta rule beside the recurrence of arXiv:2412.06464 in numpy, in float64

K, V, HEADS, KEYS, ROWS = 32, 16, 4, 2, 6   # sizes of a head's S, heads, heads of q and k, rows of states


def naive(states: np.ndarray, slot: int, x: np.ndarray, gates: np.ndarray, groups: int) -> np.ndarray:
  """Compute a token of a sequence, (HEADS, V), and change its states, (HEADS, K, V)."""
  qk, v = x[:2 * KEYS * K].reshape(2, KEYS, K), x[2 * KEYS * K:].reshape(HEADS, V)
  q, k = qk / np.sqrt(np.square(qk).sum(-1, keepdims=True) + 1e-6)
  outputs = []
  for h, (decay, beta) in enumerate(gates):
    key, S = h * groups // HEADS % KEYS, states[slot, h]
    S *= decay
    S += np.outer(k[key], (v[h] - k[key] @ S) * beta)
    outputs.append(q[key] @ S * K**-0.5)
  return np.array(outputs)


@pytest.mark.parametrize("groups", [2, 4])
def test_steps_of_several_sequences_equal_the_recurrence(groups):
  """Each step has chunks of different lengths, decodes and, at position 0, new sequences in slots with old states."""
  rng, used, expected = np.random.default_rng(0), dict.fromkeys(range(5), 0), np.zeros((ROWS, HEADS, K, V))
  states = on_device(rng.standard_normal((ROWS, 3 + HEADS * K * V)).astype(np.float32))   # the 3: a convolution's
  before = states.numpy()
  for lengths in ({0: 5, 3: 2, 1: 1}, {1: 1, 3: 7}, {0: 1, 1: 1, 2: 1, 3: 1, 4: 4}, {2: 8}):
    slots = [slot for slot, n in lengths.items() for _ in range(n)]
    positions = [used[slot] + i for slot, n in lengths.items() for i in range(n)]
    for slot, n in lengths.items(): used[slot] += n
    x = rng.standard_normal((8, 2 * KEYS * K + HEADS * V)).astype(np.float32)
    gates, tokens = rng.uniform(0.3, 1, (8, HEADS, 2)).astype(np.float32), np.zeros((4, 8), np.int32)
    tokens[SLOT], tokens[POSITION] = slots, positions
    units = 1 / np.sqrt(np.square(x[:, :2 * KEYS * K].reshape(8, 2, KEYS, K)).sum(-1) + 1e-6)   # (8, 2, KEYS)
    factors = units[:, :, [h * groups // HEADS % KEYS for h in range(HEADS)]]
    inputs = np.concatenate([gates.transpose(2, 0, 1), factors.transpose(1, 0, 2)]).astype(np.float32)
    out, states, *_ = Tensor.empty(8, HEADS, V).custom_kernel(
      states, on_device(x), on_device(inputs), on_device(tokens),
      fxn=functools.partial(delta_kernel, K=K, groups=groups))
    Tensor.realize(out, states)
    rows = zip(slots, x.astype(np.float64), gates, strict=True)
    correct = [naive(expected, *row, groups) for row in rows]
    np.testing.assert_allclose(out.numpy(), correct, atol=1e-5)
  np.testing.assert_array_equal(states.numpy()[5], before[5])             # no sequence has this row
  np.testing.assert_array_equal(states.numpy()[:, :3], before[:, :3])
