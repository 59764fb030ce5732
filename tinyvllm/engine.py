"""The engine: text in, text out. Requests are added at any time and `step` advances all of them together; everything below knows token ids only."""
import logging
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from tinygrad import Device, dtypes
from tinygrad.helpers import tqdm
from tinygrad.llm.gguf import gguf_load

from .block_manager import BlockManager
from .config import EngineConfig, ModelConfig
from .kv_cache import bytes_per_block, num_blocks_that_fit
from .llama import Llama
from .runner import Runner
from .scheduler import Scheduler
from .sequence import MAX_BANNED, CompletionOutput, Prompt, RequestOutput, SamplingParams, Sequence
from .tokenizer import StreamDecoder, gguf_tokenizer, load_tokenizer
from .weights import load_weights, read_gguf, read_safetensors

logger = logging.getLogger("tinyvllm")
DEFAULT_MODEL = Path(__file__).parent / "default_model"


@dataclass(eq=False)
class Request:
  """A sequence and its text. `text[:shown]` may be seen: what lies behind it could still become a stop string."""
  seq: Sequence
  prompt: str | None
  decoder: StreamDecoder
  text: str = ""
  shown: int = 0

  def take(self, token: int) -> None:
    """Add a new token's text; finish at the first stop string."""
    seq, params = self.seq, self.seq.params
    stops, searched = params.stop or [], len(self.text)
    if seq.finish_reason != "stop" or params.include_stop_str_in_output: self.text += self.decoder.push(token)
    if seq.finish_reason: self.text += self.decoder.flush()
    found = [(at, s) for s in stops if (at := self.text.find(s, max(0, searched - len(s) + 1))) >= 0]
    if found and seq.num_generated > params.min_tokens:
      at, stop = min(found)
      self.text = self.text[:at + len(stop) * params.include_stop_str_in_output]
      seq.finish_reason, seq.stop_reason = "stop", stop
    held = (n for s in stops for n in range(1, len(s)) if self.text.endswith(s[:n]))
    self.shown = len(self.text) - (0 if seq.finish_reason else max(held, default=0))

  def output(self, text_from: int = 0, tokens_from: int = 0) -> RequestOutput:
    seq = self.seq
    ids = seq.tokens[seq.num_prompt + tokens_from:]
    completion = CompletionOutput(0, self.text[text_from:self.shown], ids, seq.finish_reason, seq.stop_reason)
    return RequestOutput(seq.request_id, self.prompt, seq.tokens[:seq.num_prompt], [completion], seq.finish_reason is not None, seq.metrics)


