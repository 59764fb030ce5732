"""SqueezeLLM: lookup tables of weights, and sparse outliers, as the paper's code packs them."""
from pathlib import Path

import numpy as np
import pytest
from helpers.models import random_weights, tiny_config, tiny_model
from helpers.quantized_models import SIZES, Matrices, check_matrices, is_projection, words
from safetensors.numpy import load_file, save_file

from tinyvllm import InputError
from tinyvllm_extra.weights import open_checkpoint


def write_squeezellm(folder: Path, bits: int, sparse: bool) -> dict[str, np.ndarray]:
  """Write a model as the paper's QuantLinearLUT.pack2 does: tables of random centroids, and outliers minus the
  centroid that stands for zero. Return the weights that its kernels multiply by."""
  rng = np.random.default_rng(0)
  tiny_model(folder, **SIZES, quantization_config={"quant_method": "squeezellm", "wbits": bits})
  plain = random_weights(tiny_config(**SIZES))
  tensors = dict(plain)
  for name in filter(is_projection, plain):
    w = tensors.pop(name)
    module = name.removesuffix("weight")
    outliers = np.where(np.abs(w) > 2 * w.std(), w, 0) if sparse else np.zeros_like(w)
    table = np.sort(rng.standard_normal((len(w), 2**bits)).astype(np.float32) * 1.5 * w.std(), 1)
    q = np.abs((w - np.where(outliers, w, 0))[..., None] - table[:, None]).argmin(2)
    rows, columns, values = [0], [], []
    for i, j in np.ndindex(w.shape):
      if outliers[i, j]:
        columns.append(j)
        values.append(outliers[i, j] - table[i, np.abs(table[i]).argmin()])
      if j == w.shape[1] - 1: rows.append(len(columns))
      plain[name][i, j] = table[i, q[i, j]]
    for i in range(len(w)):
      for at in range(rows[i], rows[i + 1]): plain[name][i, columns[at]] += values[at]
    tensors |= {f"{module}qweight": words(q.T, bits, 0), f"{module}lookup_table": table}
    if sparse: tensors |= {f"{module}rows": np.array(rows, np.int32), f"{module}cols": np.array(columns, np.int32),
                           f"{module}vals": np.array(values, np.float32), f"{module}startrows": np.zeros(128, np.int32)}
  save_file(tensors, folder / "model.safetensors")
  return plain


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("bits", [3, 4])
def test_squeezellm_weights_equal_lookup_tables(tmp_path, bits, sparse):
  check_matrices(tmp_path, write_squeezellm(tmp_path, bits, sparse))
  text = f"squeezellm int{bits}, per channel, dequantized; embed_tokens, lm_head float32"
  assert open_checkpoint(tmp_path).describe() == text


KEY = "model.layers.1.mlp.down_proj."
def remove(suffix): return lambda tensors: tensors.pop(KEY + suffix)
def cut(suffix): return lambda tensors: tensors.update({KEY + suffix: tensors[KEY + suffix][:-1]})
def move(suffix): return lambda tensors: tensors[KEY + suffix].fill(96)


@pytest.mark.parametrize("change,message", [
  (remove("qweight"), "qweight is missing"), (cut("qweight"), r"qweight is \[11, 64\]"),
  (cut("lookup_table"), r"lookup_table is \[63, 16\]"), (cut("vals"), "vals is"), (cut("rows"), "rows is"),
  (remove("cols"), "cols is missing"), (move("cols"), "cols: the outliers are not in")])
def test_damaged_squeezellm_raises_with_tensor(tmp_path, change, message):
  write_squeezellm(tmp_path, 4, True)
  tensors = load_file(tmp_path / "model.safetensors")
  change(tensors)
  save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, tmp_path / "model.safetensors")
  with pytest.raises(InputError, match=KEY + message): Matrices(tmp_path).shards(0, {KEY[:-1]: 64}, 96)
