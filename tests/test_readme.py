"""The pages: the first one stays short, links lead somewhere, and tables that a script writes are what it would write
now."""
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import backends
from test_size import EXTENSION, PACKAGE, counts

ROOT = Path(__file__).parents[1]
PAGES = [page for page in sorted(ROOT.rglob("*.md"))
         if not any(part.startswith(".") or part == "site-packages" for part in page.relative_to(ROOT).parts)]
PAGE = Path(__file__).with_name("README.md")
RECORD = {"backend": "METAL", "device": "Apple M9", "tinygrad": "0.14.0", "passed": 49, "failed": 0, "seconds": 61,
          "tokens_per_second": 123.45, "model": "bundled", "date": "2030-01-02"}


def test_the_first_page_is_short():
  lines = (ROOT / "README.md").read_text().splitlines()
  assert sum(len(line.split()) for line in lines) <= 900 and max(map(len, lines)) <= 100


def test_the_first_page_counts_the_lines_as_they_are():
  text = (ROOT / "README.md").read_text()
  text = " ".join(text.split())
  def lines(folder): return f"{sum(n for n, _ in counts(folder).values()):,}"
  assert f"{lines(PACKAGE)} in the core" in text and f"{lines(EXTENSION)} in the extension" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
  def anchors(text): return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
                             for title in re.findall(r"^#+ (.*)$", text, re.M)}
  links = re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text())
  for name, anchor in links:
    target = page.parent / name if name else page
    assert target.exists(), name
    assert not anchor or anchor in anchors(target.read_text()), (name, anchor)


def rows_of(records): return {line.split(" | ")[0]: line for line in backends.render(records).splitlines()}


def test_the_table_of_backends_is_the_records():
  text = PAGE.read_text()
  assert backends.replace_table(text, backends.render(backends.read_records())) == text, (
    "python tests/benchmarks/backends.py --write tests/README.md")


def test_a_backend_that_nobody_ran_has_a_row_that_says_so_until_there_is_a_record():
  rows = rows_of([])
  assert [name for name in rows if "not run by us" in rows[name]] == ["| `METAL`", "| `AMD`"]
  rows = rows_of([RECORD, {**RECORD, "backend": "NEW", "failed": 2}])
  assert rows["| `METAL`"] == "| `METAL` | Apple M9 | 49 passed, 61 s | 123.5 tokens/s | bundled | 0.14.0, 2030-01-02 |"
  assert "49 passed, 2 failed" in rows["| `NEW`"] and "not run by us" in rows["| `AMD`"]


@pytest.mark.parametrize(("line", "expected"), [
  ("49 passed in 61.20s (0:01:01)", (49, 0, 61.2)),
  ("=== 3 failed, 46 passed, 2 warnings in 96.30s (0:01:36) ===", (46, 3, 96.3)),
  ("1 passed, 2 errors in 3.00s", (1, 2, 3.0)), ("2 failed, 1 error in 3.00s", (0, 3, 3.0))])
def test_pytests_summary_is_read(line, expected): assert backends.read_tests(f"....\nin 5s\n{line}\n") == expected


def test_a_run_that_tells_no_numbers_is_an_error():
  with pytest.raises(ValueError, match="pytest ended without a summary"): backends.read_tests("Segmentation fault\n")
  with pytest.raises(ValueError, match="decode, 1 stream"): backends.read_speed("decode, 8 streams   9.0 tokens/s\n")
  assert backends.read_speed("load  1.0 s\ndecode, 1 stream             23.4 tokens/s    5% of the roofline\n") == 23.4


def test_a_backend_that_is_not_here_is_told_and_fails(tmp_path, monkeypatch, capfd):
  monkeypatch.setattr(backends, "RECORDS", tmp_path / "backends.json")
  monkeypatch.setattr(sys, "argv", ["backends.py", "NOSUCH"])
  assert backends.main() == 1 and "NOSUCH: does not open here" in capfd.readouterr().err
  assert not backends.RECORDS.exists()


def test_a_failed_test_is_recorded_and_fails(tmp_path, monkeypatch, capfd):
  answers = iter(["device: Apple M9\n", "1 failed, 48 passed in 61.20s\n", "decode, 1 stream   123.4 tokens/s\n"])
  monkeypatch.setattr(backends, "RECORDS", tmp_path / "backends.json")
  monkeypatch.setattr(backends, "run", lambda *command: next(answers))
  monkeypatch.setattr(sys, "argv", ["backends.py", "METAL", "--write", str(tmp_path / "page.md")])
  (tmp_path / "page.md").write_text(f"before\n{backends.BEGIN}\nold\n{backends.END}\nbehind\n")
  assert backends.main() == 1 and "METAL: 1 tests failed" in capfd.readouterr().err
  assert json.loads(backends.RECORDS.read_text())[0]["failed"] == 1
  page = (tmp_path / "page.md").read_text()
  assert "48 passed, 1 failed, 61 s | 123.4 tokens/s" in page and "old" not in page
  assert page.startswith("before\n") and page.endswith("\nbehind\n")


def test_the_script_renders_alone():
  script = Path(backends.__file__)
  out = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
  assert backends.render(backends.read_records()) in out
