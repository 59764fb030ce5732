"""Files of a prefix cache: safetensors files with a key, the bytes and a checksum of each block. The metadata hold all
that blocks and keys depend on. A file is replaced completely or not at all."""
import contextlib, hashlib, json, math, os, pathlib, tempfile, zlib
from collections.abc import Iterable, Iterator
from typing import IO

import numpy as np
from safetensors import SafetensorError, safe_open

from tinyvllm.config import JsonObject, ModelConfig, check

from .hub import open_checkpoint

MAGIC = b'{"__metadata__": {"format": "'   # start of the JSON header
FORMAT = "1"           # change it when the hashes, the blocks or the file layout change
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


def layout(count: int, row_bytes: int) -> dict[str, tuple[str, list[int]]]:
  """Return the dtypes and shapes of a file's tensors, in their order."""
  return {"keys": ("U8", [count, 32]), "blocks": ("U8", [count, row_bytes]), "checksums": ("U32", [count])}


def checksum(key: bytes, row: np.ndarray) -> int: return zlib.crc32(row.data, zlib.crc32(key))


def replaceable(path: str | os.PathLike) -> pathlib.Path:
  """Return the absolute path of a prefix cache or of a new file. Raises FileExistsError for other files."""
  target = pathlib.Path(path).expanduser().resolve()
  magic = b""
  with contextlib.suppress(FileNotFoundError), open(target, "rb") as old: magic = old.read(8 + len(MAGIC))[8:]
  if MAGIC.startswith(magic): return target
  raise FileExistsError(f"{str(path)!r} is not a prefix cache: remove it, or choose another file")


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[IO[bytes]]:
  """Open a file that replaces `path` at the end, unless an error is raised."""
  with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:   # an error deletes it
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:   # readable only by its owner
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(file.name, path)


def write_blocks(file: IO[bytes], metadata: dict[str, str], keys: list[bytes], row_bytes: int,
                 parts: Iterable[np.ndarray]) -> None:
  """Write blocks in parts, (rows, row_bytes) uint8 each: all of them may be as large as the device's memory.
  safetensors' own writer needs all tensors in memory."""
  header: JsonObject = {"__metadata__": metadata}
  end = 0
  for name, (dtype, shape) in layout(len(keys), row_bytes).items():
    start, end = end, end + math.prod(shape) * int(dtype[1:]) // 8
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
  text = json.dumps(header).encode()
  text = text.ljust(-(-len(text) // 8) * 8)
  file.write(len(text).to_bytes(8, "little") + text + b"".join(keys))
  checksums = list[int]()
  for rows in parts:
    checksums += map(checksum, keys[len(checksums):len(checksums) + len(rows)], rows)
    file.write(rows.data)
  file.write(np.array(checksums, "<u4").data)


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
      slices = {name: file.get_slice(name) for name in layout(0, 0)}
    except (OSError, SafetensorError) as e: check(False, f"{prefix} is damaged ({e}): remove it")
    actual = {name: (x.get_dtype(), x.get_shape()) for name, x in slices.items()}
    check(actual == layout(actual["keys"][1][0], row_bytes), f"{prefix} is damaged: remove it")
    self.keys = [row.tobytes() for row in slices["keys"][:]]
    self.blocks = slices["blocks"]
    self.checksums = slices["checksums"][:]

  def rows(self, indices: list[int]) -> np.ndarray:
    """Read blocks by their increasing indices, (rows, row_bytes) uint8. Raises InputError if one is damaged."""
    rows = self.blocks[indices[0]:indices[-1] + 1][[i - indices[0] for i in indices]]
    damaged = [i for i, row in zip(indices, rows, strict=True) if checksum(self.keys[i], row) != self.checksums[i]]
    check(not damaged, f"{self.prefix} is damaged (block {damaged[:1]}): remove it")
    return rows
