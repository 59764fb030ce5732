"""References for the tests: tiny random models on disk, a plain numpy LLaMA that reads the same files, a sort-based
sampling mask, and checks of an engine's invariants. The references use none of the package's code."""
import functools
import io
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

VOCAB = 320
# Options of the engine in most tests: graphs of 1, 2, 4, 8 and 16 tokens. Engines of equal shapes share kernels
ENGINE = {"dtype": "float32", "max_model_len": 128, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 16}
SAMPLING_ENGINE = {**ENGINE, "max_num_seqs": 8, "max_num_batched_tokens": 8}   # few samplers: each compiles for seconds
CORPUS = ["the cat sat on the mat and the dog ran to the red house", "hello world, this is a small model of a language",
          "one two three four five six seven eight nine ten", "where there is a will there is a way, they say",
          "numbers: 0 1 2 3 4 5 6 7 8 9!"]
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# architecture -> (q, k and v have biases; o has a bias; q and k have norms); None: config.json's attention_bias
KINDS = {"LlamaForCausalLM": (None, None, False), "MistralForCausalLM": (False, False, False),
         "Qwen2ForCausalLM": (True, False, False), "Qwen3ForCausalLM": (None, None, True)}


def slow(*values: Any) -> list[Any]:
  """Mark parameters of a test as slow. Each is a value or a tuple of values."""
  import pytest   # here, so that the other functions need only numpy and sentencepiece
  return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values]


def mark_slow_except(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
  """Return all parameters of a test in order, with all except `quick` marked as slow."""
  return [x for value in values for x in ([value] if value in quick else slow(value))]


@functools.cache
def sentencepiece_model() -> bytes:
  """Return a tokenizer of 320 pieces: <unk>, <s>, </s>, 256 bytes, and pieces from CORPUS. Trained once per process."""
  out = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(CORPUS), model_writer=out, vocab_size=VOCAB, model_type="bpe", byte_fallback=True,
    character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False, num_threads=1,
    minloglevel=2)
  return out.getvalue()


def tiny_config(**overrides: Any) -> dict[str, Any]:
  """Return config.json of a LLaMA with 2 layers and 2 query heads per KV head. An override of None removes the key."""
  config = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "vocab_size": VOCAB, "hidden_size": 32,
            "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
            "bos_token_id": 1, "eos_token_id": 2, **overrides}
  return {k: v for k, v in config.items() if v is not None}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
  """Return the shape of every tensor by its Hugging Face name."""
  kind, bias = KINDS[config["architectures"][0]], config.get("attention_bias", False)
  qkv_bias, o_bias, qk_norm = (bias if x is None else x for x in kind)
  E, F, V, H = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"))
  KV, D = config.get("num_key_value_heads") or H, config.get("head_dim") or E // H
  shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, E)}
  for i in range(config["num_hidden_layers"]):
    linears = [(f"self_attn.{n}_proj", rows, E, qkv_bias) for n, rows in (("q", H * D), ("k", KV * D), ("v", KV * D))]
    linears += [("self_attn.o_proj", E, H * D, o_bias)]
    mlp_bias = config.get("mlp_bias", False)
    linears += [(f"mlp.{n}_proj", *s, mlp_bias) for n, s in (("gate", (F, E)), ("up", (F, E)), ("down", (E, F)))]
    for name, rows, columns, has_bias in linears:
      shapes[f"model.layers.{i}.{name}.weight"] = (rows, columns)
      if has_bias: shapes[f"model.layers.{i}.{name}.bias"] = (rows,)
    for name in ("input_layernorm", "post_attention_layernorm"): shapes[f"model.layers.{i}.{name}.weight"] = (E,)
    if qk_norm: shapes |= {f"model.layers.{i}.self_attn.{name}.weight": (D,) for name in ("q_norm", "k_norm")}
  shapes["model.norm.weight"] = (E,)
  if not config.get("tie_word_embeddings"): shapes["lm_head.weight"] = (V, E)
  return shapes


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
  """Return weights whose logits have a standard deviation of about 2 and depend on all tokens, so that greedy output
  varies."""
  rng, weights = np.random.default_rng(seed), {}
  for name, shape in tensor_shapes(config).items():
    x = rng.standard_normal(shape)
    if name.endswith("norm.weight"): x = 1 + 0.1 * x
    elif name.endswith(".bias"): x = 0.2 * x
    elif name.startswith(("lm_head", "model.embed_tokens")): x = 2 * x / math.sqrt(shape[1])
    else: x = 1.5 * x / math.sqrt(shape[1])
    weights[name] = x.astype(np.float32)
  return weights


