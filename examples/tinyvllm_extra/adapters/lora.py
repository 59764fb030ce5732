"""LoRA (Hu et al. 2021, arXiv:2106.09685): an adapter adds the product of two narrow matrices to each of a model's
matrices. Keeps several adapters next to the weights, so that each sequence may have its own, as a token may have its
expert (S-LoRA, Sheng et al. 2023, arXiv:2311.03285)."""
import functools, re, threading, uuid, weakref
from collections.abc import Callable

import numpy as np
from tinygrad import Tensor, dtypes, helpers
from tinygrad.dtype import DType

from tinyvllm.backend import TOKENS, GateUp, Module, cpu_cores
from tinyvllm.config import check
from tinyvllm.engine import LoadedModel
from tinyvllm.llama import Llama
from tinyvllm.request import Sequence
from tinyvllm.runner import GraphKey, Logits, Results, Runner, Step, upload, zeros
from tinyvllm_extra.cache import snapshots
from tinyvllm_extra.formats import peft_files, quantization
from tinyvllm_extra.kernels import buffers, matmul, parallel
from tinyvllm_extra.models import layers, matrices
from tinyvllm_extra.options import LLMConfig, LoRARequest, check_one_device
from tinyvllm_extra.pipeline import PipelinedRunner
from tinyvllm_extra.sampling.logits import LogitsPlan
from tinyvllm_extra.serving.engine_metrics import MeteredScheduler


