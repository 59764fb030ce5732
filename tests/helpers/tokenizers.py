"""A byte-level BPE that is trained on a few texts."""
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


TEXTS = ["the cat sat on the mat", "hello world, 12 3456!", "tabs\tand\nnew lines\n\n", "日本語 and ελληνικά",
         "\U0001f469\u200d\U0001f467 emoji \U0001f642\U0001f642 e\u0301 \u00e9", "  two  spaces  ", "x",
         "1 + 1 = 2; f(x) -> y"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_bpe(words=()):
  """Return a byte-level BPE trained on TEXTS. Its first ids are SPECIALS. words: some that become single tokens."""
  model = Tokenizer(models.BPE())
  model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  model.decoder = decoders.ByteLevel()
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False)
  model.train_from_iterator([*TEXTS * 3, *[*words] * 99], trainer)
  return model
