"""Command lines, as processes."""
import os
import subprocess
import sys
from pathlib import Path

from .engines import ENGINE
from .requests import flags


FLAGS = flags(**ENGINE)
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def process(*arguments, stdin="", **env):
  command = [sys.executable, "-m", "tinyvllm", *map(str, arguments)]
  return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120,
                        cwd=Path(__file__).parents[2], env={**os.environ, **env})
