"""A LLaMA (Touvron et al. 2023) over a paged KV cache. One forward serves prefill, chunks of a prefill and decode: a
flat batch of tokens, each with its position, slot and row. Attributes are named as in Hugging Face's files, with q, k,
v stored as one matrix and gate, up as one. Below it, how its files are read: safetensors, whole or sharded, one
tensor at a time, checked against the shapes that the config promises."""
import functools, json, math, pathlib
from functools import partial
from typing import cast

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Tensor, dtypes, function, helpers, nn
from tinygrad.dtype import DType

from . import kernels
from .config import ModelConfig, check, read_json

NORMS = {"qkv_proj": "input_layernorm", "gate_up_proj": "post_attention_layernorm"}   # whose weights are in these
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def rope_table(config: ModelConfig, length: int) -> Tensor:
  """Cosines and sines of rotary positions (Su et al. 2021), (length, 2, head_dim / 2), their frequencies scaled."""
  D, scaling = config.head_dim, config.rope_scaling
  freqs = [config.rope_theta ** (-i / D) for i in range(0, D, 2)]
  factors = [scaling["factor"]] * len(freqs) if scaling["rope_type"] == "linear" else scaling.get("factors")
  if factors: freqs = [f / x for f, x in zip(freqs, factors, strict=True)]
  if scaling["rope_type"] == "llama3":   # long waves are stretched by factor, short ones left alone, others between
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = [scaling["original_max_position_embeddings"] * f / (2 * math.pi) for f in freqs]
    kept = [min(1.0, max(0.0, (t - low) / (high - low))) for t in turns]
    freqs = [f * k + f / scaling["factor"] * (1 - k) for f, k in zip(freqs, kept, strict=True)]
  angles = Tensor.arange(length, dtype=dtypes.float32).reshape(length, 1) * Tensor(freqs, dtype=dtypes.float32)
  return Tensor.stack(angles.cos(), angles.sin(), dim=1).contiguous()   # (length, 2, D/2)


# How the axes of a split W, (out / 16, 16, in) or (out / 16, 2, 8, in / 32, 4, 2, 2, 2), are stored, by their number
STORED = {3: (0, 2, 1), 8: (0, 3, 5, 6, 2, 4, 1, 7)}


def pack(weight: np.ndarray, shape: tuple) -> np.ndarray:
  """W, (out, in), in the order of a stored shape."""
  return weight.reshape([shape[i] for i in helpers.argsort(STORED[len(shape)])]).transpose(STORED[len(shape)])


def unpack(stored: Tensor) -> Tensor:
  """A stored W as (out, in)."""
  return stored.permute(helpers.argsort(STORED[stored.ndim])).reshape(features(stored.shape))


def features(shape: tuple) -> tuple[int, int]:
  """(out, in) of a stored W."""
  return (shape[0] * 16, shape[1] * 32) if len(shape) == 8 else (shape[0] * shape[2], shape[1])


