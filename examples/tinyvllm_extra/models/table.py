"""Architectures like LLaMA: a row has the options of its layers, read from config.json. To add one, write a function
like `granite` and add it to ROWS, under its name in config.json's `architectures`."""
import pathlib
from collections.abc import Callable

from tinyvllm.config import JsonObject, ModelConfig, check, read_json
from tinyvllm.llama import Llama

from .experts import Mixture
from .layers import LlamaVariant, VariantConfig
from .ropes import ROPE_TYPES, read_rope

TABLES = read_json(pathlib.Path(__file__).with_suffix(".json"))   # defaults of architectures, names of tensors
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}   # a method of Tensor, whose gelu is the tanh approximation
Reader = Callable[[JsonObject, pathlib.Path], tuple[ModelConfig, type[Llama]]]   # reads config.json


def windows(hf: JsonObject, default: Callable[[int], bool] = lambda i: True) -> JsonObject:
  """Return each layer's window. default: whether layer i has one, if config.json has no layer_types."""
  types = hf.get("layer_types") or ["sliding" * default(i) for i in range(hf["num_hidden_layers"])]
  return {"windows": tuple((hf.get("sliding_window") or 0) * ("sliding" in x) for x in types)}


def two_ropes(hf: JsonObject, local: JsonObject, default: Callable[[int], bool]) -> JsonObject:
  """Return windows, and RoPE of full and of sliding layers. local: parameters of the latter in older config.json."""
  rope = hf.get("rope_parameters") or {}
  is_nested = "full_attention" in rope
  full = read_rope({**hf, "rope_parameters": rope["full_attention"]} if is_nested else hf)
  sliding = read_rope({**hf, "rope_parameters": rope["sliding_attention"] if is_nested else local})
  options = windows(hf, default)
  return options | {"ropes": (full, sliding), "rope_kinds": tuple(int(x > 0) for x in options["windows"])}


def mistral(hf: JsonObject) -> JsonObject:
  rope = read_rope(hf)   # Ministral 3 scales q by position beyond the original length, which is the limit here
  if "llama_4_scaling_beta" not in rope: return windows(hf)
  return {**windows(hf), "max_position_embeddings": rope["original_max_position_embeddings"]}


def qwen2(hf: JsonObject) -> JsonObject:
  has_windows = hf.get("use_sliding_window", False)
  return {"qkv_bias": True, **windows(hf, lambda i: has_windows and i >= hf.get("max_window_layers", 28))}


def qwen3(hf: JsonObject) -> JsonObject: return qwen2(hf) | {"qkv_bias": False, "qk_norm": "head"}


def smollm3(hf: JsonObject) -> JsonObject:
  count = hf["num_hidden_layers"]
  rotates = hf.get("no_rope_layers") or [(i + 1) % hf.get("no_rope_layer_interval", 4) != 0 for i in range(count)]
  has_windows = hf.get("use_sliding_window", False)   # only in layers without RoPE
  return {"ropes": (read_rope(hf), None), "rope_kinds": tuple(int(not x) for x in rotates),
          **windows(hf if has_windows else {**hf, "sliding_window": 0}, lambda i: not rotates[i])}


def granite(hf: JsonObject) -> JsonObject:
  return {"attention_scale": hf["attention_multiplier"], "logits_scale": 1 / hf["logits_scaling"],
          "embedding_multiplier": hf["embedding_multiplier"], "residual_multiplier": hf["residual_multiplier"]}


def phi3(hf: JsonObject) -> JsonObject: return {"is_fused": True, **windows(hf)}


