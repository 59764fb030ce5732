"""Architectures like LLaMA: table.json has a row for each name in config.json's `architectures`, or the name of an
equal row. A row has defaults of config.json's fields, fields whose values are options of the layers, other options, the
supported values of fields, parts of tensors' names with the modules' names, names of the functions below that compute
further options, and paths of classes in this package: the layers' (layer_kinds has each layer's index into them, 0 by
default) and the model's."""
import math, pathlib, pkgutil, typing
from collections.abc import Callable, Iterable

from tinyvllm.config import SUPPORTED, JsonObject, ModelConfig, check, has_type, read_json
from tinyvllm.llama import Llama

from .layers import SCALINGS, Embedder, VariantConfig

TABLES = read_json(pathlib.Path(__file__).with_suffix(".json"))
MODELS = {"LlamaForCausalLM", *TABLES}
# Types of fields of config.json, which has no eos_token_ids
TYPES = {**ModelConfig.__annotations__, "architectures": list[str], "eos_token_ids": object}
MODULES = {"Transformer", "Pooling", "Normalize"}   # sentence-transformers' modules that tinyvllm computes
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}   # a method of Tensor, whose gelu is the tanh approximation
NO_ROTATION: JsonObject = {"rope_type": "factors", "factors": math.inf, "rope_theta": 1.0}
ROPE_TYPES = (*SUPPORTED["rope_type"], *SCALINGS)


def read_rope(hf: JsonObject) -> JsonObject:
  """Return config.json's parameters of RoPE as transformers 5 writes them, with all that its type needs."""
  rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
  length = hf.get("original_max_position_embeddings") or hf.get("max_position_embeddings")   # Phi-3 has the former
  rope_type = rope.get("rope_type") or rope.get("type") or "default"
  values = {"rope_theta": hf.get("rope_theta") or 10000.0, "partial_rotary_factor": hf.get("partial_rotary_factor", 1),
            "original_max_position_embeddings": length, **rope,
            "rope_type": "longrope" if rope_type == "su" else rope_type}
  if "original_max_position_embeddings" in hf: values["original_max_position_embeddings"] = length   # has priority
  if values.get("factor") is None:
    values["factor"] = hf.get("max_position_embeddings", 1) / (values["original_max_position_embeddings"] or 1)
  return values


def windows(hf: JsonObject, default: Callable[[int], bool] = lambda i: True) -> JsonObject:
  """Return each layer's window. default: whether layer i has one, if config.json has no layer_types."""
  types = hf.get("layer_types") or ["sliding" * default(i) for i in range(hf["num_hidden_layers"])]
  size = hf.get("sliding_window") or 0 if hf.get("use_sliding_window", True) else 0
  return {"windows": tuple(size * ("sliding" in x) for x in types)}


def two_ropes(hf: JsonObject) -> JsonObject:
  """Return windows, and RoPE of full and of sliding layers. Older config.json has only a rope_theta for the latter."""
  rope = hf.get("rope_parameters") or {}
  local = {"rope_type": "default", "rope_theta": hf.get("rope_local_base_freq") or hf["rope_theta"]}
  by_type = {"full_attention": rope, "sliding_attention": local, **rope}
  ropes = [read_rope({**hf, "rope_parameters": by_type[x]}) for x in ("full_attention", "sliding_attention")]
  options = windows(hf, lambda i: (i + 1) % hf["sliding_window_pattern"] != 0)
  return options | {"ropes": tuple(ropes), "rope_kinds": tuple(int(x > 0) for x in options["windows"])}


def layer_ropes(hf: JsonObject, rotates: Iterable[object]) -> JsonObject:
  """Return RoPE of each layer, with config.json's layer_rope_theta, 0 for no rotation. rotates: which layers rotate, if
  config.json has none."""
  rope = read_rope(hf)
  thetas = hf.get("layer_rope_theta") or [rope["rope_theta"] * bool(x) for x in rotates]
  kinds = sorted({*thetas}, reverse=True)
  return {"ropes": tuple({**rope, "rope_theta": x} if x else NO_ROTATION for x in kinds),
          "rope_kinds": tuple(map(kinds.index, thetas))}


