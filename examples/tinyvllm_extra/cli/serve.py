"""`tinyvllm serve`: its flags, and the checks before the server listens."""
import argparse, pathlib, signal, socket
from typing import Any

from tinyvllm.config import InputError
from tinyvllm_extra.formats import hub
from tinyvllm_extra.formats.checkpoints import open_checkpoint
from tinyvllm_extra.models import find_model
from tinyvllm_extra.options import LLMConfig
from tinyvllm_extra.serving.app import Server, ServerConfig, check_files
from tinyvllm_extra.vllm_options import ModelOptions, split_options

from .flags import add_flags, parse_flags, select_options, set_log_level


def check_port(host: str, port: int) -> None:
  """Raise InputError if the server cannot listen on this address. Called before the model is loaded."""
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try: socket.create_server((host, port), family=family).close()
  except OSError as error: raise InputError(f"host={host!r}, port={port}: {error.strerror}") from error


def parse(argv: list[str]) -> tuple[str | None, dict[str, Any], ServerConfig]:
  """Return the model folder, the options of LLM and the server's options. Raises InputError for an invalid option."""
  parser = argparse.ArgumentParser(usage="tinyvllm serve [MODEL] [options]", argument_default=argparse.SUPPRESS,
                                   description="Serve the OpenAI API over HTTP.")
  parser.add_argument("model", nargs="?", help=argparse.SUPPRESS)
  parser.add_argument("--config", help=argparse.SUPPRESS)
  add_flags(parser, LLMConfig, ModelOptions, ServerConfig)
  args = parse_flags(parser, argv)
  set_log_level(args)
  engine = select_options(args, LLMConfig)
  split_options(engine, args.get("model"))
  engine.pop("tokenizer", None)   # names the model
  return args.get("model"), engine, ServerConfig(**select_options(args, ServerConfig))


def main(argv: list[str]) -> int:
  """Run `tinyvllm serve` and return the exit code. Raises any exception that loading the model raised."""
  folder, engine_options, config = parse(argv)
  options, own = split_options(engine_options, folder)
  if folder:   # download it, or report a bad one, before listening
    path = hub.local_path(folder, own.revision, own.download_dir, LLMConfig(**options))
    find_model(open_checkpoint(path).hf_config, path, engine_options.get("runner", "auto"))
  check_files(config)
  if not config.uds: check_port(config.host, config.port)
  server = Server(folder, engine_options, config)
  serving = server.serving
  if config.prefix_cache_file: signal.signal(signal.SIGUSR1, lambda *_: serving.llm and serving.llm.save_prefix_cache())
  server.run()
  if config.uds: pathlib.Path(config.uds).unlink(missing_ok=True)
  if serving.llm: serving.llm.shutdown()
  if server.error: raise server.error
  return server.code