def olmo2(hf: JsonObject) -> JsonObject:
  return {"norms": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"), "qk_norm": "all"}


def olmo3(hf: JsonObject) -> JsonObject:
  return olmo2(hf) | two_ropes(hf, {"rope_type": "default"}, lambda i: (i + 1) % 4 != 0)


def gemma2(hf: JsonObject) -> JsonObject:
  return {"norms": tuple(TABLES["Gemma's norms"]), "norm_offset": hf.get("norm_offset", 1),   # GGUF has 1 + w
          "embedding_multiplier": hf["hidden_size"]**0.5,
          "attention_scale": hf["query_pre_attn_scalar"]**-0.5, "attention_cap": hf.get("attn_logit_softcapping", 0),
          "logits_cap": hf.get("final_logit_softcapping", 0), "overflows_float16": True,
          **windows(hf, lambda i: (i + 1) % 2 != 0)}


def gemma3(hf: JsonObject) -> JsonObject:
  is_causal = not hf.get("use_bidirectional_attention")
  check(is_causal, "use_bidirectional_attention=True is not supported: choose a model that generates text")
  local = {"rope_type": "default", "rope_theta": hf["rope_local_base_freq"]}
  return gemma2(hf) | two_ropes(hf, local, lambda i: (i + 1) % hf["sliding_window_pattern"] != 0) | {"qk_norm": "head"}


def experts(hf: JsonObject) -> JsonObject:
  count = hf.get("num_experts") or hf["num_local_experts"]
  return {"num_experts": count, "num_experts_per_tok": hf["num_experts_per_tok"],
          "moe_intermediate_size": hf.get("moe_intermediate_size") or hf["intermediate_size"]}


def qwen3_moe(hf: JsonObject) -> JsonObject:
  step, layers = hf.get("decoder_sparse_step") or 1, range(hf["num_hidden_layers"])
  dense = tuple(i for i in layers if i in (hf.get("mlp_only_layers") or ()) or (i + 1) % step)
  return qwen3(hf) | experts(hf) | {"dense_layers": dense, "norm_topk_prob": hf.get("norm_topk_prob", False)}


def mixtral(hf: JsonObject) -> JsonObject: return windows(hf) | experts(hf)


def olmoe(hf: JsonObject) -> JsonObject:
  check(hf.get("clip_qkv") is None, f"model: clip_qkv={hf.get('clip_qkv')} is not supported; supported: null")
  return experts(hf) | {"qk_norm": "all", "norm_topk_prob": hf.get("norm_topk_prob", False)}


def gpt_oss(hf: JsonObject) -> JsonObject:
  return windows(hf) | experts(hf) | {"is_stacked": True, "expert_bias": True, "has_sinks": True,
                                      "swiglu": (hf.get("swiglu_alpha", 1.702), hf.get("swiglu_limit", 7.0))}


def make_row(options: Callable[[JsonObject], JsonObject], model_class: type[LlamaVariant] = LlamaVariant) -> Reader:
  """Return a function that reads config.json's content without null fields; see MODELS. TABLES has defaults."""
  def read(hf: JsonObject, path: pathlib.Path) -> tuple[VariantConfig, type[LlamaVariant]]:
    architecture = TABLES["text parts"].get(hf["architectures"][0], hf["architectures"][0])
    hf = {**TABLES["defaults"].get(architecture, {}), **hf}
    core = ModelConfig.from_hf({**hf, "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
                                "rope_parameters": {"rope_type": "default"}}, path)
    name = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    check(name in ACTIVATIONS, f"{path}: hidden_act {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    zeros = (0,) * core.num_hidden_layers
    values = {"rope_kinds": zeros, "windows": zeros, "activation": ACTIVATIONS[name], **options(hf)}
    values = {"ropes": (read_rope(hf),), "renamed": TABLES["renamed"].get(architecture, {}), **values}
    rope = values["ropes"][0] or {}
    if rope.get("rope_type") == "yarn":   # which extends the context length
      length = int(rope["factor"] * rope["original_max_position_embeddings"])
      values.setdefault("max_position_embeddings", max(length, core.max_position_embeddings))
    for name in [rope["rope_type"] for rope in values["ropes"] if rope]:
      check(name in ROPE_TYPES, f"{path}: rope_type {name!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    return model_class.config_class(**vars(core) | values), model_class
  return read


ROWS = {
  "Gemma2ForCausalLM": make_row(gemma2),
  "Gemma3ForCausalLM": make_row(gemma3), "Gemma3ForConditionalGeneration": make_row(gemma3),
  "GptOssForCausalLM": make_row(gpt_oss, Mixture),
  "GraniteForCausalLM": make_row(granite),
  **{f"{x}ForCausalLM": make_row(mistral) for x in ("Ministral", "Ministral3", "Mistral")},
  "Mistral3ForConditionalGeneration": make_row(mistral),
  "MixtralForCausalLM": make_row(mixtral, Mixture),
  "Olmo2ForCausalLM": make_row(olmo2), "Olmo3ForCausalLM": make_row(olmo3),
  "OlmoeForCausalLM": make_row(olmoe, Mixture),
  "Phi3ForCausalLM": make_row(phi3),
  "Qwen2ForCausalLM": make_row(qwen2), "Qwen3ForCausalLM": make_row(qwen3),
  "Qwen3MoeForCausalLM": make_row(qwen3_moe, Mixture),
  "SmolLM3ForCausalLM": make_row(smollm3)}
