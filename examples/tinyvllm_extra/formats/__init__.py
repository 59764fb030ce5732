"""Checkpoints: safetensors, GGUF, quantized formats, and the Hugging Face hub."""
