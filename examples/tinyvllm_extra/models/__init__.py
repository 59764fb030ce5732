"""Architectures beyond the core's. One that is like LLaMA is a row in table.json, with options of the layers in
layers.py and recurrent.py; table.py reads it. For another one, write models/NAME.py with a class like llama.Llama, as
gpt2.py, and name it in its row. A model is built from the backend's modules, so that every weight format and kernel
works with it; their `sources` name the checkpoint's tensors. The config is a ModelConfig or a subclass."""
from .table import MODELS as MODELS, choose_model as choose_model, find_model as find_model, text_config as text_config
