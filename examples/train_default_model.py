"""Train the bundled model: a LLaMA with 0.9M parameters that writes short English sentences.

  DEV=CPU python examples/train_default_model.py [--steps N] [--out DIR]

Reads default_model_text.txt next to this script, one document per line (a literal \\n is a newline), and writes a
Hugging Face model folder. Documents start at position 0 with BOS and end with EOS, as in serving.
"""
import argparse
import json
import math
import time
from io import BytesIO
from pathlib import Path

import numpy as np
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tinygrad import Context, Tensor, TinyJit, dtypes
from tinygrad.nn.optim import AdamW
from tinygrad.nn.state import safe_save

HERE = Path(__file__).resolve().parent
BOS, EOS, PAD = 1, 2, -100   # PAD: target that the loss ignores
BATCH, PEAK_LR, WARMUP, DROPOUT = 16, 2e-3, 100, 0.1
VOCAB, D, FFN, LAYERS, HEADS, KV_HEADS, H, EPS, THETA = 768, 128, 384, 4, 4, 2, 32, 1e-5, 10000.0
CONFIG = {
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16", "vocab_size": VOCAB,
  "hidden_size": D, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
  "num_key_value_heads": KV_HEADS, "head_dim": H, "max_position_embeddings": 512, "rms_norm_eps": EPS,
  "rope_theta": THETA, "rope_scaling": None, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
  "tie_word_embeddings": True, "bos_token_id": BOS, "eos_token_id": EOS}
CHAT_TEMPLATE = ("{{ bos_token }}User: {{ (messages | selectattr('role', 'equalto', 'user') | list)[-1]['content'] }}\n"
                 "{% if add_generation_prompt %}Assistant:{% endif %}")   # trained on single turns: uses the last
TOKENIZER_CONFIG = {
  "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": "<s>",
  "eos_token": "</s>", "unk_token": "<unk>", "model_max_length": 512, "chat_template": CHAT_TEMPLATE}
GENERATION_CONFIG = {"bos_token_id": BOS, "eos_token_id": EOS}
FILES = {"config": CONFIG, "generation_config": GENERATION_CONFIG, "tokenizer_config": TOKENIZER_CONFIG}
PROMPTS = ["Hello", "The cat", "Once upon a time", "I like", "The sun", "What is", "My friend", "Tomorrow we",
           "User: Hello\nAssistant:", "User: What is a cat?\nAssistant:"]

def train_tokenizer(docs: list[str]) -> bytes:
  """Train a LLaMA-style BPE model. Its training text has no newlines: a newline becomes the byte token <0x0A>."""
  model = BytesIO()
  SentencePieceTrainer.train(
    sentence_iterator=iter([line for doc in docs for line in doc.split("\n")]), model_writer=model, model_type="bpe",
    vocab_size=VOCAB, byte_fallback=True, character_coverage=1.0, unk_id=0, bos_id=BOS, eos_id=EOS, pad_id=-1,
    normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True,
    split_digits=True, minloglevel=1)
  return model.getvalue()

def init_weights() -> dict[str, Tensor]:
  """Return random float32 weights by Hugging Face name; linear weights are (out, in)."""
  shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, D), "model.norm": (D,)}
  layer = {"self_attn.q_proj": (HEADS * H, D), "self_attn.k_proj": (KV_HEADS * H, D),
           "self_attn.v_proj": (KV_HEADS * H, D), "self_attn.o_proj": (D, HEADS * H), "mlp.gate_proj": (FFN, D),
           "mlp.up_proj": (FFN, D), "mlp.down_proj": (D, FFN),
           "input_layernorm": (D,), "post_attention_layernorm": (D,)}
  for n in range(LAYERS): shapes |= {f"model.layers.{n}.{name}": shape for name, shape in layer.items()}
  return {f"{name}.weight": (Tensor.ones(*s).contiguous() if len(s) == 1 else Tensor.randn(*s) * 0.05).realize()
          for name, s in shapes.items()}

