"""`tinyvllm serve`: the checks before the server listens."""
import os, pathlib, signal, socket

from tinyvllm.config import InputError, JsonObject, check
from tinyvllm_extra import models, options, vllm_options
from tinyvllm_extra.formats import hub
from tinyvllm_extra.serving.app import Server, ServerConfig
from tinyvllm_extra.trace import player

from .flags import select_options


def check_address(host: str, port: int, uds: str | None) -> None:
  """Raise InputError if the server cannot listen on its socket or port. Called before the model is loaded."""
  if uds:
    path = pathlib.Path(uds).absolute()
    check(path.is_socket() or not path.exists(), f"uds={uds!r} exists and is not a socket; choose another path")
    is_writable = os.access(path.parent, os.W_OK)
    return check(is_writable, f"uds={uds!r}: {path.parent} is not a folder that the server may write to")
  try: socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
  except OSError as error: raise InputError(f"host={host!r}, port={port}: {error.strerror}") from error


def check_model(model: str, options: JsonObject) -> pathlib.Path:
  """Return the path of the model, downloaded if it is a name. Raises InputError unless LLM can load it."""
  config = vllm_options.read_options(options, model)
  path = hub.local_path(model, config)
  models.choose_model(hub.open_checkpoint(path).hf_config, path, config.runner)
  return path


def read_arguments(args: JsonObject) -> tuple[str | None, JsonObject, ServerConfig]:
  """Return the model folder, the options of LLM and the server's options. Raises InputError for an invalid option."""
  engine = select_options(args, options.LLMConfig)
  vllm_options.read_options(engine, args.get("model"))
  return args.get("model"), engine, ServerConfig(**select_options(args, ServerConfig))


def main(args: JsonObject) -> int:
  """Run `tinyvllm serve` and return the exit code. Raises any exception that loading the model raised."""
  folder, engine, config = read_arguments(args)
  options.setup_logging(is_server=True)
  if folder: check_model(folder, engine)   # before listening
  check_address(config.host, config.port, config.uds)
  server = Server(folder, engine, config, player.routes(engine["trace"]) if engine.get("trace") else None)
  serving = server.serving
  def save(*_: object) -> None:
    if serving.llm: serving.llm.save_prefix_cache()
  if config.prefix_cache_file: signal.signal(signal.SIGUSR1, save)
  server.run()
  if config.uds: pathlib.Path(config.uds).unlink(missing_ok=True)
  if serving.llm: serving.llm.shutdown()
  if server.error: raise server.error
  return server.code
