"""Packages that only an extra of tinyvllm installs. They are imported when a feature first needs them."""
import importlib
from typing import Any


class MissingPackage(ImportError):
  """A package of an extra is not installed: HTTP 501, or one line and exit code 1."""


def optional(module: str, extra: str, feature: str) -> Any:
  """Import a module for `feature`. Raises MissingPackage, which names the extra to install, if a package is missing."""
  try: return importlib.import_module(module)
  except ModuleNotFoundError as error:
    package = (error.name or module).partition(".")[0]
    raise MissingPackage(f"{feature} needs {package}: pip install 'tinyvllm[{extra}]'") from error
