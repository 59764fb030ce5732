"""`tinyvllm serve`: the checks before the server listens."""
import os, pathlib, signal, socket

from tinyvllm.config import InputError, JsonObject, check
from tinyvllm_extra import options, vllm_options
from tinyvllm_extra.formats import fit, hub
from tinyvllm_extra.router import children, proxy
from tinyvllm_extra.serving.app import Server, ServerConfig
from tinyvllm_extra.trace import player

from . import doctor
from .flags import FLAGS, select_options, to_words


def check_address(host: str, port: int, uds: str | None) -> None:
  """Raise InputError if the server cannot listen on its socket or port. Called before the model is loaded."""
  if uds:
    path = pathlib.Path(uds).absolute()
    check(path.is_socket() or not path.exists(), f"uds={uds!r} exists and is not a socket; choose another path")
    is_writable = os.access(path.parent, os.W_OK)
    return check(is_writable, f"uds={uds!r}: {path.parent} is not a folder that the server may write to")
  try: socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
  except OSError as error: raise InputError(f"host={host!r}, port={port}: {error.strerror}") from error


def read_arguments(args: JsonObject) -> tuple[str | None, JsonObject, ServerConfig, options.LLMConfig]:
  """Return the model folder, the options of LLM, the server's options, and LLM's as a config. Raises InputError for an
  invalid option."""
  engine = select_options(args, options.LLMConfig)
  model, = args["model"] if isinstance(args.get("model"), list) else [args.get("model")]
  return model, engine, ServerConfig(**select_options(args, ServerConfig)), vllm_options.read_options(engine, model)


def make_router(args: JsonObject, models: dict[str, JsonObject]) -> proxy.Router:
  """Return the router of several models. models: their options by name. Raises InputError for a wrong option."""
  config, device = ServerConfig(**select_options(args, ServerConfig)), doctor.run_probe(os.environ.get("DEV", ""), 0)
  check(device["opens"], f"no device opens: {device.get('reason')}")
  for name in FLAGS["of_one_model"]: check(name not in args, f"{name}: set it for one of the models, in --config FILE")
  shared = {name: x for name, x in args.items() if name not in (*FLAGS["of_router"], *FLAGS["not_shared"])}
  routed = list[children.Child]()
  for name, own in models.items():
    words = to_words(shared | own)
    parsed = args["root"].commands["serve"].parse_options(f"model {name}", words)
    for x in FLAGS["of_router"] + FLAGS["refused"]: check(x not in parsed, f"model {name}: {x}: leave it out")
    try:
      model, _, _, llm_config = read_arguments(parsed)
      hf, _ = doctor.read_model(hub.local_path(str(model), llm_config), llm_config.runner)
    except InputError as error: raise InputError(f"model {name}: {error}") from error
    estimate = fit.estimate_fit(name, hf, device, llm_config)
    share = parsed.get("gpu_memory_utilization") or estimate["shared_gib"] / device["free_gib"]
    routed.append(children.Child(name, words, share, config.shutdown_timeout + 10))
  return proxy.Router(routed, args.get("gpu_memory_utilization", options.LLMConfig().gpu_memory_utilization), config)


def make_server(args: JsonObject) -> Server:
  """Return the server of one model. Raises InputError unless it can load the model."""
  model, engine, config, llm_config = read_arguments(args)
  if model: doctor.read_model(hub.local_path(model, llm_config), llm_config.runner)   # its checks
  check(not config.model_ttl, f"model_ttl={config.model_ttl} needs several models: use models_dir or --model NAME=PATH")
  return Server(model, engine, config, player.routes(engine["trace"]) if engine.get("trace") else None)


def main(args: JsonObject) -> int:
  """Run `tinyvllm serve` and return the exit code. Raises any exception that loading the model raised."""
  options.setup_logging(is_server=True)
  models = hub.named_models(args.get("model", []), args.get("models_dir"))
  server = make_router(args, models) if models else make_server(args)
  config, serving = server.options, server.serving
  check_address(config.host, config.port, config.uds)   # before the model is loaded
  def save(*_: object) -> None:
    if serving.llm: serving.llm.save_prefix_cache()
  if config.prefix_cache_file: signal.signal(signal.SIGUSR1, save)
  server.run()
  if config.uds: pathlib.Path(config.uds).unlink(missing_ok=True)
  if serving.llm: serving.llm.shutdown()
  if server.error: raise server.error
  return server.code
