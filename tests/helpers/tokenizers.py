"""A byte-level BPE that is trained on a few texts."""
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .data import read_data

TEXTS = read_data("corpus.json")["byte-level BPE"]
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