class LLMEngine:
  """Requests in, outputs out, one `step` at a time. Methods may be called from several threads: a step serves the requests of all of them.

  model: a folder with config.json, *.safetensors and a tokenizer, or a .gguf file; None: the model shipped with tinyvllm. options: EngineConfig's.
  Raises ValueError for files or options that will not do, RuntimeError where tinygrad finds no device or no compiler."""
  def __init__(self, model: str | Path | None = None, **options: Any):
    self.config = config = EngineConfig(**options)
    path = Path(model or DEFAULT_MODEL).expanduser()
    started = time.perf_counter()
    open_device()
    if path.suffix == ".gguf":
      try: kv, tensors = gguf_load(path)
      except (OSError, ValueError, KeyError, RuntimeError) as e: raise ValueError(f"{path} is not a readable GGUF file: {e}") from e
      self.model_config = mc = ModelConfig.from_gguf(kv, tensors)
      self.tokenizer = gguf_tokenizer(kv)
      weights = read_gguf(path, tensors, {"attn_q": mc.num_attention_heads, "attn_k": mc.num_key_value_heads})
    elif (path / "config.json").exists():
      self.model_config = mc = ModelConfig.from_folder(path)
      self.tokenizer, weights = load_tokenizer(path), read_safetensors(path)
    else: raise ValueError(f"model={str(path)!r} must be a folder with config.json and *.safetensors, or a .gguf file")
    self.max_model_len = config.max_model_len or mc.max_position_embeddings
    if self.max_model_len > mc.max_position_embeddings:
      raise ValueError(f"max_model_len={self.max_model_len} must be at most {mc.max_position_embeddings}, the model's max_position_embeddings")
    dtype = {"auto": dtypes.float32 if Device.DEFAULT == "CPU" else dtypes.float16, "float32": dtypes.float32,
             "float16": dtypes.float16, "bfloat16": dtypes.bfloat16}[config.dtype]
    llama = Llama(mc)
    load_weights(llama, mc.tie_word_embeddings, weights, dtype)
    loaded = time.perf_counter()
    logger.info("loaded %s in %s on %s in %.1f s", path.name, dtype.name, Device.DEFAULT, loaded - started)
    num_blocks = num_blocks_that_fit(mc, config, self.max_model_len, dtype)
    self.runner = Runner(llama, mc, config, self.max_model_len, num_blocks)
    self.blocks = BlockManager(num_blocks, config.block_size)
    self.scheduler = Scheduler(config, self.blocks)
    pool = (num_blocks - 1) * config.block_size
    logger.info("KV cache: %d blocks of %d tokens = %d tokens (%.2f GiB), %.1f sequences of %d, in %.1f s", num_blocks - 1, config.block_size, pool,
                num_blocks * bytes_per_block(mc, config.block_size, dtype) / 2**30, pool / self.max_model_len, self.max_model_len,
                time.perf_counter() - loaded)
    self.requests: dict[str, Request] = {}
    self.totals = {"prompt_tokens": 0, "generation_tokens": 0, "requests_finished": 0, "steps": 0, "scheduled": 0, "seconds": 0.0}
    self._arrivals, self._random, self._lock = count(), Random(config.seed), threading.RLock()

  def _request(self, request_id: str, prompt: Prompt, params: SamplingParams | None, priority: int = 0) -> Request:
    params = params or SamplingParams()
    if not isinstance(params, SamplingParams): raise ValueError(f"sampling_params={params!r} must be SamplingParams, not {type(params).__name__}")
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, dict) else None
    ids = self.tokenizer.encode(text) if isinstance(text, str) else prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if not isinstance(ids, list): raise ValueError(f"prompt={prompt!r} must be a str or a dict with prompt (str) or prompt_token_ids (a list of int)")
    V, limit, pool = self.model_config.vocab_size, self.max_model_len, (self.blocks.num_blocks - 1) * self.config.block_size
    if not ids or text == "": raise ValueError("prompt is empty: give at least one token")
    for i in [*ids, *(params.stop_token_ids or ())]:
      if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < V: raise ValueError(f"token id {i!r} must be an int from 0 to {V - 1}, the vocabulary")
    if len(ids) >= limit:
      raise ValueError(f"This model's maximum context length is {limit} tokens. However, the prompt has {len(ids)}, and one more must fit: shorten it"
                       " or raise max_model_len")
    if len(ids) >= pool:
      raise ValueError(f"the prompt has {len(ids)} tokens; the KV cache holds {pool}, and one more must fit: shorten it or raise "
                       "gpu_memory_utilization or num_gpu_blocks_override")
    if type(priority) is not int or (priority and self.config.scheduling_policy != "priority"):
      raise ValueError(f"priority={priority!r} must be an int, and 0 unless the engine has scheduling_policy='priority'")
    stop_ids = frozenset(params.stop_token_ids or ()) | frozenset(() if params.ignore_eos else self.model_config.eos_token_ids)
    if params.min_tokens and len(stop_ids) > MAX_BANNED:
      raise ValueError(f"stop_token_ids: with min_tokens={params.min_tokens} at most {MAX_BANNED}, the model's end tokens included, not {len(stop_ids)}")
    seed = self._random.getrandbits(63) if params.seed is None else params.seed
    seq = Sequence(request_id, list(ids), len(ids), params, seed, stop_ids, limit, priority, next(self._arrivals))
    return Request(seq, text, StreamDecoder(self.tokenizer, ids, params.skip_special_tokens))

  def _add(self, request: Request) -> None:
    with self._lock:
      if request.seq.request_id in self.requests: raise ValueError(f"request_id={request.seq.request_id!r} is already running: use another")
      self.requests[request.seq.request_id] = request
      self.scheduler.add(request.seq)

  def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0) -> None:
    """Queue a request: a str, {"prompt": str} or {"prompt_token_ids": [int]}. Lower priorities go first. Raises ValueError for one that can never run."""
    self._add(self._request(request_id, prompt, params, priority))

  def abort_request(self, request_id: str) -> None:
    """End a request, with finish_reason "abort"; unknown and finished ones are let be."""
    with self._lock:
      if request := self.requests.pop(request_id, None): self.scheduler.finish(request.seq, "abort")

  def has_unfinished_requests(self) -> bool: return bool(self.requests)

  def step(self) -> list[RequestOutput]:
    """Advance every running request by one step, and return those that have something new."""
    with self._lock:
      started, before = time.perf_counter(), set(self.scheduler.running)
      batch = self.scheduler.schedule()
      sampled = self.runner.run(batch) if batch else {}
      self.scheduler.update(batch, sampled)
      changed = []
      for seq in [*sampled, *(s for s in before if s.finish_reason and s not in sampled)]:
        changed.append(request := self.requests[seq.request_id])
        if seq in sampled: request.take(sampled[seq])
        else: request.text, request.shown = (t := request.text + request.decoder.flush()), len(t)
        if seq.finish_reason:
          self.scheduler.finish(seq, seq.finish_reason)
          del self.requests[seq.request_id]
      totals = self.totals
      totals["prompt_tokens"] += sum(s.num_prompt for s in sampled if s.num_generated == 1)
      totals["generation_tokens"] += len(sampled)
      totals["requests_finished"] += sum(r.seq.finish_reason is not None for r in changed)
      totals["steps"], totals["scheduled"] = totals["steps"] + 1, totals["scheduled"] + len(batch)
      totals["seconds"] += time.perf_counter() - started
      return [request.output() for request in changed]

  def get_metrics(self) -> dict[str, float]:
    """Totals since the start, rates over the seconds spent in steps, and the state of the pool and the queue."""
    t, seconds = self.totals, self.totals["seconds"] or math.inf
    return {"prompt_tokens": t["prompt_tokens"], "generation_tokens": t["generation_tokens"], "requests_finished": t["requests_finished"],
            "num_preemptions": self.scheduler.num_preemptions, "tokens_per_second": t["generation_tokens"] / seconds,
            "requests_per_second": t["requests_finished"] / seconds, "mean_batch_size": t["scheduled"] / max(1, t["steps"]),
            "blocks_used": self.blocks.num_used, "blocks_free": self.blocks.num_free,
            "num_requests_running": len(self.scheduler.running), "num_requests_waiting": len(self.scheduler.waiting)}


