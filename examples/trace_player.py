"""Record the page that plays a trace, with headless Chromium, as an animated PNG.

python examples/trace_player.py [FILE.png]

Six requests, three of them with a common beginning, run in a pool of 40 blocks. Needs `pip install playwright`."""
import pathlib, shutil, sys, tempfile, zlib
from collections.abc import Iterator

from playwright.sync_api import sync_playwright

from tinyvllm import LLM, SamplingParams
from tinyvllm_extra.trace import player

SYSTEM = "The cat sat on the mat and looked at the dog. It was a warm day, and the sun was in the sky over the house. "
PROMPTS = "Hello", SYSTEM + "The cat", "Once upon a time", SYSTEM + "The dog", "I like", SYSTEM + "We"
SIZE, SECONDS = {"width": 760, "height": 450}, 0.6   # in pixels, and how long each picture is shown


def write_trace(file: pathlib.Path) -> None:
  with LLM(num_gpu_blocks_override=41, max_num_seqs=4, max_num_batched_tokens=64, trace=str(file)) as llm:
    for i, text in enumerate(PROMPTS):
      samples = 2 if text == "I like" else 1
      llm.add_request(str(i), text, SamplingParams(max_tokens=7, temperature=0, ignore_eos=True, n=samples))
    while llm.has_unfinished_requests(): llm.step()


def chunks(picture: bytes) -> Iterator[tuple[bytes, bytes]]:
  """Yield type and content of each chunk of a PNG picture (www.w3.org/TR/png-3)."""
  at = 8
  while at < len(picture):
    size = int.from_bytes(picture[at:at + 4])
    yield picture[at + 4:at + 8], picture[at + 8:at + 8 + size]
    at += size + 12


def animate(pictures: list[bytes]) -> bytes:
  """Return an animated PNG of pictures with one size."""
  header = next(content for kind, content in chunks(pictures[0]) if kind == b"IHDR")
  parts, number = [(b"IHDR", header), (b"acTL", len(pictures).to_bytes(4) + bytes(4))], 0
  for picture in pictures:
    delay = int(SECONDS * 1000).to_bytes(2) + (1000).to_bytes(2)
    parts.append((b"fcTL", number.to_bytes(4) + header[:8] + bytes(8) + delay + bytes(2)))
    number += 1
    for content in [content for kind, content in chunks(picture) if kind == b"IDAT"]:
      if picture is pictures[0]: parts.append((b"IDAT", content))
      else:
        parts.append((b"fdAT", number.to_bytes(4) + content))
        number += 1
  parts.append((b"IEND", b""))
  return b"\x89PNG\r\n\x1a\n" + b"".join(
    len(content).to_bytes(4) + kind + content + zlib.crc32(kind + content).to_bytes(4) for kind, content in parts)


def main() -> None:
  file = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "examples/trace_player.png")
  with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
    trace, page = pathlib.Path(folder, "trace.jsonl"), pathlib.Path(folder, "page.html")
    write_trace(trace)
    page.write_text(player.page(trace))
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    tab = browser.new_page(viewport=SIZE)
    tab.goto(page.as_uri())
    count = int(tab.locator("#position").get_attribute("max") or 0) + 1
    pictures = []
    for _ in range(count):
      pictures.append(tab.screenshot())
      tab.keyboard.press("ArrowRight")
  file.write_bytes(animate(pictures))
  print(f"{file}: {count} steps, {file.stat().st_size // 1024} KiB")


if __name__ == "__main__": main()
