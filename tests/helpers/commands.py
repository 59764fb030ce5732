"""Command lines: in this process, where they may use the fake device, and as a process of their own. Errors of one
line."""
import io
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from .engines import ENGINE


ROOT = Path(__file__).parents[2]
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "examples")])   # for processes that run outside of the checkout


def flags(**options: Any) -> list[str]:
  """Return options as the command line's flags: max_num_seqs=4 becomes --max-num-seqs 4."""
  return [x for name, value in options.items() for x in ("--" + name.replace("_", "-"), str(value))]


FLAGS = flags(**ENGINE)


def run_command(*arguments: Any, stdin: str | io.StringIO = "", **env: str) -> subprocess.CompletedProcess:
  """Run `tinyvllm *arguments` in this process. Return the exit code, stdout, and stderr with INFO lines.
  Restores the process's settings."""
  from tinyvllm_extra.cli import main   # here, so that other lanes do not import the command line
  argv, out, err = [*map(str, arguments)], io.StringIO(), io.StringIO()
  logger, handler = logging.getLogger("tinyvllm"), logging.StreamHandler(err)
  level, interrupt = logger.level, signal.getsignal(signal.SIGINT)
  logger.addHandler(handler)
  logger.setLevel(logging.INFO)
  try:
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
      patch.setattr("sys.stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin)
      for name, value in env.items(): patch.setenv(name, value)
      try: code: Any = main(argv)
      except SystemExit as e: code = e.code
  finally:
    logger.removeHandler(handler)
    for thread in [x for x in threading.enumerate() if x.name == "tinyvllm-capture"]: thread.join()
    logger.setLevel(level)
    signal.signal(signal.SIGINT, interrupt)
  return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def parse_command(*arguments: Any) -> dict[str, Any]:
  """Return the arguments of `tinyvllm *arguments` without running it."""
  from tinyvllm_extra.cli import make_parser, parse_flags   # here, so that other lanes do not import the command line
  return parse_flags(make_parser([]), [*map(str, arguments)])


def start_process(*arguments: Any, **env: str) -> subprocess.Popen:
  """Start `tinyvllm *arguments` in the checkout, with pipes for stdin, stdout and stderr."""
  return subprocess.Popen([sys.executable, "-m", "tinyvllm", *map(str, arguments)], stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env={**os.environ, **env})


def run_process(*command: Any, stdin: str = "", **env: str) -> subprocess.CompletedProcess:
  """Run a command as a process that can import this checkout. Return the exit code, stdout and stderr."""
  return subprocess.run([*map(str, command)], input=stdin, env={**os.environ, "PYTHONPATH": PYTHONPATH, **env},
                        cwd=ROOT, capture_output=True, text=True, timeout=240)


def run_python(code: str, *arguments: Any, **env: str) -> subprocess.CompletedProcess:
  """Run a Python program as run_process does, by default on the CPU."""
  return run_process(sys.executable, "-c", code, *arguments, **{"DEV": "CPU", **env})


def process(*arguments: Any, **options: str) -> subprocess.CompletedProcess:
  """Run `tinyvllm *arguments` as a process, with `stdin` and environment variables in `options`."""
  return run_process(sys.executable, "-m", "tinyvllm", *arguments, **options)


def check_error(call: Callable[[], Any], *parts: Any) -> None:
  """Check that a call raises a ValueError of one line with these parts."""
  with pytest.raises(ValueError) as e: call()
  for part in parts: assert str(part) in str(e.value), f"{part} is not in: {e.value}"
  assert len(str(e.value).splitlines()) == 1


def error_line(run: subprocess.CompletedProcess, code: int = 1) -> str:
  """Check that a command failed with one line of error, its last one, and return the line."""
  *others, last = run.stderr.splitlines()
  assert run.returncode == code and last.startswith("tinyvllm: "), run.stderr
  assert not any(line.startswith(("tinyvllm: ", "Traceback")) for line in others), run.stderr
  return last