class LLM(LLMEngine):
  """The engine with calls that run requests to their end. Takes what LLMEngine takes."""

  def generate(self, prompts: Prompt | list[Prompt], sampling_params: SamplingParams | list[SamplingParams] | None = None,
               use_tqdm: bool = True) -> list[RequestOutput]:
    """Complete prompts, one or a list, under one SamplingParams or one for each; outputs in the prompts' order. If any request is bad none is run:
    ValueError."""
    prompts = prompts if isinstance(prompts, list) else [prompts]
    params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
    if len(params) != len(prompts): raise ValueError(f"sampling_params: {len(params)} for {len(prompts)} prompts: give one, or one for each")
    return self._run([self._request(f"generate-{next(self._arrivals)}", *pair) for pair in zip(prompts, params, strict=True)], use_tqdm)

  def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
    progress = tqdm(desc="generating", total=len(requests), unit=" requests", disable=None if use_tqdm else True)
    try:
      for request in requests: self._add(request)
      done = 0
      while done < len(requests):
        self.step()
        finished = sum(r.seq.finish_reason is not None for r in requests)
        progress.update(finished - done)
        done = finished
    finally:
      for request in requests: self.abort_request(request.seq.request_id)
    progress.update(close=True)
    return [request.output() for request in requests]

  def generate_stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
    """Complete one prompt, yielding the new text and ids of each step. Checks the request at once. Closing the iterator aborts it."""
    return self._stream(self._request(f"stream-{next(self._arrivals)}", prompt, sampling_params))

  def _stream(self, request: Request) -> Iterator[RequestOutput]:
    self._add(request)
    text = tokens = 0
    try:
      while not (output := request.output(text, tokens)).finished or tokens == 0:
        with self._lock:
          if request.seq.num_generated == tokens and not request.seq.finish_reason: self.step()
          output = request.output(text, tokens)
          text, tokens = request.shown, request.seq.num_generated
        if output.outputs[0].token_ids or output.finished: yield output
        if output.finished: break
    finally: self.abort_request(request.seq.request_id)

  def chat(self, messages: list[dict[str, str]] | list[list[dict[str, str]]], sampling_params: SamplingParams | None = None,
           use_tqdm: bool = True) -> list[RequestOutput]:
    """Answer a conversation, a list of {"role", "content"}, or several, through the model's chat template."""
    conversations = messages if messages and isinstance(messages[0], list) else [messages]
    return self.generate([self.chat_prompt(c) for c in conversations], sampling_params, use_tqdm)

  def chat_prompt(self, messages: list[dict[str, str]]) -> Prompt:
    """A conversation as a prompt: the template's text, whose special tokens stand for themselves."""
    return {"prompt_token_ids": self.tokenizer.encode(self.tokenizer.apply_chat_template(messages), add_special_tokens=False)}


def open_device() -> None:
  """Open tinygrad's default device, with the clang that pip put beside this Python where none is on the PATH."""
  beside = Path(sys.executable).parent / "clang"
  if "CC" not in os.environ and not shutil.which("clang") and beside.exists(): os.environ["CC"] = str(beside)
  try: Device[Device.DEFAULT]
  except (RuntimeError, OSError, ImportError) as e:
    raise RuntimeError(f"tinygrad finds no usable device ({str(e).splitlines()[0]}): for the CPU install a compiler, pip install 'tinyvllm[cpu]', "
                       "or name a device with DEV=CUDA, METAL, AMD, CL, WEBGPU") from e


@lru_cache(maxsize=None)
def _engine(model: str | Path | None) -> LLM: return LLM(model)


def generate(prompt: str, model: str | Path | None = None, **sampling: Any) -> str:
  """The text that follows a prompt, from the shipped model or another. sampling: SamplingParams' fields; the default temperature here is 0."""
  return _engine(model).generate(prompt, SamplingParams(**{"temperature": 0.0, **sampling}), use_tqdm=False)[0].outputs[0].text


def generate_stream(prompt: str, model: str | Path | None = None, **sampling: Any) -> Iterator[str]:
  """As `generate`, a piece at a time, as tokens arrive."""
  outputs = _engine(model).generate_stream(prompt, SamplingParams(**{"temperature": 0.0, **sampling}))
  return (output.outputs[0].text for output in outputs if output.outputs[0].text)
