"""Documentation: the README is short and counts lines correctly, links work, and generated tables are up to date."""
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import backends
from test_size import EXTENSION, PACKAGE, counts

ROOT = Path(__file__).parents[2]
PAGES = [page for page in sorted(ROOT.rglob("*.md"))
         if not any(part.startswith(".") or part == "site-packages" for part in page.relative_to(ROOT).parts)]
PAGE = ROOT / "tests" / "README.md"
RECORD = {"backend": "METAL", "device": "Apple M9", "tinygrad": "0.14.0", "passed": 49, "failed": 0, "seconds": 61,
          "tokens_per_second": 123.45, "model": "bundled", "date": "2030-01-02"}


SECTIONS = ["Why", "Quick start", "Numbers", "Tested devices", "Python", "Coming from vLLM", "How it works", "Limits",
            "Contributing"]


def test_readme_is_short_and_in_order():
  text = (ROOT / "README.md").read_text()
  assert len(text.split()) <= 700 and max(map(len, text.splitlines())) <= 100
  assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS


def test_readme_line_counts_are_current():
  text = " ".join((ROOT / "README.md").read_text().split())
  def lines(folder): return f"{sum(n for n, _ in counts(folder).values()):,}"
  assert f"{lines(PACKAGE)} lines in the core" in text and f"{lines(EXTENSION)} in the extension" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
  def anchors(text): return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
                             for title in re.findall(r"^#+ (.*)$", text, re.M)}
  links = re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text())
  for name, anchor in links:
    target = page.parent / name if name else page
    assert target.exists(), name
    assert not anchor or anchor in anchors(target.read_text()), (name, anchor)


def rows_by_name(records): return {line.split(" | ")[0]: line for line in backends.render(records).splitlines()}


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


def test_render_backend_without_record_is_not_tried():
  rows = rows_by_name([])
  assert [name for name in rows if "not tried" in rows[name]] == ["| `METAL`", "| `AMD`"]
  rows = rows_by_name([RECORD, {**RECORD, "backend": "NEW", "failed": 2}])
  assert rows["| `METAL`"] == "| `METAL` | Apple M9 | 49 passed, 61 s | 123.5 tokens/s | bundled | 0.14.0, 2030-01-02 |"
  assert "49 passed, 2 failed" in rows["| `NEW`"] and "not tried" in rows["| `AMD`"]


def test_render_rendered_kernels_says_not_run():
  record = {"backend": "METAL", "status": "rendered and parsed", "kernels": 56, "threadgroup_memory": 6144,
            "buffers": 15, "threads": 128, "tinygrad": "0.14.0", "date": "2030-01-02"}
  assert rows_by_name([record])["| `METAL`"] == (
    "| `METAL` | none | rendered and parsed, not run: 56 kernels, at most 6,144 bytes of threadgroup memory, 15 "
    "buffers, 128 threads |  |  | 0.14.0, 2030-01-02 |")


def test_render_emulated_runs_names_each_variant():
  runs = [{**RECORD, "device": "RDNA3", "compiler": "LLVM", "date": "2030-01-01"},
          {**RECORD, "device": "RDNA4", "compiler": "HIP C", "failed": 1}]
  record = {"backend": "AMD", "status": "emulated", "runs": runs, "tinygrad": "0.14.0"}
  assert rows_by_name([record])["| `AMD`"] == (
    "| `AMD` | none | emulated, not run on a card: RDNA3 with LLVM 49 passed; RDNA4 with HIP C 49 passed, 1 failed |  "
    "|  | 0.14.0, 2030-01-02 |")
  assert backends.status(record) == "emulated RDNA3 and RDNA4 (2030-01-02)"


@pytest.mark.parametrize(("line", "expected"), [
  ("49 passed in 61.20s (0:01:01)", (49, 0, 61.2)),
  ("=== 3 failed, 46 passed, 2 warnings in 96.30s (0:01:36) ===", (46, 3, 96.3)),
  ("1 passed, 2 errors in 3.00s", (1, 2, 3.0)), ("2 failed, 1 error in 3.00s", (0, 3, 3.0))])
def test_read_tests_parses_pytest_summary(line, expected):
  assert backends.read_tests(f"....\nin 5s\n{line}\n") == expected


def test_read_tests_and_read_speed_without_numbers_raise():
  with pytest.raises(ValueError, match="summary"): backends.read_tests("Segmentation fault\n")
  with pytest.raises(ValueError, match="decode, 1 stream"): backends.read_speed("decode, 8 streams   9.0 tokens/s\n")
  assert backends.read_speed("load  1.0 s\ndecode, 1 stream             23.4 tokens/s    5% of the roofline\n") == 23.4


def test_backends_missing_device_is_reported_and_fails(tmp_path, monkeypatch, capfd):
  monkeypatch.setattr(backends, "RECORDS", tmp_path / "backends.json")
  monkeypatch.setattr(sys, "argv", ["backends.py", "NOSUCH"])
  assert backends.main() == 1 and "NOSUCH" in capfd.readouterr().err
  assert not backends.RECORDS.exists()


def test_backends_failed_test_is_recorded_and_fails(tmp_path, monkeypatch, capfd):
  answers = iter(["device: Apple M9\n", "1 failed, 48 passed in 61.20s\n", "decode, 1 stream   123.4 tokens/s\n"])
  monkeypatch.setattr(backends, "RECORDS", tmp_path / "backends.json")
  monkeypatch.setattr(backends, "run", lambda *command: next(answers))
  monkeypatch.setattr(sys, "argv", ["backends.py", "METAL", "--write", str(tmp_path / "page.md")])
  (tmp_path / "page.md").write_text(f"before\n{backends.BEGIN}\nold\n{backends.END}\nafter\n")
  assert backends.main() == 1 and "METAL: 1 tests failed" in capfd.readouterr().err
  assert json.loads(backends.RECORDS.read_text())[0]["failed"] == 1
  page = (tmp_path / "page.md").read_text()
  assert "48 passed, 1 failed, 61 s | 123.4 tokens/s" in page and "old" not in page
  assert page.startswith("before\n") and page.endswith("\nafter\n")


def test_backends_script_prints_table():
  script = Path(backends.__file__)
  out = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
  assert backends.render(backends.read_records()) in out
