"""Decoding with pipeline parallelism. A stage is a device with its layers. The sequences of a step are divided into as
many groups as there are stages, and each group passes through the stages in slots: in a slot, every stage computes
another group, all at the same time (Huang et al. 2019). The next step's slots complete the last groups of a step."""
from collections.abc import Callable

import numpy as np
from tinygrad import Tensor

from tinyvllm.backend import NUM_WORDS, TOKENS, exclusive
from tinyvllm.runner import GraphKey, Results, Row, Runner, Step, build_step

from .kernels import parallel


class Slots(Runner):
  """Runs slots: `launch` starts a group, and its results are the tokens of the group that this slot completes."""
  key: GraphKey | None = None   # shape of the last step's slots, if it had any
  next = end = 0                # the next slot, and the first one that the last step does not need

  def __init__(self, runner: Runner):
    vars(self).update(vars(runner), graphs={})   # has the same model, KV cache and tables
    self.stages = [*dict.fromkeys(map(parallel.device_of, self.model.layers))]
    self.reads: dict[int, Callable[[], Results]] = {}   # by slot
    # Words of the groups in flight, (stages - 1, size), the newest first; then x and delta after each stage
    self.states: dict[GraphKey, list[Tensor]] = {}

  def _new_graph(self, step: Step) -> tuple:
    padding = np.tile(build_step({}, self, step.key).words, (len(self.stages) - 1, 1))
    with exclusive: self.states[step.key] = [Tensor(padding).contiguous().realize()]
    return super()._new_graph(step)

  def _compute(self, words: Tensor, key: GraphKey) -> list[Tensor]:
    """Compute a slot (this is captured). Stage i computes the group that started i slots before this one."""
    in_flight = self.states[key][0]
    by_stage = words.unsqueeze(0).cat(in_flight).contiguous().realize()   # (stages, size)
    in_flight.assign(by_stage[:-1]).realize()

    def exchange(stage: int, *outputs: Tensor) -> list[Tensor]:
      """Keep x and delta of the stage before for the next slot. Return this stage's, from the last slot, and tokens."""
      stored = [Tensor.empty(*t.shape, dtype=t.dtype, device=t.device).contiguous().realize() for t in outputs]
      self.states[key] += stored   # delta may hold partial sums
      inputs = [t.to(self.stages[stage]).realize() for t in stored]
      Tensor.realize(*[old.assign(new) for old, new in zip(stored, outputs, strict=True)])
      return [*inputs, by_stage[stage, :NUM_WORDS * key.num_tokens].reshape(NUM_WORDS, -1)]
    reset = parallel.exchange.set(exchange)
    size = TOKENS.num_words * key.num_tokens
    try: return super()._compute(by_stage[0, :size].cat(by_stage[-1, size:]).contiguous(), key)
    finally: parallel.exchange.reset(reset)

  def start(self, group: Step) -> None:
    """Run the next slot, which starts a group. Keep the functions that read the results of the last slots."""
    self.reads[self.next] = self.launch(group)
    self.next += 1
    self.reads.pop(self.next - 4 * len(self.stages), None)

  def run_until(self, end: int) -> None:
    """Run slots that start no group, to complete groups in flight."""
    while self.next < end: self.start(build_step({}, self, self.key))

  def run(self, step: Step, groups: list[list[Row]], key: GraphKey) -> Callable[[], Results]:
    """Start a step that only decodes, as groups of its rows. Return a function that waits for its results."""
    self._refresh_block_tables(step)
    last = range(self.next + len(groups) - 1, self.next + 2 * len(groups) - 1)   # the slots that complete the groups
    self.end = last.stop
    table = step.words[:NUM_WORDS * step.key.num_tokens].reshape(NUM_WORDS, -1)
    for rows in groups:
      words = build_step({}, self, key).words.reshape(NUM_WORDS, -1)
      words[:, :len(rows)] = table[:, [row.token for row in rows]]
      words[TOKENS.num_words] = range(key.num_tokens)   # LOGITS' column "token"
      self.start(Step(key, words.ravel(), rows, {}))

    def read() -> Results:
      self.run_until(last.stop)
      tokens = [token for i, rows in zip(last, groups, strict=True) for token in self.reads[i]().token_ids[:len(rows)]]
      return Results(step._replace(rows=sum(groups, [])), tokens, [])
    return read


class PipelinedRunner(Runner):
  """Runs steps that only decode in slots. Before other steps, it completes all groups. A sequence in flight keeps its
  slot and block table: the scheduler starts no sequence in a step for which it preempts one."""
  def __init__(self, runner: Runner):
    vars(self).update(vars(runner))
    self.slots = Slots(runner)

  def launch(self, step: Step) -> Callable[[], Results]:
    count = len(self.slots.stages)
    groups = [[row for row in step.rows if (row.seq.slot or 0) % count == i] for i in range(count)]
    can_split = self.backend.reads_early and not step.key.plan
    # Captures at startup are steps without sequences
    if can_split and not step.computed and step.key.num_tokens <= max(64, self.max_rows): self.slots.launch(step)
    decodes = len(step.rows) == len(step.computed) == sum(map(len, step.computed.values())) >= count
    part = step.key._replace(num_tokens=max(map(len, groups)), num_rows=1)   # rounded up
    key = self.slots.choose_key(part) if can_split and decodes else None
    if key != self.slots.key: self.slots.run_until(self.slots.end)
    self.slots.key = key
    return self.slots.run(step, groups, key) if key else super().launch(step)
