"""Opens a model's checkpoint."""
import pathlib

from .gguf import GGUFCheckpoint
from .weights import FastCheckpoint, SafetensorsCheckpoint


def open_checkpoint(path: pathlib.Path, quantization: str | None = None, activations: str = "auto") -> FastCheckpoint:
  """Open a folder in Hugging Face's layout or a GGUF file. quantization: LLM's option. activations: its
  activation_quantization. Raises InputError for anything else."""
  is_gguf = path.suffix == ".gguf" and not path.is_dir()
  checkpoint = (GGUFCheckpoint if is_gguf else SafetensorsCheckpoint)(path, quantization)
  checkpoint.has_8bit_inputs = activations != "none"
  return checkpoint
