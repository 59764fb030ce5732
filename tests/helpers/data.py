"""Recorded data and tables of cases, in tests/data."""
import json
from pathlib import Path
from typing import Any


DATA = Path(__file__).parents[1] / "data"


def read_data(name: str) -> Any:
  """Return the content of a JSON file."""
  return json.loads((DATA / name).read_text())