def positions(hf: JsonObject) -> JsonObject:
  return {"ropes": (read_rope(hf) if hf.get("position_embedding_type", "rope") == "rope" else NO_ROTATION,)}


def mistral(hf: JsonObject) -> JsonObject:
  rope = read_rope(hf)   # Ministral 3 scales q by position beyond the original length, which is the limit here
  return {"max_position_embeddings": rope["original_max_position_embeddings"]} if "llama_4_scaling_beta" in rope else {}


def qwen2(hf: JsonObject) -> JsonObject: return windows(hf, lambda i: i >= hf["max_window_layers"])


def smollm3(hf: JsonObject) -> JsonObject:
  count = hf["num_hidden_layers"]
  rotates = hf.get("no_rope_layers") or [(i + 1) % hf.get("no_rope_layer_interval", 4) != 0 for i in range(count)]
  return {**layer_ropes(hf, rotates), **windows(hf, lambda i: not rotates[i])}


def granite(hf: JsonObject) -> JsonObject: return {"logits_scale": 1 / hf["logits_scaling"]}


def granite_swa(hf: JsonObject) -> JsonObject:
  return {**layer_ropes(hf, [True] * hf["num_hidden_layers"]), **windows(hf, lambda i: i % 4 > 0)}


def muse_glimmer(hf: JsonObject) -> JsonObject:
  is_local = [i % 4 > 0 for i in reversed(range(hf["num_hidden_layers"]))]   # counted from the last layer
  rotates = hf.get("layer_rope_theta") or is_local   # only 0 counts
  return {**layer_ropes({**hf, "layer_rope_theta": None}, rotates), **windows(hf, lambda i: is_local[i]),
          "attention_scale": hf["qk_scale_factor"] * hf["head_dim"]**-0.5}


def gemma2(hf: JsonObject) -> JsonObject:
  return {"embedding_multiplier": hf["hidden_size"]**0.5, "attention_scale": hf["query_pre_attn_scalar"]**-0.5,
          **windows(hf, lambda i: (i + 1) % 2 != 0)}


def qwen3_moe(hf: JsonObject) -> JsonObject:
  step, layers = hf.get("decoder_sparse_step") or 1, range(hf["num_hidden_layers"])
  return {"layer_kinds": [i in (hf.get("mlp_only_layers") or ()) or (i + 1) % step > 0 for i in layers]}


