"""Imports packages that only an extra of tinyvllm installs, when a feature first needs them."""
import importlib, types


class MissingPackage(ImportError):
  """A package of an extra is not installed. Reported as HTTP 501, or as one line and exit code 1."""


def optional(module: str, extra: str, feature: str) -> types.ModuleType:
  """Import and return a module for `feature`. Raises MissingPackage naming the extra to install."""
  try: return importlib.import_module(module)
  except ModuleNotFoundError as error:
    package = (error.name or module).partition(".")[0]
    raise MissingPackage(f"{feature} needs {package}: pip install 'tinyvllm[{extra}]'") from error
