"""Parameters of tests."""
from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
  """Mark parameters of a test as slow. Each is a value or a tuple of values."""
  return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values]


def mark_slow_except(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
  """Return all parameters of a test in order, with all except `quick` marked as slow."""
  return [x for value in values for x in ([value] if value in quick else slow(value))]
