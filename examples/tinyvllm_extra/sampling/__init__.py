"""Logits processors, structured outputs, speculative decoding and beam search."""