def lfm2(hf: JsonObject) -> JsonObject:
  layers, hidden, multiple = range(hf["num_hidden_layers"]), hf["hidden_size"], hf["block_multiple_of"]
  types = hf.get("layer_types") or [["conv", "full_attention"][i in hf.get("full_attn_idxs", layers)] for i in layers]
  size: int = hf["intermediate_size"]
  if hf["block_auto_adjust_ff_dim"]:
    size = -(-int(int(2 * size / 3) * hf["block_ffn_dim_multiplier"]) // multiple) * multiple
  return {"layer_kinds": [x != "full_attention" for x in types], "matrices": (0, hidden), "intermediate_size": size}


def qwen3_5(hf: JsonObject) -> JsonObject:
  interval, layers = hf["full_attention_interval"], range(hf["num_hidden_layers"])
  types = hf.get("layer_types") or ["linear_attention" if (i + 1) % interval else "full_attention" for i in layers]
  keys, heads = hf["linear_num_key_heads"], hf["linear_num_value_heads"]
  K, V = hf["linear_key_head_dim"], hf["linear_value_head_dim"]
  channels = 2 * keys * K + heads * V   # q, k and v
  return {"layer_kinds": [x != "full_attention" for x in types], "channels": channels, "matrices": (K, heads * V),
          "heads": (heads, hf["linear_groups"] or keys)}


def named(path: str) -> typing.Any:
  """Return a function or a class of this package. path: such as "recurrent.HybridLayer"."""
  return pkgutil.resolve_name(f"{__package__}.{path}")


def find_model(hf: JsonObject, path: pathlib.Path) -> tuple[ModelConfig, type[Llama]]:
  """Return the config and the class of a model of MODELS. hf: config.json's content. Raises InputError for another
  architecture, or none, and for a value of another type or that is not supported."""
  for x, kind in TYPES.items():
    check(hf.get(x) is None or has_type(hf[x], kind), f"{path}: {x}={hf.get(x)!r} must be of type {kind.__name__}")
  architecture = (hf.get("architectures") or [None])[0] or "LlamaForCausalLM"
  check(architecture in MODELS, f"{path}: architecture {architecture!r} is not supported; supported: "
        f"{', '.join(sorted(MODELS))}")
  if architecture not in TABLES: return ModelConfig.from_hf(hf, path), Llama
  row: JsonObject = TABLES[architecture]
  if isinstance(row, str): row = TABLES[row]
  fields: JsonObject = row.get("fields", {})   # ours -> config.json's
  hf = {**row.get("defaults", {}), **hf}
  hf |= {ours: hf[name] for ours, name in fields.items() if hf.get(name) is not None}
  for name, supported in row.get("supported", {}).items():
    value = hf.get(name, supported[0])
    is_supported = all(x in supported for x in (value if isinstance(value, list) else [value]))
    check(is_supported, f"{path}: {name}={value!r} is not supported in {architecture}; supported: "
          f"{', '.join(map(repr, supported))}: choose another model")
  core = ModelConfig.from_hf({**hf, "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
                              "rope_parameters": {"rope_type": "default"}}, path)
  name = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
  check(name in ACTIVATIONS, f"{path}: hidden_act {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
  zeros = (0,) * core.num_hidden_layers
  values = {"layer_kinds": zeros, "rope_kinds": zeros, "windows": zeros, "activation": ACTIVATIONS[name],
            "ropes": (read_rope(hf),), "renamed": row.get("renamed", {}),
            **row.get("options", {}), **{name: hf[name] for name in fields if name in hf}}
  for name in row.get("functions", ()): values |= named(f"table.{name}")(hf)
  classes = [named(path) for path in row.get("layers", ["layers.VariantLayer"])]
  values["layers"] = tuple(classes[kind] for kind in values.pop("layer_kinds"))
  rope = values["ropes"][0]
  if rope["rope_type"] == "yarn":   # which extends the context length
    length = int(rope["factor"] * rope["original_max_position_embeddings"])
    values.setdefault("max_position_embeddings", max(length, core.max_position_embeddings))
  for name in [rope["rope_type"] for rope in values["ropes"]]:
    check(name in ROPE_TYPES, f"{path}: rope_type {name!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
  return VariantConfig(**vars(core) | values), named(row.get("model", "layers.LlamaVariant"))


def text_config(hf: JsonObject) -> JsonObject:
  """Return the config of a model or of its part for text, without null fields."""
  own = {x: hf.get(x) for x in ("architectures", "eos_token_id", "tie_word_embeddings")}
  return {x: value for part in (hf, hf.get("text_config") or {}, own) for x, value in part.items() if value is not None}


def is_embedder(path: pathlib.Path, runner: str) -> bool:
  """Return whether to compute embeddings with a model: as LLM's option `runner` says, or if it is auto, for a folder
  with modules.json of sentence-transformers, as in vLLM. Raises InputError for pooling other than of the last token."""
  folder = path if path.is_dir() else path.parent
  modules: typing.Any = read_json(path / "modules.json") if path.is_dir() else {}
  if runner == "generate" or runner == "auto" and not modules: return False
  unsupported = [x["type"] for x in modules if x["type"].rpartition(".")[2] not in MODULES]
  check(not unsupported, f"model: {folder}: modules.json has {unsupported}; supported: {', '.join(sorted(MODULES))}: "
        "choose another model")
  pooling = read_json(folder / "1_Pooling" / "config.json") or {"pooling_mode_lasttoken": True}
  check(pooling.get("pooling_mode_lasttoken"), f"model: {folder}: 1_Pooling/config.json: pooling_mode_lasttoken must "
        "be true, because only the last token has seen the whole text: choose another model")
  return True


def choose_model(hf_config: JsonObject, path: pathlib.Path, runner: str = "auto") -> tuple[ModelConfig, type[Llama]]:
  """Like find_model, for any config.json. Return the class of an Embedder to compute embeddings. runner: see
  is_embedder."""
  config, model_class = find_model(text_config(hf_config), path)
  return config, type("Embedder", (Embedder, model_class), {}) if is_embedder(path, runner) else model_class
