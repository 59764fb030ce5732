"""Files of a prefix cache: safetensors files with one tensor, whose rows hold the key, a checksum and the bytes of each
block. The metadata hold all that blocks and keys depend on. A file is replaced completely or not at all."""
import contextlib, hashlib, itertools, json, math, os, pathlib, tempfile, typing, zlib
from collections.abc import Iterable, Iterator

import numpy as np
from safetensors import SafetensorError, safe_open

from tinyvllm.config import ModelConfig, check

from .hub import open_checkpoint

MAGIC = b'{"__metadata__": {"format": "'   # start of the JSON header
FORMAT = "2"           # change it when the hashes, the blocks or the file layout change
START = 4 + 32         # bytes of a row before the block: the checksum of all that follows, and the key
SAMPLE_BYTES = 2**16   # bytes of a weight to hash, at each of four offsets


def fingerprint(path: pathlib.Path, config: ModelConfig) -> str:
  """Hash a model's config and samples of each weight, which differ between fine-tuned models. Reads few bytes."""
  checkpoint = open_checkpoint(path)
  digest = hashlib.sha256(repr((config, checkpoint.hf_config.get("quantization_config"))).encode())
  for name, tensor in sorted(checkpoint.stored_tensors().items()):
    data = tensor.raw()
    digest.update(repr((name, tensor.dtype.str, tensor.shape)).encode())
    for start in range(0, len(data), max(SAMPLE_BYTES, len(data) // 4)):
      digest.update(data[start:start + SAMPLE_BYTES].data)
  return digest.hexdigest()[:32]


def replaceable(path: str | os.PathLike) -> pathlib.Path:
  """Return the absolute path of a prefix cache or of a new file. Raises FileExistsError for other files."""
  target = pathlib.Path(path).expanduser().resolve()
  magic = b""
  with contextlib.suppress(FileNotFoundError), open(target, "rb") as old: magic = old.read(8 + len(MAGIC))[8:]
  if MAGIC.startswith(magic): return target
  raise FileExistsError(f"{str(path)!r} is not a prefix cache: remove it, or choose another file")


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[typing.IO[bytes]]:
  """Open a file that replaces `path` at the end, unless an error is raised."""
  with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:   # an error deletes it
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:   # readable only by its owner
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(file.name, path)


def write_blocks(file: typing.IO[bytes], metadata: dict[str, str], keys: list[bytes], row_bytes: int,
                 parts: Iterable[np.ndarray]) -> None:
  """Write blocks in parts, (rows, row_bytes) uint8 each: all of them may be as large as the device's memory.
  safetensors' own writer needs all tensors in memory."""
  shape = len(keys), START + row_bytes
  blocks = {"dtype": "U8", "shape": shape, "data_offsets": [0, math.prod(shape)]}
  header = json.dumps({"__metadata__": metadata, "blocks": blocks}).encode()
  file.write(len(header).to_bytes(8, "little") + header)
  for key, block in zip(keys, itertools.chain.from_iterable(parts), strict=True):
    file.write(zlib.crc32(block.data, zlib.crc32(key)).to_bytes(4, "little") + key)
    file.write(block.data)


class StoredBlocks:
  """The blocks of a file. Raises InputError, which starts with `prefix`, for a damaged file, or one with other metadata
  or sizes than the given ones."""
  def __init__(self, path: pathlib.Path, metadata: dict[str, str], row_bytes: int, prefix: str):
    self.prefix = prefix
    try:
      file = safe_open(path, "numpy")
      found = file.metadata() or {}
      differences = [f"{x} {found.get(x)!r}, here {own!r}" for x, own in metadata.items() if found.get(x) != own]
      check(found == metadata, f"{prefix} has blocks that do not fit this engine ({'; '.join(differences)}): "
            "remove it, or choose another file")
      self.blocks = file.get_slice("blocks")
    except (OSError, SafetensorError) as e: check(False, f"{prefix} is damaged ({e}): remove it")
    is_valid = self.blocks.get_dtype() == "U8" and self.blocks.get_shape()[1:] == [START + row_bytes]
    check(is_valid and self.blocks.get_shape()[0] > 0, f"{prefix} is damaged: remove it")
    self.keys = [row.tobytes() for row in self.blocks[:, 4:START]]

  def rows(self, indices: list[int]) -> np.ndarray:
    """Read blocks by their increasing indices, (rows, row_bytes) uint8. Raises InputError if one is damaged."""
    rows = self.blocks[indices[0]:indices[-1] + 1][[i - indices[0] for i in indices]]
    checksums = rows[:, :4].copy().view("<u4")[:, 0]
    damaged = [i for i, row, x in zip(indices, rows, checksums, strict=True) if zlib.crc32(row[4:]) != x]
    check(not damaged, f"{self.prefix} is damaged (block {damaged[:1]}): remove it")
    return rows[:, START:]