def rope(x: Tensor, T: int) -> Tensor:
  """Rotate x (B, T, heads, H) by position, pairing the two halves of a head like Hugging Face."""
  angle = np.arange(T)[:, None] * THETA ** (-np.arange(0, H, 2) / H)   # (T, H/2)
  cos, sin = (Tensor(f(angle).astype(np.float32)).reshape(1, -1, 1, H // 2) for f in (np.cos, np.sin))
  a, b = x.chunk(2, dim=-1)
  return (a * cos - b * sin).cat(b * cos + a * sin, dim=-1)

def forward(w: dict[str, Tensor], tokens: Tensor) -> Tensor:
  """Return logits (B, T, VOCAB) of tokens (B, T); each row is one document from position 0."""
  def norm(x: Tensor, name: str) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w[f"model.{name}.weight"]

  def linear(x: Tensor, name: str) -> Tensor:
    """Multiply without fusing other operations, forward and backward: four times faster on the CPU."""
    return x.contiguous().linear(w[f"model.{name}.weight"].T).contiguous().contiguous_backward()

  B, T = (int(n) for n in tokens.shape)
  x = w["model.embed_tokens.weight"][tokens]   # (B, T, D)
  for layer in (f"layers.{n}" for n in range(LAYERS)):
    h = norm(x, f"{layer}.input_layernorm")
    q, k, v = (linear(h, f"{layer}.self_attn.{p}_proj").reshape(B, T, -1, H) for p in "qkv")
    q, k, v = rope(q, T).transpose(1, 2), rope(k, T).transpose(1, 2), v.transpose(1, 2)   # (B, heads, T, H)
    a = q.scaled_dot_product_attention(k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(B, T, -1)
    x = x + linear(a, f"{layer}.self_attn.o_proj").dropout(DROPOUT)
    h = norm(x, f"{layer}.post_attention_layernorm")
    h = linear(h, f"{layer}.mlp.gate_proj").silu() * linear(h, f"{layer}.mlp.up_proj")
    x = x + linear(h, f"{layer}.mlp.down_proj").dropout(DROPOUT)
  return linear(norm(x, "norm"), "embed_tokens")

def train(w: dict[str, Tensor], rows: np.ndarray, steps: int) -> None:
  """Train `w` in place on rows (docs, T+1) of token ids, padded with PAD."""
  optimizer = AdamW(list(w.values()), lr=PEAK_LR, b2=0.98, weight_decay=0.1)

  @TinyJit
  def step(batch: Tensor, lr: Tensor) -> Tensor:
    optimizer.lr.assign(lr)
    optimizer.zero_grad()
    inputs, targets = batch[:, :-1], batch[:, 1:]
    loss = forward(w, (inputs == PAD).where(EOS, inputs)).sparse_categorical_crossentropy(targets, ignore_index=PAD)
    loss.backward()
    return loss.realize(*optimizer.schedule_step())

  rng, order, start = np.random.default_rng(0), np.zeros(0, int), time.perf_counter()
  for i in range(steps):
    if len(order) < BATCH: order = np.concatenate([order, rng.permutation(len(rows))])
    batch, order = rows[order[:BATCH]], order[BATCH:]
    lr = PEAK_LR * min((i + 1) / WARMUP, 0.02 + 0.49 * (1 + math.cos(math.pi * i / steps)))
    loss = step(Tensor(batch).realize(), Tensor([lr], dtype=dtypes.float32).realize())
    if i % 100 == 0 or i == steps - 1:
      print(f"step {i:5d}  loss {loss.item():.4f}  {time.perf_counter() - start:6.1f} s", flush=True)

def greedy(w: dict[str, Tensor], tokenizer: SentencePieceProcessor, prompts: list[str], length: int) -> list[str]:
  """Return each prompt with its greedy continuation up to EOS or, marked by "...", `length` tokens in total."""
  rows = [[BOS, *tokenizer.encode(prompt)] for prompt in prompts]
  best = TinyJit(lambda tokens: forward(w, tokens).argmax(-1).realize())
  while any(row[-1] != EOS and len(row) < length for row in rows):
    choice = best(Tensor([row + [EOS] * (length - len(row)) for row in rows], dtype=dtypes.int32).realize()).numpy()
    for row, c in zip(rows, choice, strict=True):
      if row[-1] != EOS and len(row) < length: row.append(int(c[len(row) - 1]))
  return [tokenizer.decode(row) + ("" if row[-1] == EOS else " ...") for row in rows]

def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=int, default=1500)
  parser.add_argument("--out", type=Path, default=HERE.parent / "tinyvllm" / "default_model")
  args = parser.parse_args()
  docs = [line.replace("\\n", "\n") for line in (HERE / "default_model_text.txt").read_text().splitlines()]
  tokenizer_model = train_tokenizer(docs)
  tokenizer = SentencePieceProcessor(model_proto=tokenizer_model)
  tokens = [[BOS, *tokenizer.encode(doc), EOS] for doc in docs]
  length = max(map(len, tokens))
  Tensor.manual_seed(0)
  w = init_weights()
  print(f"{len(docs)} documents of at most {length} tokens, {sum(t.numel() for t in w.values())} parameters")
  rows = np.array([t + [PAD] * (length - len(t)) for t in tokens], dtype=np.int32)
  with Context(TRAINING=1): train(w, rows, args.steps)

  args.out.mkdir(parents=True, exist_ok=True)
  safe_save({name: t.half().realize() for name, t in w.items()}, str(args.out / "model.safetensors"), {"format": "pt"})
  (args.out / "tokenizer.model").write_bytes(tokenizer_model)
  for name, data in FILES.items(): (args.out / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
  for text in greedy(w, tokenizer, PROMPTS, length): print(repr(text))

if __name__ == "__main__": main()
