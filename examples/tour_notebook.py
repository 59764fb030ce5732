"""Write tour.ipynb from docs/tour.md: a cell for each script, with its output. With --run, run the notebook instead,
and compare it with the page; this needs `pip install nbclient ipykernel`.

python examples/tour_notebook.py [--run]"""
import json, pathlib, re, sys, time

FOLDER = pathlib.Path(__file__).parent
FILE = FOLDER / "tour.ipynb"
INSTALL = """try:
  import tinyvllm
except ImportError:
  %pip install -q "tinyvllm[cpu]"
"""


def make_notebook() -> dict:
  page = (FOLDER / "docs/tour.md").read_text()
  page = re.sub(r"\]\((?!https?:)", "](docs/", page).replace("](docs/../../", "](../")   # links from this folder
  texts = re.split(r"```python\n(.*?)```\n\n```text\n(.*?)```\n", page, flags=re.DOTALL)
  cells = [code_cell(INSTALL, "")]
  for i, text in enumerate(texts):   # prose, script, output, prose, ...
    if i % 3 == 0: cells.append({"cell_type": "markdown", "metadata": {}, "source": text.strip().splitlines(True)})
    if i % 3 == 1: cells.append(code_cell(text, texts[i + 1]))
  cells.insert(0, cells.pop(1))   # the introduction, then the install cell
  kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
  return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}


def code_cell(code: str, output: str) -> dict:
  outputs = [{"name": "stdout", "output_type": "stream", "text": output.splitlines(True)}] if output else []
  return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": outputs,
          "source": code.rstrip().splitlines(True)}


def run() -> None:
  """Run tour.ipynb. Raises AssertionError if it differs from the page, or if a cell prints something else."""
  import nbclient, nbformat
  expected = make_notebook()
  assert json.loads(FILE.read_text()) == expected, f"run {__file__} again: docs/tour.md has changed"
  notebook, started = nbformat.read(FILE, 4), time.monotonic()
  nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": FOLDER}}).execute()
  for cell, old in zip(notebook.cells, expected["cells"], strict=True):
    printed = [x.text for x in cell.get("outputs", []) if x.get("name") == "stdout"]   # stderr has the log
    assert "".join(printed) == "".join("".join(x["text"]) for x in old.get("outputs", [])), cell.source
  print(f"{len(notebook.cells)} cells, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
  if "--run" in sys.argv: run()
  else: FILE.write_text(json.dumps(make_notebook(), indent=1, ensure_ascii=False) + "\n")
