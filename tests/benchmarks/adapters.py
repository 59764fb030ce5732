"""Measure decode steps with LoRA adapters of each request, in turn with steps without.

  python tests/benchmarks/adapters.py --shape llama-7b --running 32 --adapters 4 --rank 16

Prints the tokens/s of an engine without adapters, of one with `enable_lora` but without a request for one, and with
the sequences spread over the adapters; then the longest step while another adapter is loaded again and again, and the
next sequence uses it."""
import json
import pathlib
import statistics
import tempfile
import threading

import common
import numpy as np
from common import LLM
from safetensors.numpy import save_file
from tinyvllm import LoRARequest


def write_adapter(llm: LLM, folder: str, number: int, rank: int) -> LoRARequest:
  """Write an adapter with random numbers for all matrices in PEFT's format."""
  rng, tensors, path = np.random.default_rng(number), {}, pathlib.Path(folder) / str(number)
  for layer in llm.adapters.layers:
    for name, rows in layer.sources.items():
      for part, shape in (("A", (rank, layer.base.in_features)), ("B", (rows, rank))):
        tensors[f"base_model.model.{name}.lora_{part}.weight"] = 0.02 * rng.standard_normal(shape, np.float32)
  path.mkdir()
  save_file(tensors, path / "adapter_model.safetensors")
  (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": rank}))
  return LoRARequest(f"adapter {number}", number, str(path))


def add_requests(llm: LLM, args, adapters: list[LoRARequest | None], count: int) -> None:
  for i, (prompt, params) in enumerate(common.make_requests(llm.model_config.vocab_size, args, count)):
    adapter = adapters[i % len(adapters)]
    llm.add_request(str(i), {**prompt, "lora_request": adapter} if adapter else prompt, params)


def decode_rate(llm: LLM, args, adapters: list[LoRARequest | None]) -> float:
  """Return the tokens/s of the median step in which all sequences decode."""
  add_requests(llm, args, adapters, args.running)
  with common.Watch(llm) as watch:
    while llm.has_unfinished_requests(): llm.step()
  return args.running / statistics.median(x.seconds for x in watch.steps if x.decode and x.outputs == args.running)


def longest_step(llm: LLM, args, adapters: list[LoRARequest], other: LoRARequest) -> float:
  """Return the seconds of the longest step while a thread reads another adapter, which the last sequence then uses."""
  llm.remove_lora(other.lora_int_id)
  thread = threading.Thread(target=llm.add_lora, args=(other,))
  add_requests(llm, args, [*adapters], args.running - 1)
  with common.Watch(llm) as watch:
    while llm.has_unfinished_requests():
      llm.step()
      if len(watch.steps) == args.output_len // 4: thread.start()
      if len(watch.steps) == args.output_len // 2:
        thread.join()
        llm.add_request("other", {"prompt": "a", "lora_request": other}, common.greedy(args.output_len))
  return max(x.seconds for x in watch.steps[args.output_len // 4:])


def main() -> None:
  parser = common.make_parser(__doc__)
  common.add_workload(parser, output_len=64)
  for name, value in (("running", 32), ("adapters", 4), ("rank", 16), ("rounds", 4)):
    parser.add_argument(f"--{name}", type=common.positive, default=value)
  args = parser.parse_args()
  common.start(args)
  length = args.input_len + args.output_len
  size = {"max_num_seqs": args.running, "max_model_len": length, "gpu_memory_utilization": 0.3}
  plain = common.open_llm(args, **size)
  llm = common.open_llm(args, enable_lora=True, max_loras=args.adapters + 1, max_lora_rank=args.rank, **size)
  with tempfile.TemporaryDirectory() as folder:
    adapters = [write_adapter(llm, folder, i + 1, args.rank) for i in range(args.adapters + 1)]
    kinds = {"off": (plain, [None]), "without": (llm, [None]), "with": (llm, adapters[:-1])}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds + 1):
      for kind, job in kinds.items(): rates[kind].append(decode_rate(job[0], args, job[1]))
    medians = {kind: statistics.median(x[1:]) for kind, x in rates.items()}   # without the warm-up
    common.print_table(["adapters", "tokens/s", "of off"], [
      [kind, f"{x:.1f}", f"{x / medians['off']:.2f}"] for kind, x in medians.items()])
    steps = [longest_step(llm, args, adapters[:-1], adapters[-1]) for _ in range(4)][1:]   # the first one captures
    print(f"longest step while an adapter is loaded, three times: {', '.join(f'{1e3 * x:.0f}' for x in steps)} ms; "
          f"median step {1e3 * args.running / medians['with']:.1f} ms")


if __name__ == "__main__": main()
