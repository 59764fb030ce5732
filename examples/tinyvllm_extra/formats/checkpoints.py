"""Opens a model's checkpoint."""
import pathlib

from . import gguf, weights


def open_checkpoint(path: pathlib.Path, quantization: str | None = None) -> weights.SafetensorsCheckpoint:
  """Open a folder in Hugging Face's layout or a GGUF file. quantization: LLM's option. Raises InputError for anything
  else."""
  is_gguf = path.suffix == ".gguf" and not path.is_dir()
  return (gguf.GGUFCheckpoint if is_gguf else weights.SafetensorsCheckpoint)(path, quantization)
