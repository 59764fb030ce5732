"""Draw the KV cache's block usage in each step while forty requests run with few blocks.

python examples/pool_over_time.py [FILE.svg]

Half of the requests share a prefix and its blocks; every fifth has two samples (n=2), which share the prompt's blocks.
A free block stays cached until it is reused. Without free blocks, the newest sequence is preempted: it frees its blocks
and waits."""
import random, sys

from tinyvllm import LLM, SamplingParams

SYSTEM = ("Once upon a time there was a small cat who lived in a house near the sea. It liked the sun and the rain, "
          "and it had many friends. Every day they came to the house, sat by the door and told it what they had seen. "
          "The cat listened, thought for a while, and gave a short answer. ")
STARTS = ["The cat", "The sun", "I like", "My friend", "A computer", "What is", "We", "The rain", "Tomorrow", "Hello"]
LAYERS = {"own": ("used by one sequence", "#2b6cb0"), "shared": ("used by several", "#dd6b20"),
          "cached": ("free, but cached", "#9ad0a5"), "free": ("free", "#e8e8e8")}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 440, 64, 20, 64, 52   # picture size, and margins of the chart


def run() -> tuple[LLM, list[dict[str, float]]]:
  """Run the requests. Return the engine, and the number of blocks of each kind after each step."""
  llm = LLM(num_gpu_blocks_override=65, max_num_seqs=16)
  rng = random.Random(0)
  samples: list[dict[str, float]] = []
  added = 0
  while added < 40 or llm.has_unfinished_requests():
    if added < 40 and len(samples) % 6 == 0:   # one request every six steps
      prompt = (SYSTEM if added % 2 else "") + " ".join(rng.choices(STARTS, k=rng.randint(1, 12)))
      num_samples = 2 if added % 5 == 0 else 1
      params = SamplingParams(n=num_samples, seed=added, max_tokens=rng.randint(16, 128), ignore_eos=True)
      llm.add_request(str(added), prompt, params)
      added += 1
    llm.step()
    m = llm.get_metrics()
    samples.append({"own": m["blocks_used"] - m["blocks_shared"], "shared": m["blocks_shared"],
                    "cached": m["blocks_cached"], "free": m["blocks_free"] - m["blocks_cached"]})
  return llm, samples


def draw(samples: list[dict[str, float]]) -> str:
  """Return an SVG chart with stacked areas."""
  steps, pool = len(samples), sum(samples[0].values())
  def x(step: float) -> float: return LEFT + (WIDTH - LEFT - RIGHT) * step / steps
  def y(blocks: float) -> float: return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * blocks / pool
  def text(left: float, baseline: float, content: object, attributes: str = "") -> str:
    return f'<text x="{left:.1f}" y="{baseline:.1f}" {attributes}>{content}</text>'
  def line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#222"/>'
  def edge(v: list[float]) -> list[str]:   # corners of a step function
    points = [(0, v[0]), *((i, v[i + d]) for i in range(1, steps) if v[i] != v[i - 1] for d in (-1, 0)), (steps, v[-1])]
    return [f"{x(i):.1f},{y(blocks):.1f}" for i, blocks in points]
  middle, end = 'text-anchor="middle"', 'text-anchor="end"'
  elements = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
           'font-size="13" fill="#222">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
           text(LEFT, 24, "Blocks of the KV cache after each step", 'font-size="16" font-weight="bold"')]
  floor, left = [0.0] * steps, LEFT
  for name, (label, color) in LAYERS.items():
    top = [a + s[name] for a, s in zip(floor, samples, strict=True)]
    elements += [f'<polygon points="{" ".join(edge(top) + edge(floor)[::-1])}" fill="{color}"/>',
              f'<path d="M{left} 37h13v13h-13z" fill="{color}" stroke="#888"/>', text(left + 19, 48, label)]
    floor, left = top, left + 44 + 7 * len(label)
  for i in range(0, steps + 1, max(10, round(steps / 80) * 10)):
    elements += [line(x(i), y(0), x(i), y(0) + 5), text(x(i), y(0) + 20, i, middle)]
  for i in range(0, int(pool) + 1, 16): elements += [line(LEFT - 5, y(i), LEFT, y(i)), text(LEFT - 9, y(i) + 4, i, end)]
  elements += [line(LEFT, y(0), x(steps), y(0)), line(LEFT, TOP, LEFT, y(0)),
            text(x(steps / 2), HEIGHT - 10, "step", middle),
            text(18, y(pool / 2), "blocks", f'{middle} transform="rotate(-90 18 {y(pool / 2):.1f})"')]
  return "\n".join([*elements, "</svg>", ""])


def main() -> None:
  path = sys.argv[1] if len(sys.argv) > 1 else "pool.svg"
  llm, samples = run()
  with open(path, "w") as file: file.write(draw(samples))
  m = llm.get_metrics()
  shared = max(s["shared"] for s in samples)
  print(f"{path}: {len(samples)} steps; at most {shared} blocks shared; {m['prefix_cache_hits']} of "
        f"{m['prefix_cache_queries']} prompt tokens cached; {m['num_preemptions']} preemptions")


if __name__ == "__main__": main()
