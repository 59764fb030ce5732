"""References without any of the package's code: a plain numpy LLaMA, greedy decoding, sampling by sorting, and
quantized K and V."""
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from .models import load, sentencepiece_model


def rope_frequencies(config: dict[str, Any], D: int) -> np.ndarray:
  rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
  freqs = rope.get("rope_theta", config.get("rope_theta", 10000.0)) ** (-np.arange(0, D, 2) / D)
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind == "linear": return freqs / rope["factor"]
  if kind == "llama3":
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = np.clip((old * freqs / (2 * math.pi) - low) / (high - low), 0, 1)   # 0 for the longest wavelengths
    return (1 - smooth) * freqs / rope["factor"] + smooth * freqs
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


def head_sizes(config: dict[str, Any]) -> tuple[int, int]:
  """Return the number of K/V heads and head_dim."""
  H = config["num_attention_heads"]
  return config.get("num_key_value_heads") or H, config.get("head_dim") or config["hidden_size"] // H


def hidden_states(config: dict[str, Any], w: dict[str, np.ndarray], ids: Sequence[int], positions: np.ndarray,
                  attend: Callable) -> np.ndarray:
  """Return a LLaMA's final hidden states, (T, E). attend: maps a layer's number, rotated q, (T, H, D), rotated k and v,
  (T, KV, D), to the output of attention, (T, H * D)."""
  D, eps = head_sizes(config)[1], config["rms_norm_eps"]
  angles = positions[:, None] * rope_frequencies(config, D)   # (T, D/2)
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
    q, k, v = (linear(h, f"{p}self_attn.{n}_proj").reshape(len(x), -1, D) for n in "qkv")
    if p + "self_attn.q_norm.weight" in w: q, k = norm(q, p + "self_attn.q_norm"), norm(k, p + "self_attn.k_norm")
    x = x + linear(attend(i, rotate(q), rotate(k), v), p + "self_attn.o_proj")
    h = norm(x, p + "post_attention_layernorm")
    gate, up = linear(h, p + "mlp.gate_proj"), linear(h, p + "mlp.up_proj")
    x = x + linear(gate / (1 + np.exp(-gate)) * up, p + "mlp.down_proj")
  return norm(x, "model.norm")


def head(w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
  """Return the logits, (T, V), of final hidden states."""
  return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
  """Return the attention of one sequence, (T, H * D). q: (T, H, D). k, v: (T, KV, D)."""
  k, v = (np.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))   # (T, H, D)
  scores = np.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[2])
  scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
  a = np.exp(scores - scores.max(-1, keepdims=True))
  return np.einsum("hts,shd->thd", a / a.sum(-1, keepdims=True), v).reshape(len(q), -1)


def reference_logits(folder: Path, ids: list[int], quantize: Callable = lambda x: x) -> np.ndarray:
  """Compute the float64 logits, (T, V), of all tokens with the model in `folder`. quantize: maps K and V to the values
  read from the KV cache."""
  config, w = load(folder)
  def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return causal_attention(q, quantize(k), quantize(v))
  return head(w, hidden_states(config, w, ids, np.arange(len(ids)), attend))


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


def log_softmax(x: np.ndarray) -> np.ndarray:
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def mix_bits(x: np.ndarray) -> np.ndarray:
  """lowbias32 of Wellons' hash-prospector, on uint32."""
  for shift, factor in ((16, 0x7feb352d), (15, 0x846ca68b)): x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
  return x ^ x >> np.uint32(16)


def gumbel_noise(seed_low: int, seed_high: int, position: int, vocab_size: int) -> np.ndarray:
  """Return the noise of a row of logits, (V,)."""
  low, high, at = (np.array([x], np.uint32) for x in (seed_low, seed_high, position))
  key = mix_bits(low ^ mix_bits(high ^ mix_bits(at)))
  bits = mix_bits(mix_bits(np.arange(vocab_size, dtype=np.uint32)) ^ key) >> np.uint32(9)
  return -np.log(-np.log((bits + 0.5) * 2.0**-23))


def chi_square_passes(ids, p):
  """Return True if the counts of ids fit the probabilities p: chi-square test with Wilson-Hilferty's critical value at
  1e-4. Rare ids form one group."""
  counts, expected = np.bincount(ids, minlength=len(p)).astype(float), len(ids) * p
  rare = expected < 5
  groups = [(counts[i], expected[i]) for i in np.flatnonzero(~rare)]
  if expected[rare].sum() >= 5: groups.append((counts[rare].sum(), expected[rare].sum()))
  statistic, freedom = sum((c - e)**2 / e for c, e in groups), max(1, len(groups) - 1)
  critical = freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom)))**3
  return statistic <= critical


# Fields that change logits

SPM = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
N = 18      # generated tokens
END = 302   # an end token that occurs in greedy outputs


def encodings(words, encode=SPM.EncodeAsIds):   # with and without a leading space, as in vLLM
  pairs = [(encode(word), encode(" " + word)) for word in words]
  return [ids for a, b in pairs for ids in ([a, b] if len(a) == len(b) and a[0] != b[0] else [a])]


def end_ids(options):
  return {*options.get("stop_token_ids", []), *([] if options.get("ignore_eos", True) else [2, END])}


def changed(logits, prompt_ids, output_ids, options, encode=SPM.EncodeAsIds):
  """Return the logits, (V,), of one step after the adjustments that the options ask for."""
  x, bias = logits.copy(), {int(i): value for i, value in options.get("logit_bias", {}).items()}
  banned = end_ids(options) if len(output_ids) < options.get("min_tokens", 0) else set()
  for *first, last in encodings(options.get("bad_words", []), encode):
    if len(output_ids) >= len(first) and output_ids[len(output_ids) - len(first):] == first: banned.add(last)
  candidates = options.get("allowed_token_ids", range(len(x)))
  candidates = [i for i in candidates if i not in banned] or candidates
  for i in range(len(x)):
    x[i] += bias.get(i, 0)
    if i in prompt_ids or i in output_ids:
      x[i] *= options.get("repetition_penalty", 1.0) ** (-1 if x[i] > 0 else 1)
    x[i] -= options.get("frequency_penalty", 0) * output_ids.count(i)
    x[i] -= options.get("presence_penalty", 0) * (i in output_ids)
  return np.where(np.isin(np.arange(len(x)), candidates), x, -np.inf)


def reference_ids(folder, prompt_ids, n, margin, encode=SPM.EncodeAsIds, penalized=None, **options):
  """Return the n ids that follow a prompt with these sampling options, up to an end token, or None if rounding could
  change one. margin: the least difference of the two best logits. penalized: prompt tokens that penalties count."""
  ids, filters = [], [options.get(x, default) for x, default in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))]
  while len(ids) < n and not end_ids(options) & {*ids}:
    logits = reference_logits(folder, [*prompt_ids, *ids])[-1]
    x = changed(logits, penalized or prompt_ids, ids, options, encode)
    if (temperature := options.get("temperature", 0)) >= 1e-5:   # else greedy
      finite = np.isfinite(x)
      keep = reference_sampling_mask(x, temperature, *filters) & finite
      for error in np.random.default_rng(0).standard_normal((8, len(x))) * 1e-3:
        if (reference_sampling_mask(x + error, temperature, *filters) & finite != keep).any(): return None
      words = options["seed"] % 2**32, options["seed"] // 2**32 % 2**32
      x = np.where(keep, x / temperature + gumbel_noise(*words, len(prompt_ids) + len(ids) - 1, len(x)), -np.inf)
    second, best = np.sort(x)[-2:]
    if best - second < margin: return None
    ids.append(int(x.argmax()))
  return ids
