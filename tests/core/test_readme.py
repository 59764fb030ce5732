"""Documentation: the README is short and counts lines correctly, links work, and generated tables are up to date."""
import re
from pathlib import Path

import pytest
from benchmarks import backends

ROOT = Path(__file__).parents[2]
PAGES = [page for page in sorted(ROOT.rglob("*.md"))
         if not any(part.startswith(".") or part == "site-packages" for part in page.relative_to(ROOT).parts)]
PAGE = ROOT / "tests" / "README.md"


SECTIONS = ["Why", "Quick start", "Numbers", "Tested devices", "Python", "Coming from vLLM", "How it works", "Limits",
            "Contributing"]


def test_readme_is_short_and_in_order():
  text = (ROOT / "README.md").read_text()
  assert len(text.split()) <= 700 and max(map(len, text.splitlines())) <= 100
  assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
  def anchors(text): return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
                             for title in re.findall(r"^#+ (.*)$", text, re.M)}
  links = re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text())
  for name, anchor in links:
    target = page.parent / name if name else page
    assert target.exists(), name
    assert not anchor or anchor in anchors(target.read_text()), (name, anchor)


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