def to_bytes(x: np.ndarray, dtype: str) -> bytes:
  if dtype == "bfloat16": return ((x.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16).tobytes()
  return x.astype(dtype).tobytes()


def write_safetensors(path: Path, weights: dict[str, np.ndarray], dtype: str = "float32") -> None:
  """Write a safetensors file without the library: length of the header, header, data."""
  header, start = {}, 0
  parts = {name: to_bytes(x, dtype) for name, x in weights.items()}
  for name, part in parts.items():
    offsets = [start, start := start + len(part)]
    header[name] = {"dtype": DTYPES.get(dtype, "I32"), "shape": list(weights[name].shape), "data_offsets": offsets}
  text, data = json.dumps(header).encode(), b"".join(parts.values())
  text += b" " * (-len(text) % 8)
  path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tiny_model(folder: Path, seed: int = 0, tokenizer: bool = True, shards: int = 1, dtype: str = "float32",
               words: bool = False, **config_overrides: Any) -> Path:
  """Write a tiny random model into `folder` in Hugging Face's layout: config.json, safetensors (with an index if
  shards > 1), tokenizer.model. words: greedy output contains only letters, no byte or special tokens. config_overrides:
  keys of config.json; None removes a key."""
  folder = Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  config = tiny_config(**config_overrides)
  (folder / "config.json").write_text(json.dumps(config))
  weights = random_weights(config, seed)
  if words: weights["lm_head.weight"][:259] = 0
  if shards == 1: write_safetensors(folder / "model.safetensors", weights, dtype)
  else:
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    file_of = {name: files[i * shards // len(weights)] for i, name in enumerate(weights)}
    for file in files: write_safetensors(folder / file, {n: weights[n] for n in weights if file_of[n] == file}, dtype)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
  if tokenizer: (folder / "tokenizer.model").write_bytes(sentencepiece_model())
  return folder


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
  raw = path.read_bytes()
  start = 8 + int.from_bytes(raw[:8], "little")
  out = {}
  for name, entry in json.loads(raw[8:start]).items():
    if name == "__metadata__": continue
    a, b = entry["data_offsets"]
    kind = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[entry["dtype"]]
    x = np.frombuffer(raw[start + a:start + b], kind)
    if entry["dtype"] == "BF16": x = (x.astype(np.uint32) << 16).view(np.float32)
    out[name] = x.reshape(entry["shape"]).astype(np.float64)
  return out


@functools.lru_cache(maxsize=8)
def _load(folder: Path, stamp: tuple) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  weights: dict[str, np.ndarray] = {}
  for path in sorted(folder.glob("*.safetensors")): weights |= read_safetensors(path)
  return json.loads((folder / "config.json").read_text()), weights


def load(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Return config.json and the weights in float64. Cached until a file changes."""
  files = sorted([*Path(folder).glob("*.safetensors"), Path(folder) / "config.json"])
  return _load(Path(folder), tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files))


def rope_frequencies(config: dict[str, Any], D: int) -> np.ndarray:
  rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
  freqs = rope.get("rope_theta", config.get("rope_theta", 10000.0)) ** (-np.arange(0, D, 2) / D)
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind == "linear": return freqs / rope["factor"]
  if kind == "llama3":
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    out = []
    for f in freqs:
      wavelength = 2 * math.pi / f
      if wavelength < old / high: out.append(f)
      elif wavelength > old / low: out.append(f / rope["factor"])
      else:
        smooth = (old / wavelength - low) / (high - low)
        out.append((1 - smooth) * f / rope["factor"] + smooth * f)
    return np.array(out)
  return freqs


# The non-negative values of float8 e4m3, up to 448
E4M3 = np.array([(1 + m / 8) * 2.0**(e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8)][:127])


def quantize_kv(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
  """Quantize K or V, (..., D), to int8 or fp8. Returns the dequantized values, the bytes, and for int8 the scales,
  (...)."""
  x = x.astype(np.float32)
  if kind == "int8":
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), 1e-30) / 127
    q = np.round(x / scale)
    return q * scale, (q + 128).astype(np.uint8), [scale[..., 0].astype(np.float32)]
  code = np.abs(np.abs(x)[..., None] - E4M3).argmin(-1)   # rounds ties down
  is_tie = np.abs(np.abs(x) - E4M3[code]) == np.abs(np.abs(x) - E4M3[np.minimum(code + 1, 126)])
  code = np.where(is_tie & (code % 2 == 1), code + 1, code)   # ties to even
  return np.copysign(E4M3[code], x), (code + 128 * np.signbit(x)).astype(np.uint8), []


def random_numbers(rng: np.random.Generator, shape: tuple[int, ...], bits: int | str) -> tuple[np.ndarray, np.ndarray]:
  """Return random numbers of a quantized matrix as stored and in float32. bits: 8, 4 or "e4m3"."""
  if bits == "e4m3":
    q = rng.integers(0, 127, shape, np.uint8)
    sign = rng.integers(0, 2, shape, np.uint8)
    return (q + 128 * sign).view("V1"), (E4M3[q] * (1 - 2.0 * sign)).astype(np.float32)
  q = rng.integers(-128, 128, shape).astype(np.int8) if bits == 8 else rng.integers(0, 16, shape).astype(np.uint8)
  return q, q.astype(np.float32)


def reference_logits(folder: Path, ids: list[int], quantize: Callable = lambda x: x) -> np.ndarray:
  """Compute the float64 logits, (T, V), of all tokens with the model in `folder`. quantize: maps K and V to the values
  read from the KV cache."""
  config, w = load(folder)
  H, T, E = config["num_attention_heads"], len(ids), config["hidden_size"]
  KV, D, eps = config.get("num_key_value_heads") or H, config.get("head_dim") or E // H, config["rms_norm_eps"]
  angles = np.arange(T)[:, None] * rope_frequencies(config, D)   # (T, D/2)
  cos, sin = (np.concatenate([f(angles)] * 2, 1)[:, None] for f in (np.cos, np.sin))   # (T, 1, D)

  def norm(x: np.ndarray, name: str) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"]

  def linear(x: np.ndarray, name: str) -> np.ndarray: return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

  def rotate(x: np.ndarray) -> np.ndarray:
    return x * cos + np.concatenate([-x[..., D // 2:], x[..., :D // 2]], -1) * sin

  x = w["model.embed_tokens.weight"][ids]   # (T, E)
  for i in range(config["num_hidden_layers"]):
    p = f"model.layers.{i}."
    h = norm(x, p + "input_layernorm")
    q, k, v = (linear(h, f"{p}self_attn.{n}_proj").reshape(T, -1, D) for n in "qkv")
    if p + "self_attn.q_norm.weight" in w: q, k = norm(q, p + "self_attn.q_norm"), norm(k, p + "self_attn.k_norm")
    q, k, v = rotate(q), quantize(rotate(k)), quantize(v)
    k, v = np.repeat(k, H // KV, 1), np.repeat(v, H // KV, 1)   # (T, H, D)
    scores = np.einsum("thd,shd->hts", q, k) / math.sqrt(D)
    scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
    a = np.exp(scores - scores.max(-1, keepdims=True))
    x = x + linear(np.einsum("hts,shd->thd", a / a.sum(-1, keepdims=True), v).reshape(T, H * D), p + "self_attn.o_proj")
    h = norm(x, p + "post_attention_layernorm")
    gate, up = linear(h, p + "mlp.gate_proj"), linear(h, p + "mlp.up_proj")
    x = x + linear(gate / (1 + np.exp(-gate)) * up, p + "mlp.down_proj")
  return norm(x, "model.norm") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


_greedy: dict[tuple, list[int]] = {}


def reference_greedy(folder: Path, ids: list[int], n: int) -> list[int]:
  """Return the next n greedy ids, with end tokens ignored. Results are cached and extended."""
  out = _greedy.setdefault((Path(folder), (Path(folder) / "config.json").stat().st_mtime_ns, tuple(ids)), [])
  while len(out) < n: out.append(int(reference_logits(folder, [*ids, *out])[-1].argmax()))
  return out[:n]


def reference_sampling_mask(logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0,
                   min_p: float = 0.0) -> np.ndarray:
  """Return a mask, (V,), of the tokens that may be sampled: min_p, then top_k, then top_p over the rest. Ties with the
  last token in the mask are in it too."""
  p = reference_probabilities(logits, temperature)
  keep = p >= min_p * p.max()
  if 0 < top_k < keep.sum(): keep &= p >= np.sort(p[keep])[::-1][top_k - 1]
  if top_p < 1.0:
    best = np.sort(p[keep] / p[keep].sum())[::-1]
    crossing = min(int(np.searchsorted(np.cumsum(best), top_p - 1e-9)), len(best) - 1)
    keep &= p / p[keep].sum() >= best[crossing]
  return keep


def reference_probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
  x = np.asarray(logits, np.float64) / temperature
  p = np.exp(x - x.max())
  return p / p.sum()


def cut_after_end_token(ids: list[int], ends: Iterable[int]) -> list[int]:
  """Return the ids up to and including the first end token."""
  return next((ids[:i + 1] for i, x in enumerate(ids) if x in ends), ids)


def ggml_blocks(x: np.ndarray, kind: Any) -> np.ndarray:
  """Quantize a matrix to a GGUF type. gguf cannot quantize to IQ4_NL and to types with super-blocks of 256: for them,
  return random blocks with scales of a typical size, independent of x."""
  import gguf
  d_at = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0],
          "IQ4_XS": [0]}   # byte offsets of d and dmin in a block
  if kind.name not in d_at: return gguf.quants.quantize(np.ascontiguousarray(x, np.float32), kind)
  rng = np.random.default_rng(x.size)
  block, size = gguf.GGML_QUANT_SIZES[kind]
  out = rng.integers(0, 256, (x.shape[0], x.shape[1] // block, size), dtype=np.uint8)
  for at in d_at[kind.name]:
    d = rng.uniform(1e-5, 1e-3, out.shape[:2]).astype(np.float16)
    out[:, :, at:at + 2] = d[..., None].view(np.uint8)
  return out.reshape(len(x), -1)


def write_gguf(path: Path, folder: Path, kind: str = "F32", tokens: list[str] | None = None,
               merges: list[str] | None = None, specials: Iterable[str] = (), template: str | None = None,
               tokenizer: str = "gpt2", kinds: dict[str, str] | None = None, pre: str = "gpt-2",
               architecture: str | None = None, tensors_per_file: int = 0, add_eos: bool = False) -> Path:
  """Write the model in `folder` as llama.cpp's converter does: LLaMA's q and k rows interleaved, norms and biases in
  float32. kind: GGUF type of the matrices; kinds: exceptions by name. tokenizer: gpt2, built from tokens and merges, or
  llama, the folder's tokenizer.model. tensors_per_file: limit, above which gguf splits the file. Return the first
  file."""
  import gguf
  config, weights = load(folder)
  tokens = tokens or ["a", "b", "ab", *(f"t{i}" for i in range(config["vocab_size"] - 3))]
  arch = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}.get(config["architectures"][0], "llama")
  writer = gguf.GGUFWriter(path, architecture or arch, split_max_tensors=tensors_per_file)
  writer.add_block_count(config["num_hidden_layers"])
  writer.add_context_length(config["max_position_embeddings"])
  writer.add_embedding_length(config["hidden_size"])
  writer.add_feed_forward_length(config["intermediate_size"])
  writer.add_head_count(config["num_attention_heads"])
  if config.get("num_key_value_heads"): writer.add_head_count_kv(config["num_key_value_heads"])
  if config.get("head_dim"): writer.add_key_length(config["head_dim"])
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  writer.add_rope_freq_base(config["rope_theta"])
  scaling = config.get("rope_scaling") or {}
  if scaling.get("rope_type") == "llama3":   # the converter writes each frequency's factor instead of a type
    D = config["hidden_size"] // config["num_attention_heads"]
    plain = rope_frequencies({**config, "rope_scaling": None}, D)
    writer.add_tensor("rope_freqs.weight", (plain / rope_frequencies(config, D)).astype(np.float32))
  elif scaling:
    writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
    writer.add_rope_scaling_factor(scaling["factor"])
  writer.add_tokenizer_model(tokenizer)
  if tokenizer == "llama":
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = range(model.GetPieceSize())
    writer.add_token_list([model.IdToPiece(i) for i in ids])
    writer.add_token_scores([model.GetScore(i) for i in ids])
    kind_of = [(model.IsUnknown, 2), (model.IsControl, 3), (model.IsUnused, 5), (model.IsByte, 6), (lambda _: True, 1)]
    writer.add_token_types([next(number for test, number in kind_of if test(i)) for i in ids])
  else:
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in specials else 1 for t in tokens])
    writer.add_token_merges(merges or ["a b"])
  if template: writer.add_chat_template(template)
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  if add_eos: writer.add_add_eos_token(True)
  names: dict[str, str] = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
  parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
           "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
           "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
           "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
  layers = range(config["num_hidden_layers"])
  names |= {f"model.layers.{i}.{k}": f"blk.{i}.{v}" for i in layers for k, v in parts.items()}
  H = config["num_attention_heads"]
  heads = {"attn_q": H, "attn_k": config.get("num_key_value_heads") or H} if arch == "llama" else {}
  for name, x in weights.items():
    module, _, suffix = name.rpartition(".")
    name = names[module]
    part = name.split(".")[-1]
    if n := heads.get(part): x = x.reshape(n, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    dtype = gguf.GGMLQuantizationType["F32" if x.ndim == 1 else (kinds or {}).get(part, kind)]
    data = x.astype(np.float32) if x.ndim == 1 else ggml_blocks(x, dtype)
    writer.add_tensor(f"{name}.{suffix}", data, raw_dtype=dtype)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return writer.format_shard_names(path)[0]


def token_rows(positions: Any, slots: Any, blocks: Any, block_size: int, max_blocks: int = 0) -> np.ndarray:
  """Return the tokens of a step, (columns of TOKENS, T) int32, from positions, slots and physical blocks, (T,) each."""
  from tinyvllm.runner import TILE, TOKENS
  positions, slots, blocks = (np.asarray(x) for x in (positions, slots, blocks))
  fields = {"id": 0 * positions, "position": positions, "slot": slots, "block": blocks,
            "table_index": slots * max_blocks + positions // block_size, "query_tile": np.full(len(positions), -1)}
  runs = np.split(np.arange(len(positions)), np.flatnonzero((np.diff(slots) != 0) | (np.diff(positions) != 1)) + 1)
  tiles = [run[i:i + TILE] for run in runs for i in range(0, len(run), TILE)]
  fields["query_tile"][:len(tiles)] = [tile[0] * TILE + len(tile) - 1 for tile in tiles]
  return np.stack([fields[name] for name in TOKENS.dtype.names]).astype(np.int32)   # (columns, T)


class LogitsRecorder:
  """Replace the model of an engine that has captured no graphs, and record the logits that each step samples from."""
  def __init__(self, engine: Any):
    from tinygrad import Tensor
    assert not engine.runner.graphs
    self.engine, self.model, V = engine, engine.runner.model, engine.model_config.vocab_size
    rows = range(1, 2 * engine.config.max_num_seqs)   # a power of two
    self.logits = {n: Tensor.zeros(n, V).contiguous().realize() for n in rows}   # by a graph's number of rows
    self.devices = self.model.devices
    engine.runner.model = self
    engine.runner.is_async = False   # the next step would overwrite the logits

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    logits = self.model(*args, **kwargs)
    # The sampler must read the assigned tensor, which makes it part of the graph: with several devices, tinygrad cannot
    # schedule the assignment alone
    return self.logits[logits.shape[0]].assign(logits)

  def generate(self, ids: list[int], n: int) -> tuple[list[int], np.ndarray]:
    """Return the next n greedy ids of a single request, and their logits, (n, V)."""
    from tinyvllm import SamplingParams
    engine, out, params = self.engine, [], SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
    engine.add_request("logits", {"prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
      for buffer in self.logits.values(): buffer.assign(buffer.full_like(np.nan)).realize()
      if outputs := engine.step(): out += [x[0] for b in self.logits.values() if np.isfinite((x := b.numpy())[0]).all()]
    assert len(out) == n
    return outputs[-1].outputs[0].token_ids, np.stack(out)


def assert_same_outputs(outputs: list[Any], expected: list[Any]) -> None:
  """Check that two lists of RequestOutputs have equal prompts, ids, text and finish reasons."""
  def fields(o: Any) -> tuple:
    c = o.outputs[0]
    return o.prompt, o.prompt_token_ids, c.token_ids, c.text, c.finish_reason, c.stop_reason, o.finished
  assert len(outputs) == len(expected), f"{len(outputs)} outputs, {len(expected)} expected"
  for i, (a, b) in enumerate(zip(outputs, expected, strict=True)): assert fields(a) == fields(b), f"output {i}"


def check_pool(blocks: Any, tables: list[list[int]]) -> None:
  """Check the invariants of a BlockManager and all block tables."""
  free, ref_counts = [*blocks.free_blocks, *blocks.evictable], Counter(b for table in tables for b in table)
  assert blocks.num_free() == len(free) == len(set(free)), "a block is free twice"
  assert blocks.num_free() + blocks.num_used() == blocks.num_blocks - 1
  assert blocks.num_used() == len(ref_counts), f"{blocks.num_used()} blocks used, {len(ref_counts)} in block tables"
  assert 0 not in ref_counts and 0 not in free, "block 0 is the null block"
  for table in tables: assert len(set(table)) == len(table), "a block appears twice in a block table"
  cached = {*blocks.cached_blocks.values()}
  assert {*blocks.shared} <= cached, "a block in two block tables must be full and cached"
  assert all(blocks.block_hashes[b] == key and b for key, b in blocks.cached_blocks.items()), "wrong hash"
  assert not set(free) & set(ref_counts), "a free block is in a block table"
  assert set(free) | set(ref_counts) == set(range(1, blocks.num_blocks)), "a block is leaked"
  assert dict(blocks.shared) == {b: n - 1 for b, n in ref_counts.items() if n > 1}
  assert {*blocks.evictable} == cached - {*ref_counts}, "evictable blocks must be the free cached blocks"


def check_scheduler(scheduler: Any, blocks: Any) -> None:
  """Check the invariants of a scheduler between steps."""
  seqs = [*scheduler.running, *scheduler.waiting]
  assert len(set(seqs)) == len(seqs), "a sequence is queued twice"
  check_pool(blocks, [seq.block_table for seq in seqs])
  for seq in seqs:
    length = seq.length + len(seq.draft_token_ids)
    assert 0 <= seq.num_computed < length or seq.reached_max_len, f"{seq.num_computed} of {length} tokens computed"
    assert not seq.draft_token_ids or seq.num_in_flight == 1, "no step verifies the draft tokens"
    assert len(seq.block_table) * blocks.block_size >= seq.num_computed, "a computed token has no block"
    assert seq.finish_reason is None, "a finished sequence is in the scheduler"
  for seq in scheduler.waiting:
    assert not seq.block_table and seq.slot is None and not seq.draft_token_ids
    assert seq.num_computed == seq.num_in_flight == 0
  slots = [seq.slot for seq in scheduler.running]
  assert len({*slots}) == len(slots), "two sequences in a slot"
  assert {*slots} <= {*range(scheduler.config.max_num_seqs)}, "a running sequence has no valid slot"
  order = [seq.order for seq in scheduler.waiting]
  assert order == sorted(order), "the queue is not sorted"


def check_invariants(engine: Any) -> None:
  """Check blocks, block tables, counters and slots of an engine between two steps. An idle engine uses no blocks."""
  blocks, metrics = engine.blocks, engine.get_metrics()
  check_scheduler(engine.scheduler, blocks)
  if not engine.has_unfinished_requests(): assert blocks.num_used() == 0, "an idle engine uses blocks"
  assert metrics["blocks_cached"] == len(blocks.evictable)
  assert metrics["blocks_shared"] == len(blocks.shared)


def count_bytecodes(call: Callable[[], Any]) -> int:
  """Return the number of Python bytecodes that a call runs. Excludes C code and, in Python 3.13, functions called for
  the first time."""
  count = 0

  def trace(frame: Any, event: str, argument: Any) -> Any:
    nonlocal count
    frame.f_trace_opcodes = True
    count += event == "opcode"
    return trace
  sys._getframe().f_trace_opcodes = True   # Python 3.12 needs it set first
  sys.settrace(trace)
  try: call()
  finally: sys.settrace(None)
  assert count, "tracing must count bytecodes"
  return count


def run_to_end(engine: Any, limit: int) -> dict[str, Any]:
  """Step until all requests finish, and check the invariants after each step. Returns each request's last output."""
  last = {}
  for _ in range(limit):
    if not engine.has_unfinished_requests(): return last
    for output in engine.step(): last[output.request_id] = output
    check_invariants(engine)
  raise AssertionError(f"not finished after {limit} steps")


def set_overlap(monkeypatch: Any, runner: Any, overlaps: str) -> None:
  """Set when a step's results are read: "overlapped" after the next step is built, "early" after it is launched, as on
  CUDA, "" before it is built. On a CPU "early" copies results at once, before the next step overwrites them."""
  def start_reading(tensor):
    values = tensor.tolist()
    return lambda: values
  monkeypatch.setattr(runner, "is_async", bool(overlaps))
  monkeypatch.setattr(runner.backend, "reads_early", overlaps == "early")
  if overlaps == "early": monkeypatch.setattr(runner.backend, "start_reading", start_reading)
