"""Record a chat in a terminal as an animated SVG picture: the README's.

python examples/terminal.py [FILE.svg] [MODEL]     # needs rich, which pip install '.[test]' installs

A line appears when its first character did; waiting times are shortened. Run it in a folder that contains MODEL, if it
must not be downloaded."""
import io, os, pty, re, sys, textwrap, time

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

WIDTH = 96   # columns
MESSAGES = ["What is the capital of France?", "Name three planets.", "/bye"]
LONGEST_WAIT = 0.15   # seconds between two pieces of output in the picture
TYPING = 1.0         # seconds to type a message
PROMPT = "> "        # of the chat


def record(command: list[str]) -> list[tuple[float, str]]:
  """Run a chat in a terminal, and send MESSAGES at its prompts. Return its output, each piece with its time."""
  pid, terminal = pty.fork()
  if not pid: os.execvpe(command[0], command, {**os.environ, "TERM": "dumb", "COLUMNS": str(WIDTH)})
  messages, pieces, now, last = iter(MESSAGES), [], TYPING, time.monotonic()
  while True:
    try: text = os.read(terminal, 4096).decode(errors="replace")
    except OSError: break   # the process has ended
    if not text: break
    now, last = now + min(LONGEST_WAIT, time.monotonic() - last), time.monotonic()
    pieces.append((now, text))
    if (pieces[-2][1] + text if len(pieces) > 1 else text).endswith(PROMPT):
      now += TYPING
      os.write(terminal, (next(messages) + "\n").encode())
  if os.waitpid(pid, 0)[1]: raise RuntimeError("".join(text for _, text in pieces))
  return pieces


def lines_of(pieces: list[tuple[float, str]]) -> list[tuple[float, str]]:
  """Return the lines of the terminal, each with its time. A progress bar is left with its last state."""
  text = "".join(text for _, text in pieces)
  hidden = {i for match in re.finditer(r"[^\n]*\r(?!\n)|\r", text) for i in range(*match.span())}
  times = [when for when, piece in pieces for _ in piece]
  times = [when for i, when in enumerate(times) if i not in hidden]
  lines, start = [], 0
  for line in "".join(char for i, char in enumerate(text) if i not in hidden).split("\n")[:-1]:
    for part in textwrap.wrap(line, WIDTH, drop_whitespace=False) or [""]:
      # The time of its last character, if the line was typed: the prompt waits for it
      lines.append((times[start + (len(part) - 1 if part.startswith(PROMPT) else 0)], part))
      start += len(part)
    start += 1   # the line break
  return lines


def draw(lines: list[tuple[float, str]], title: str) -> str:
  """Return an SVG picture that shows each line at its time."""
  console = Console(width=WIDTH, record=True, file=io.StringIO())
  for _, line in lines: console.print(Text(line, "bold green" if line.startswith(("$", PROMPT)) else ""))
  frame = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S)   # without fonts of other servers
  picture = console.export_svg(title=title, code_format=frame, unique_id="terminal")
  picture = picture.replace("<style>", "<style>\n    @keyframes appear { from { opacity: 0 } }", 1)
  def show(match: re.Match) -> str:
    when = lines[int(match[1])][0] if int(match[1]) < len(lines) else 0
    return f'{match[0]} style="animation: appear 0.1s {when:.2f}s backwards"'
  return re.sub(r'clip-path="url\(#terminal-line-(\d+)\)"', show, picture)


def main() -> None:
  defaults = ["examples/terminal.svg", "HuggingFaceTB/SmolLM2-135M-Instruct"]
  path, model = sys.argv[1:] + defaults[len(sys.argv) - 1:]
  options = ["run", model, "--temperature", "0"]
  lines = [(0.0, f"$ tinyvllm {' '.join(options)}"), *lines_of(record([sys.executable, "-m", "tinyvllm", *options]))]
  with open(path, "w") as file: file.write(draw(lines, "tinyvllm"))


if __name__ == "__main__": main()