class Linear:
  """x @ W.T + bias, accumulated in float32. norm_eps: x is first divided by its rows' root mean square (Zhang and
  Sennrich 2019); the weights of such a norm belong into W."""
  def __init__(self, in_features: int, out_features: int, bias: bool = False, dtype: DType = dtypes.float32,
               norm_eps: float | None = None):
    tile, cores = math.gcd(out_features, 16), kernels.cpu_cores()
    tensor_cores = tile == 16 and in_features % 32 == 0 and kernels.has_tensor_cores(dtype)
    shape = (2, 8, in_features // 32, 4, 2, 2, 2) if tensor_cores else (tile, in_features)
    tiles, most = out_features // tile, max(1, kernels.largest_tensor() // (tile * in_features * dtype.itemsize))
    parts = [(min(most, tiles - i), *shape) for i in range(0, tiles, most)]   # a tensor of at most so many tiles each
    self.weight = [Tensor.empty(*[part[i] for i in STORED[len(part)]], dtype=dtype) for part in parts]
    if bias: self.bias = Tensor.empty(out_features, dtype=dtype)
    kernel = kernels.tensor_core_linear_kernel if tensor_cores else partial(kernels.linear_kernel, cores)
    self.kernel, self.norm_eps, self.out_features = kernel, norm_eps, out_features

  def __call__(self, x: Tensor, *residual: Tensor, dtype: DType | None = None) -> Tensor:
    """x: (T, in). residual: (T, out), added to the result. Returns (T, out)."""
    square = x.float().square().mean(1, keepdim=True)   # (T, 1)
    norm = [(square + self.norm_eps).rsqrt().contiguous()] if self.norm_eps else []
    out = Tensor.empty(x.shape[0], self.out_features, dtype=dtype or x.dtype, device=x.device)   # (T, out)
    for start, weight in self.parts():
      out = out.custom_kernel(x, weight, *norm, *residual, fxn=partial(self.kernel, start))[0]
    return out + self.bias if hasattr(self, "bias") else out

  def rows(self, ids: Tensor) -> Tensor:
    """Of each id, (T,), a row of W: (T, in)."""
    parts = [(ids - start, unpack(weight)) for start, weight in self.parts()]
    found = [((at >= 0) & (at < len(w))).unsqueeze(1).where(w[at.clamp(0, len(w) - 1)], 0) for at, w in parts]
    return functools.reduce(Tensor.add, found).contiguous()

  def parts(self) -> list[tuple[int, Tensor]]:
    """The tensors that W is split into, and each one's first output."""
    return [(i * features(self.weight[0].shape)[0], weight) for i, weight in enumerate(self.weight)]


class Layer:
  """Norms are where they are used: their weights are part of qkv_proj's and gate_up_proj's."""
  def __init__(self, config: ModelConfig, dtype: DType):
    H, KV, D = self.shape = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden, intermediate, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
    self.qkv_proj = Linear(hidden, (H + 2 * KV) * D, config.qkv_bias, dtype, eps)
    self.o_proj = Linear(H * D, hidden, config.o_bias, dtype)
    self.gate_up_proj = Linear(hidden, 2 * intermediate, config.mlp_bias, dtype, eps)
    self.down_proj = Linear(intermediate, hidden, config.mlp_bias, dtype)
    self.attend_kernel = partial(kernels.attend_kernel, kernels.cpu_cores())
    if config.qk_norm: self.q_norm, self.k_norm = (nn.RMSNorm(D, eps) for _ in range(2))

  def __call__(self, x: Tensor, cache: list[Tensor], tokens: Tensor, table: Tensor, rope: Tensor) -> Tensor:
    T, (H, KV, D), qkv = x.shape[0], self.shape, self.qkv_proj(x)   # qkv: (T, (H + 2 KV) * D)
    if hasattr(self, "q_norm"):
      q, k, v = qkv.reshape(T, H + 2 * KV, D).split([H, KV, KV], dim=1)
      qkv = self.q_norm(q).cat(self.k_norm(k), v, dim=1).flatten(1).contiguous()
    q, out = (Tensor.empty(T, KV, H // KV, D, dtype=x.dtype, device=x.device) for _ in range(2))
    q, *cache = q.custom_kernel(*cache, qkv, rope, tokens, fxn=kernels.rope_kernel)[:3]
    out = out.custom_kernel(q, *cache, table, tokens, fxn=self.attend_kernel)[0]   # (T, KV, G, D)
    x = self.o_proj(out.reshape(T, H * D), x)
    gate, up = self.gate_up_proj(x).chunk(2, dim=-1)   # (T, intermediate) each
    return self.down_proj((gate.silu() * up).contiguous(), x)


class Llama:
  """dtype: of the weights and all that is computed but sums, norms and logits."""
  def __init__(self, config: ModelConfig, dtype: DType):
    self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype)   # with tied embeddings, these too
    if not config.tie_word_embeddings: self.embed_tokens = Linear(config.hidden_size, config.vocab_size, dtype=dtype)
    self.layers = [Layer(config, dtype) for _ in range(config.num_hidden_layers)]
    self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

  def __call__(self, ids: Tensor, samples: Tensor, tokens: Tensor, table: Tensor, rope: Tensor,
               caches: list[list[Tensor]]) -> Tensor:
    """Logits, (S, vocab) in float32, of the tokens that `samples`, (S,), indexes in the flat batch `ids`, (T,). The K
    and V of all of them are written to `caches`, keys and values per layer. tokens, table: as the kernels take them."""
    x = getattr(self, "embed_tokens", self.lm_head).rows(ids)   # (T, hidden)
    for layer, cache in zip(self.layers, caches, strict=True):   # compiled once for all layers
      x = function(layer, precompile=True, allow_implicit=True)(x, cache, tokens, table, rope)
    return self.lm_head(self.norm(x[samples]).cast(x.dtype).contiguous(), dtype=dtypes.float32)


def read_model(folder: pathlib.Path) -> tuple[dict, dict]:
  """The content of config.json, with generation_config.json's end tokens, and the tensors of model.safetensors or of
  the shards that model.safetensors.index.json names: by name, what reads each."""
  config, index, reader = read_json(folder / "config.json"), read_json(folder / "model.safetensors.index.json"), {}
  config["eos_token_id"] = (config | read_json(folder / "generation_config.json")).get("eos_token_id")
  for path in {folder / name for name in index.get("weight_map", {"": "model.safetensors"}).values()}:
    try: safe_open(path, "np")   # it checks the file, but cannot read bfloat16
    except (OSError, SafetensorError) as e: raise ValueError(f"{path} is missing, damaged or cut short: {e}") from e
    with path.open("rb") as file: header = json.loads(file.read(size := int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    for name, entry in header.items():   # each is mapped by itself: the pages of a whole file would count as ours
      kind, shape, offset = entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]
      check(kind in DTYPES, f"{path}: tensor {name} is {kind}; supported: {', '.join(DTYPES)}")
      reader[name] = partial(np.memmap, path, DTYPES[kind], "c", offset, shape)
  return config, reader


def load_weights(model: Llama, config: ModelConfig, reader: dict, source: pathlib.Path, dtype: DType) -> None:
  """Fill the model's tensors. Raises ValueError naming the file and the tensor that is missing, surplus or
  misshapen."""
  def take(name: str, *shape: int) -> np.ndarray:
    check(name in reader, f"{source}: tensor {name} is missing")
    array = reader.pop(name)()
    check(array.shape == shape, f"{source}: tensor {name} has shape {list(array.shape)}; its config says {list(shape)}")
    # bfloat16 is the upper half of float32
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array

  q, kv = config.num_attention_heads, config.num_key_value_heads
  parts = {"qkv_proj": {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv},   # and shares of rows
           "gate_up_proj": {"mlp.gate_proj": 1, "mlp.up_proj": 1}, "down_proj": {"mlp.down_proj": 1},
           "lm_head": {"model.embed_tokens" if config.tie_word_embeddings else "lm_head": 1},
           **{kind: {f"self_attn.{kind}": 1} for kind in ("o_proj", "q_norm", "k_norm")}}
  tensors: dict[str, list[Tensor]] = {}   # by what they are parts of
  for name, tensor in nn.state.get_state_dict(model).items():
    tensors.setdefault(name.rstrip("0123456789").rstrip("."), []).append(tensor)
  for target, split in helpers.tqdm(tensors.items(), desc="loading weights", disable=None):
    *path, kind, what = target.split(".")
    at, shares = "" if kind == "lm_head" else ".".join(["model", *path, ""]), parts.get(kind, {kind: 1})
    shapes = [features(x.shape) if x.ndim > 2 else cast(tuple, x.shape) for x in split]   # a Linear's has its order
    rows, columns = sum(shape[0] for shape in shapes), shapes[0][1:]
    arrays = [take(f"{at}{part}.{what}", rows * n // sum(shares.values()), *columns) for part, n in shares.items()]
    array = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    if kind in NORMS and columns: array = array.astype(np.float32) * take(f"{at}{NORMS[kind]}.weight", *columns)
    for part, x in zip(np.split(array, np.cumsum([shape[0] for shape in shapes])[:-1]), split, strict=True):
      if x.ndim > 2: part = pack(part, x.shape)
      # Cast here, or the device keeps a buffer of either kind
      part = np.ascontiguousarray(part, np.float32 if dtype == dtypes.float32 else None)
      x.replace(Tensor(part).cast(dtype).contiguous().realize())
  surplus = [n for n in reader if n != "lm_head.weight" and not n.endswith(".inv_freq")]   # but what is derived
  check(not surplus, f"{source}: tensor {' '.join(surplus[:1])} has no place in the model that its config describes")
