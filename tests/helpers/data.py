"""Recorded data and tables of cases, in tests/data, and files of a test."""
import json
from pathlib import Path
from typing import Any


DATA = Path(__file__).parents[1] / "data"


def read_data(name: str) -> Any:
  """Return the content of a JSON file."""
  return json.loads((DATA / name).read_text())


def write_files(folder: Path, files: dict[str, str]) -> None:
  """Write text files into a folder, by their paths in it."""
  for name, text in files.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
