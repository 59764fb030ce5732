"""`tinyvllm serve`: its flags, and the checks before the server listens."""
import argparse, os, pathlib, signal, socket, ssl

from tinyvllm.config import InputError, JsonObject, check
from tinyvllm_extra.formats import hub
from tinyvllm_extra.formats.checkpoints import open_checkpoint
from tinyvllm_extra.models import find_model
from tinyvllm_extra.options import LLMConfig
from tinyvllm_extra.serving.app import Server, ServerConfig
from tinyvllm_extra.vllm_options import read_options

from .flags import add_flags, parse_flags, select_options


def check_address(options: ServerConfig) -> None:
  """Raise InputError if the server cannot listen on its address or use its TLS files. Called before the model loads."""
  family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
  if options.uds:
    path = pathlib.Path(options.uds).absolute()
    check(path.is_socket() or not path.exists(), f"uds={options.uds!r} exists and is not a socket; choose another path")
    check(os.access(path.parent, os.W_OK),
          f"uds={options.uds!r}: {path.parent} is not a folder that the server may write to")
  else:
    try: socket.create_server((options.host, options.port), family=family).close()
    except OSError as error:
      raise InputError(f"host={options.host!r}, port={options.port}: {error.strerror}") from error
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  try:
    if options.ssl_certfile: context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    if options.ssl_ca_certs: context.load_verify_locations(options.ssl_ca_certs)
    if options.ssl_ciphers: context.set_ciphers(options.ssl_ciphers)
  except OSError as error:
    names = ", ".join(f"{name}={value!r}" for name, value in options.tls.items() if value)
    raise InputError(f"{names}: {error}") from error


def check_model(model: str, options: JsonObject) -> pathlib.Path:
  """Return the path of the model, downloaded if it is a name. Raises InputError unless LLM can load it."""
  config = read_options(options, model)
  path = hub.local_path(model, config)
  find_model(open_checkpoint(path).hf_config, path, config.runner)
  return path


def parse(argv: list[str]) -> tuple[str | None, JsonObject, ServerConfig]:
  """Return the model folder, the options of LLM and the server's options. Raises InputError for an invalid option."""
  parser = argparse.ArgumentParser(usage="tinyvllm serve [MODEL] [options]", argument_default=argparse.SUPPRESS,
                                   description="Serve the OpenAI API over HTTP.")
  parser.add_argument("model", nargs="?", help=argparse.SUPPRESS)
  parser.add_argument("--config", help=argparse.SUPPRESS)
  add_flags(parser, LLMConfig, ServerConfig)
  args = parse_flags(parser, argv)
  engine = select_options(args, LLMConfig)
  read_options(engine, args.get("model"))
  engine.pop("tokenizer", None)   # names the model
  return args.get("model"), engine, ServerConfig(**select_options(args, ServerConfig))


def main(argv: list[str]) -> int:
  """Run `tinyvllm serve` and return the exit code. Raises any exception that loading the model raised."""
  folder, engine_options, config = parse(argv)
  if folder: check_model(folder, engine_options)   # before listening
  check_address(config)
  server = Server(folder, engine_options, config)
  serving = server.serving
  if config.prefix_cache_file: signal.signal(signal.SIGUSR1, lambda *_: serving.llm and serving.llm.save_prefix_cache())
  server.run()
  if config.uds: pathlib.Path(config.uds).unlink(missing_ok=True)
  if serving.llm: serving.llm.shutdown()
  if server.error: raise server.error
  return server.code