class AdaptedLinear(Module):
  """A matrix of the model with A and B of `count` adapters, the first of zeros. A has `rank` rows for each of the
  matrices that are stacked in W."""
  def __init__(self, base: matmul.FastLinear, count: int, rank: int, dtype: DType, flags: Tensor):
    self.base, self.rank, self.sources = base, rank, base.sources
    inner = helpers.round_up(rank * len(base.sources), 16 if cpu_cores() else 32)   # as linear.c and linear.cu take it
    sizes = (base.in_features, inner), (inner, base.out_features)
    self.a, self.b = [matmul.FastExperts(n, {"": count * out}, False, dtype, num_experts=count) for n, out in sizes]
    for x in (self.a, self.b): x.weight = x.weight.zeros_like().contiguous().realize()
    self.b.adds = True
    if not base.scales: base.lora = {"a": self.a.weight, "b": self.b.weight, "flags": flags}

  def __call__(self, x: Tensor, dtype: DType | None = None) -> Tensor:
    step, T, tiles = matmul.adapters.get(), x.max_shape[0], matmul.choose_tiles(self.base, x)
    if not step or tiles and tiles.buffers and self.base.lora: return self.base(x, dtype)   # linear.cu adds B @ A @ x
    h = self.a.multiply(x, row_groups=step[0], count=T)                 # (T, inner)
    total = self.base.multiply(x, dtype)                                # (T, out), or partial sums
    total = self.b.multiply(h, row_groups=step[0], count=T, total=total)
    if not isinstance(self.base, GateUp): return total
    # (T, parts, 2, size), see FastGateUp.ordered
    pairs = total.float().unflatten(1, (-1, 2, 8 if self.base.weight.ndim > 3 else self.base.out_features // 2))
    return (getattr(pairs[:, :, 0], self.base.activation)() * pairs[:, :, 1]).flatten(1).cast(total.dtype).contiguous()

  def arrange(self, model: Llama, pairs: peft_files.Pairs) -> list[np.ndarray]:
    """Take this matrix's A and B from an adapter's, and return them as they are stored. Raises InputError."""
    inner = self.b.in_features
    size, row = self.base.in_features, 0
    # A, (inner, in), and B, (out, inner)
    whole = np.zeros((inner, size), np.float32), np.zeros((self.base.out_features, inner), np.float32)
    for i, (name, count) in enumerate(self.sources.items()):
      a, b = pairs.pop(name, (np.zeros((0, size)), np.zeros((count, 0))))
      check(len(a) <= self.rank, f"lora_path: {name} has rank {len(a)}: raise max_lora_rank={self.rank}")
      shape = len(b), a.shape[1]
      check(shape == (count, size), f"lora_path: {name} is {[*shape]}, of another model: it needs {[count, size]}")
      columns, order = slice(i * self.rank, i * self.rank + len(a)), layers.row_order(model.config, name, count)
      whole[0][columns], whole[1][row:row + count, columns] = a, b if order is None else b[order]
      row += count
    dtype, shapes = self.a.weight.dtype, [x.weight.max_shape for x in (self.a, self.b)]
    convert = quantization.to_bfloat16 if dtype == dtypes.bfloat16 else functools.partial(np.asarray, dtype=dtype.fmt)
    return [np.ascontiguousarray(convert(matrices.reorder(w, (shape[0] // self.a.num_experts, *shape[1:]))))
            for w, shape in zip((whole[0], self.base.ordered(whole[1])), shapes, strict=True)]


class Adapter:
  """An adapter in the host's memory. salt: of the prefix cache, another one for each load."""
  def __init__(self, request: LoRARequest, model: Llama, adapted: list[AdaptedLinear]):
    self.request, self.salt = request, uuid.uuid4().bytes
    pairs = peft_files.read_adapter(request.lora_path, "lora_path")
    if isinstance(model, layers.LlamaVariant): pairs = model.arrange(pairs)
    self.arrays = [x for layer in adapted for x in layer.arrange(model, pairs)]
    check(not pairs, f"lora_path={request.lora_path!r}: {next(iter(pairs), '')} is not a matrix of the model")


class Adapters:
  """The adapters of a model. known: by id, in the host's memory. loaded: by index, on the device."""
  def __init__(self, model: Llama, config: LLMConfig):
    check_one_device(model.devices, " with enable_lora")
    self.model, self.lock = model, threading.Lock()
    self.known: dict[int, Adapter] = {}
    self.running: list[Sequence] = []   # the scheduler's list, from its first sequence on
    self.loaded: list[Adapter | None] = [None] * (config.max_loras + 1)   # the first is none
    self.of_sequence = weakref.WeakKeyDictionary[Sequence, Adapter]()
    dtype = getattr(dtypes, getattr(model.backend, "stored_dtype", ""), model.dtype)
    flags = zeros(2**16)   # at most two of each tile of rows and part of K
    self.layers: list[AdaptedLinear] = []
    for layer, name, module in [(x, *item) for x in model.layers for item in vars(x).items()]:
      if isinstance(module, matmul.FastLinear) and all(re.fullmatch(peft_files.MATRIX, x) for x in module.sources):
        self.layers.append(AdaptedLinear(module, len(self.loaded), config.max_lora_rank, dtype, flags))
        setattr(layer, name, self.layers[-1])
    self.tensors = [x.weight for layer in self.layers for x in (layer.a, layer.b)]
    check(self.layers, "enable_lora=True must be False: this backend or model has no matrices for adapters")

  def add(self, request: LoRARequest) -> Adapter:
    """Return an adapter, which is read unless its id is known. Any thread may call this. Raises InputError."""
    if not (adapter := self.known.get(request.lora_int_id)):
      with self.lock: adapter = self.known[request.lora_int_id] = Adapter(request, self.model, self.layers)
    check(adapter.request == request, f"lora_int_id={request.lora_int_id} is {adapter.request}: choose another id")
    return adapter

  def place(self, seq: Sequence, running: list[Sequence]) -> bool:
    """Store a sequence's adapter on the device, in place of one that does not run. Return False if all run."""
    self.running = running
    adapter, used = self.of_sequence.get(seq), [self.of_sequence.get(x) for x in running]
    if adapter in self.loaded: return True
    free = [i for i, x in enumerate(self.loaded) if i and (x is None or x not in used)]
    if free and adapter:
      loaded = [adapter if i == free[0] else x for i, x in enumerate(self.loaded)]
      self.loaded[free[0]] = None   # if a copy fails
      # Whole tensors, as some devices have no parts of buffers
      for i, (tensor, array) in enumerate(zip(self.tensors, adapter.arrays, strict=True)):
        buffers.copy_to_devices(tensor, np.stack([x.arrays[i] if x else np.zeros_like(array) for x in loaded]))
      self.loaded = loaded
    return bool(free)


class LoRAScheduler(MeteredScheduler):
  """A scheduler that starts a sequence when its adapter is on the device."""
  adapters: Adapters | None = None   # set after the model's start

  def start(self, seq: Sequence, free_slots: set[int]) -> bool:
    return (self.adapters is None or self.adapters.place(seq, self.running)) and super().start(seq, free_slots)


class LoRARunner(Runner):
  """A runner with graphs for steps with adapters, and others for those without."""
  def __init__(self, adapters: Adapters, model: Llama, config: LLMConfig, num_bytes: int, logits: Logits | None = None):
    super().__init__(model, config, num_bytes, logits)
    self.adapters = adapters
    # Index of each slot's adapter, then the number of adapters of the step, and their indices
    self.table = zeros(self.config.max_num_seqs + 2 + len(adapters.loaded))
    self.indices = np.zeros(self.table.shape, np.int32)   # its content

  def choose_key(self, key: GraphKey) -> GraphKey:
    if any(seq in self.adapters.of_sequence for seq in self.adapters.running):
      plan = key.plan or LogitsPlan(self.model.vocab_size, False, 0, False)
      key = key._replace(plan=plan._replace(has_adapters=True))
    return super().choose_key(key)

  def launch(self, step: Step) -> Callable[[], Results]:
    of_sequence, loaded, before = self.adapters.of_sequence, self.adapters.loaded, self.indices.copy()
    for seq in step.computed: self.indices[seq.slot] = loaded.index(of_sequence.get(seq))
    used = {int(self.indices[seq.slot]) for seq in step.computed} - {0}
    self.indices[-1 - len(loaded):][:1 + len(used)] = [len(used), *used]
    if (self.indices != before).any(): upload(self.table, self.indices)
    return super().launch(step)

  def _compute(self, words: Tensor, key: GraphKey) -> list[Tensor]:
    if not (key.plan and key.plan.has_adapters): return super()._compute(words, key)
    slots = TOKENS.read(words[:TOKENS.num_words * key.num_tokens].reshape(-1, key.num_tokens))["slot"]
    own, used = self.table[slots].contiguous(), self.table[-1 - len(self.adapters.loaded):]
    reset = matmul.adapters.set((self.adapters.layers[0].a.group_rows(own), own.cat(used).contiguous()))
    try: return super()._compute(words, key)
    finally: matmul.adapters.reset(reset)


def open_proposer(target: LoadedModel, new_runner: Callable[[int], Runner], num_bytes: int) -> tuple:
  """Like snapshots.open_proposer, for a model with adapters, which take part of the memory, or on several devices."""
  config = target.config
  if isinstance(new_runner, functools.partial) and isinstance(config, LLMConfig):
    model = new_runner.args[0]
    if isinstance(model.devices, parallel.Stages): num_bytes = model.devices.cache_bytes(model, num_bytes)
    if config.enable_lora:
      vars(target)["adapters"] = adapters = Adapters(model, config)
      num_bytes -= sum(x.nbytes() for x in adapters.tensors)
      new_runner = functools.partial(LoRARunner, adapters, *new_runner.args, **new_runner.keywords)
  proposer, runners = snapshots.open_proposer(target, new_runner, max(0, num_bytes))   # an error names no negative size
  # Drafts need the tokens of the last step, and snapshots copy recurrent states between steps
  is_plain = proposer is None and vars(target).get("states") is None
  if is_plain and isinstance(runners[0].model.devices, parallel.Stages): runners = [PipelinedRunner(runners[0])]
  return proposer, runners
