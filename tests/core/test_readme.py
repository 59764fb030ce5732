"""Documentation: the README is short, links and names of files are valid, and tables are up to date."""
import hashlib
import re

import pytest
from benchmarks import backends
from helpers.commands import ROOT
from test_size import BENCHMARK_LINES, ROOMS, TEST_LINES

from tinyvllm_extra.serving.app import chat_page

PAGES = [page for page in sorted(ROOT.rglob("*.md"))
         if not any(part.startswith(".") or part == "site-packages" for part in page.relative_to(ROOT).parts)]
PAGE = ROOT / "tests" / "README.md"


SECTIONS = ["Why", "Quick start", "Python", "Numbers", "Tested devices", "How it works", "Coming from vLLM", "Limits",
            "Contributing"]


def test_readme_is_short_and_in_order():
  text = (ROOT / "README.md").read_text()
  assert len(text.splitlines()) <= 130 and len(text.split()) <= 900 and max(map(len, text.splitlines())) <= 100
  assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS


def test_picture_shows_the_present_chat_page():
  """examples/chat_page.py adds the hash of the page to the picture that it takes."""
  digest = hashlib.sha256(chat_page().body).hexdigest()
  picture = (ROOT / "examples" / "chat_page.png").read_bytes()
  assert f"page\0{digest}".encode() in picture, "the page has changed: run examples/chat_page.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets_and_named_python_files_exist(page):
  def anchors(text): return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
                             for title in re.findall(r"^#+ (.*)$", text, re.M)}
  links = re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text())
  for name, anchor in links:
    target = page.parent / name if name else page
    assert target.exists(), name
    assert not anchor or target.suffix == ".py" or anchor in anchors(target.read_text()), (name, anchor)
  if page.name == "LOG.md": return   # names files of its time
  files = [f"/{path}" for folder in ("tinyvllm", "examples", "tests") for path in (ROOT / folder).rglob("*.py")]
  for name in re.findall(r"`([\w/]+\.py)\b", page.read_text()):
    assert name == "models/NAME.py" or any(path.endswith(f"/{name}") for path in files), name


def test_links_to_lines_of_the_tour_are_definitions():
  page = ROOT / "examples" / "docs" / "tour.md"
  links = re.findall(r"\[`([\w.]+)`\]\(([^)]*\.py)#L(\d+)\)", page.read_text())
  assert len(links) > 12 and page.read_text().count(".py#L") == len(links)
  for name, path, number in links:
    line = (page.parent / path).read_text().splitlines()[int(number) - 1]
    assert re.match(rf" *(def|class) {name.rpartition('.')[2]}\b", line), (name, line)


def test_readmes_name_the_ceilings_of_rooms_and_tests():
  rows = re.findall(r"^\| (?:`(\w+)/`|top level) \|.*\| ([\d,]+) \|$",
                    (ROOT / "examples" / "README.md").read_text(), re.M)
  assert {room: int(lines.replace(",", "")) for room, lines in rows} == ROOMS
  for limit in (TEST_LINES, BENCHMARK_LINES): assert f"at most {limit:,} code lines" in PAGE.read_text()


def test_backends_table_equals_records():
  text = PAGE.read_text()
  assert backends.replace_table(text, backends.render(backends.read_records())) == text, (
    "python tests/benchmarks/backends.py --write tests/README.md")


def test_readme_devices_have_a_status_that_agrees_with_records():
  """One row per backend: where its tests were run, emulated, or rendered and parsed; or not tried. Nothing else."""
  section = (ROOT / "README.md").read_text().split("## Tested devices")[1].split("\n## ")[0]
  rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", section, re.M))
  assert [*rows] == backends.KNOWN and section.count("\n|") == len(rows) + 2
  records = {x["backend"]: x for x in backends.read_records()}
  for name, text in rows.items():
    status = backends.status(records.get(name))
    assert text == status or (status == "run on" and text.startswith("run on ")), (name, status)
