"""Methods of `tinyvllm.LLM` beyond plain requests: chat, metrics, captures ahead, prefix cache files, vLLM's names."""
import pathlib, time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tinyvllm.backend import Backend
from tinyvllm.request import RequestOutput
from tinyvllm.runner import Results
from tinyvllm_extra.huggingface import Tokenizer

from . import metrics
from .logits import SamplingParams
from .vllm_names import setup_logging, without_no_effect

if TYPE_CHECKING: from tinyvllm.engine import Engine, Params, Prompt, Request
else: Engine = object


class Methods(Engine):
  """Mixed into LLM, before the core's Engine."""
  scheduler_class = metrics.MeteredScheduler
  params_class = SamplingParams
  metrics_class = metrics.RequestMetrics
  llm_engine = property(lambda self: self)   # as vLLM's scripts find it

  def __init__(self, model: str | pathlib.Path | None = None, *, backend: Backend | None = None, **options: Any):
    setup_logging()
    super().__init__(model, backend=backend, **without_no_effect(options))
    sizes = self.config.cudagraph_capture_sizes
    for _ in self.capture(sizes) if sizes else (): pass

  def add_request(self, request_id: str, prompt: "Prompt", params: "Params" = None, priority: int = 0) -> None:
    """Queue a request: see make_request for its prompt. Raises InputError for one that can never run."""
    self.add(self.make_request(request_id, prompt, params, priority))

  def has_unfinished_requests(self) -> bool: return bool(self.requests)

  def step(self) -> list[RequestOutput]:
    """Run one step and return the requests that have new tokens: on a GPU those of the step before, which the device
    computed while this one was built."""
    return self.advance(lambda request: request.output())

  def advance(self, make_output: "Callable[[Request], Any]" = lambda request: request) -> list[Any]:
    started = time.perf_counter()
    num_requests = len(self.requests)
    outputs = super().advance(make_output)
    seconds: Any = time.perf_counter() - started
    self.scheduler.counters.update(steps=1, requests_finished=num_requests - len(self.requests), seconds=seconds)
    return outputs

  def _update(self, results: Results) -> None:
    self.scheduler.counters.update(scheduled=len(results.step.computed))
    super()._update(results)

  def get_metrics(self) -> dict[str, Any]:
    """Counters since the start, rates over the seconds spent in steps, and the state of the blocks and the queue."""
    return metrics.get_metrics(self)

  def chat(self, messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
           sampling_params: "Params | list[Params]" = None, use_tqdm: bool = True,
           chat_template_kwargs: dict[str, Any] | None = None, **template: Any) -> list[RequestOutput]:
    """Answer a conversation, a list of {"role": ..., "content": ...}, or several, through the model's chat template.
    template, chat_template_kwargs: options of Tokenizer.apply_chat_template."""
    chats: Any = messages if messages and isinstance(messages[0], list) else [messages]
    options = template | (chat_template_kwargs or {})
    prompts = [{"messages": chat, "template": options} for chat in chats]
    return self.generate(prompts, sampling_params, use_tqdm)   # type: ignore[attr-defined]   # LLM has it

  def capture(self, sizes: list[int] | None = None, optional: bool = False) -> Iterator[str]:
    """Capture steps ahead, and pad to them from then on: of these numbers of tokens, greedy and sampled, or with
    `optional` features. sizes: powers of two; None: what suits the device. Yields its progress before each capture."""
    from .graphs import capture
    return capture(self, sizes, optional)

  def save_prefix_cache(self, path: str | pathlib.Path) -> int:
    """Write the cached blocks to a file, whole or not at all. Returns their number; without any, no file is written.
    Raises OSError if it cannot be written."""
    from .prefix_cache import save_prefix_cache
    return save_prefix_cache(self, path)

  def load_prefix_cache(self, path: str | pathlib.Path) -> int:
    """Add the blocks of such a file to the prefix cache, as many as are free, the last used first. Returns their
    number. Raises InputError for a file that is damaged, or of another model or other options that its blocks depend on."""
    from .prefix_cache import load_prefix_cache
    return load_prefix_cache(self, path)

  def get_tokenizer(self) -> Tokenizer: return self.tokenizer
  def get_default_sampling_params(self) -> SamplingParams: return SamplingParams(**self.sampling_defaults)
