"""The server's options."""
import dataclasses, os

from tinyvllm.config import Options, check, option
from tinyvllm_extra.text.parsers import REASONING, TOOLS


@dataclasses.dataclass(frozen=True)
class ServerConfig(Options):
  """Server options, under vLLM's names."""
  host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0: every network interface")
  port: int = option(8000, "TCP port; 0: any free port", min=0, max=65535)
  api_key: list[str] | None = option(None, "API keys of clients (default: $TINYVLLM_API_KEY)")
  models_dir: str | None = option(None, "Folder of models, started by requests (default: none)")
  model_ttl: float | None = option(None, "Seconds until an idle model stops (default: none)", min=0.001, max=2**31)
  served_model_name: list[str] | None = option(None, "Model names in the API (default: folder name)")
  max_queue: int = option(256, "Maximum waiting sequences, then HTTP 429", min=0, max=2**31 - 1)
  request_timeout: float | None = option(None, "Seconds until a request aborts (default: none)", min=0.001, max=2**31)
  shutdown_timeout: float = option(30, "Seconds for requests to finish after a signal", min=0, max=2**31)
  max_body_size: int = option(2**22, "Maximum size of a request body in bytes", min=1, max=2**40)
  stream_interval: int = option(1, "Minimum number of new tokens per stream event", min=1, max=2**31)
  allowed_origins: list[str] | None = option(None, "Web origins that may call the API, CORS (default: none)")
  strict_fields: bool = option(False, "Refuse unknown request fields with HTTP 400")
  trust_request_chat_template: bool = option(False, "Allow chat_template in requests")
  lora_modules: list[str] | None = option(None, "Adapters for --enable-lora, as in NAME=FOLDER (default: none)")
  reasoning_parser: str | None = option(None, "Format of reasoning (default: chat template's)", choices=(*REASONING,))
  tool_call_parser: str | None = option(None, "Format of tool calls (default: chat template's)", choices=(*TOOLS,))
  prefix_cache_file: str | None = option(None, "File to load and save the prefix cache (default: none)")
  disable_uvicorn_access_log: bool = option(False, "Log no requests; also --disable-access-log")
  disable_access_log_for_endpoints: str = option("", "Paths not to log, as in /a,/b (default: none)")
  root_path: str = option("", "Path prefix of all routes behind a proxy (default: none)")
  uds: str | None = option(None, "Unix domain socket to listen on, instead of host and port (default: none)")
  ssl_certfile: str | None = option(None, "TLS certificate, to serve HTTPS (default: none)")
  ssl_keyfile: str | None = option(None, "Private key of the certificate (default: in ssl_certfile)")
  ssl_ca_certs: str | None = option(None, "CA certificates that clients' certificates must be from (default: none)")
  ssl_cert_reqs: int = option(0, "Client certificates; 0: none, 1: optional, 2: required", min=0, max=2)
  ssl_ciphers: str | None = option(None, "Ciphers of TLS 1.2 and below (default: OpenSSL's)")

  def __post_init__(self) -> None:
    super().__post_init__()
    are_valid = all([*self.adapters, *self.adapters.values()]) and len(self.adapters) == len(self.lora_modules or ())
    check(are_valid, f"lora_modules={self.lora_modules!r} must be words NAME=FOLDER with different names")
    for name, value in self.tls.items():
      check(not value or self.ssl_certfile, f"{name}={value!r} requires ssl_certfile: set that, too")
    check(not self.root_path or self.root_path[0] == "/" != self.root_path[-1],
          f"root_path={self.root_path!r} must start with a slash, and not end with one")

  keys = property(lambda self: [x for x in self.api_key or [os.environ.get("TINYVLLM_API_KEY", "")] if x])   # clients'
  # The folders of lora_modules by name
  adapters = property(lambda self: dict(word.partition("=")[::2] for word in self.lora_modules or ()))
  tls = property(lambda self: {name: value for name, value in vars(self).items() if name.startswith("ssl_")})
