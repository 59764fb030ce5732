"""Run the shared backend tests and measure decode speed on each tinygrad backend.

python tests/benchmarks/backends.py CPU CL WEBGPU [--model DIR] [--write tests/README.md]

For each backend, runs tests/kernels/test_backend.py and then speed.py in a new process with DEV=backend. The results
replace the backend's record in backends.json, and the table of all records is printed. The exit status is 1 if a
backend is not available, a test fails, or a run prints no results. Without backends, only the table is printed."""
import argparse
import ctypes
import json
import os
import platform
import re
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT, RECORDS = HERE.parents[1], HERE / "backends.json"
KNOWN = ["CPU", "CUDA", "METAL", "AMD", "CL", "WEBGPU"]   # order of the rows; other backends follow
EXPECTED = ["METAL", "AMD"]   # backends with a row even without a record
HEADER = ["`DEV=`", "device", "tests", "decode, one stream", "model", "tinygrad, date"]
BEGIN = "<!-- backends: written by tests/benchmarks/backends.py --write tests/README.md -->"
END = "<!-- end of backends -->"


def device_name() -> str:
  """Return the name of tinygrad's default device, from the system or the driver."""
  from tinygrad import Device

  from tinyvllm_extra.programs import drivers, prepare_device
  prepare_device()   # also finds a compiler that is not on the PATH
  if Device.DEFAULT == "METAL":
    return read_output("system_profiler", "SPDisplaysDataType").split("Chipset Model:")[1].splitlines()[0]
  if Device.DEFAULT == "WEBGPU":
    from tinygrad.runtime.autogen import webgpu
    webgpu.wgpuDeviceGetAdapterInfo(Device.default.device_res, info := webgpu.WGPUAdapterInfo())   # type: ignore
    texts = [(text.data, text.length) for text in (info.device, info.description)]
    return ", ".join(ctypes.string_at(*text).decode() for text in texts if text[1])
  if Device.DEFAULT != "CPU": return drivers.device_name(Device.default)
  on_mac = platform.system() == "Darwin"
  name = read_output("sysctl", "-n", "machdep.cpu.brand_string") if on_mac else drivers.device_name(Device.default)
  return f"{name.strip()}, {os.cpu_count()} cores"


def read_output(*command: str) -> str: return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_tests(output: str) -> tuple[int, int, float]:
  """Return tests passed, tests failed (fixture errors included) and seconds from pytest's summary line."""
  summary = re.findall(r"^=*\s*(\d+ (?:passed|failed|error).*) in ([\d.]+)s", output, re.MULTILINE)
  if not summary: raise ValueError("pytest ended without a summary")
  counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error)", summary[-1][0])}
  return counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0), float(summary[-1][1])


def read_speed(output: str) -> float:
  """Return the tokens per second of one stream from speed.py's output."""
  match = re.search(r"^decode, 1 stream\s+([\d.]+) tokens/s", output, re.MULTILINE)
  if not match: raise ValueError("speed.py ended without a line 'decode, 1 stream'")
  return float(match[1])


def run(backend: str, *command: str) -> str:
  """Run Python with DEV=backend and return its output, which is also printed line by line."""
  paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
  return run_with({**os.environ, "DEV": backend, "PYTHONPATH": os.pathsep.join(paths)}, *command)


def run_with(environment: dict[str, str], *command: str) -> str:
  process = subprocess.Popen([sys.executable, *command], env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT)
  lines = list[str]()
  for line in process.stdout or ():
    print(line, end="", flush=True)
    lines.append(line)
  process.wait()
  return "".join(lines)


def measure(backend: str, model: str | None) -> dict:
  """Return a new record. Raises ValueError if the backend is not available or a run prints no results."""
  print(f"\n== {backend}", flush=True)
  match = re.search(r"^device: (.+)$", run(backend, __file__, "--name-device"), re.MULTILINE)
  if not match: raise ValueError("does not open here")
  passed, failed, seconds = read_tests(run(backend, "-m", "pytest", "tests/kernels/test_backend.py"))
  options = ["--model", model] if model else []
  speed = read_speed(run(backend, str(HERE / "speed.py"), "--decode-only", *options))
  return {"backend": backend, "device": match[1], "tinygrad": version("tinygrad"), "passed": passed, "failed": failed,
          "seconds": round(seconds), "tokens_per_second": speed, "model": Path(model).name if model else "bundled",
          "date": str(date.today())}


def render(records: list[dict]) -> str:
  """Return the Markdown table, one row per backend."""
  by_name = {record["backend"]: record for record in records}
  order = [*KNOWN, *sorted({*by_name} - {*KNOWN})]
  rows = [[f"`{name}`", *cells(by_name.get(name))] for name in order if name in by_name or name in EXPECTED]
  lines = [HEADER, ["---"] * len(HEADER), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cells(record: dict | None) -> list[str]:
  if not record: return ["", "not tried", "", "", ""]
  if "runs" in record:   # emulated: tests/kernels/amd.py
    runs = [f"{x['device']} with {x['compiler']} {counts(x)}" for x in record["runs"]]
    last = max(x["date"] for x in record["runs"])
    return ["none", f"emulated, not run on a card: {'; '.join(runs)}", "", "", f"{record['tinygrad']}, {last}"]
  if "status" in record:   # checked without the device: tests/kernels/metal.py
    largest = (f"{record['threadgroup_memory']:,} bytes of threadgroup memory, {record['buffers']} buffers, "
               f"{record['threads']} threads")
    return ["none", f"{record['status']}, not run: {record['kernels']} kernels, at most {largest}", "", "",
            version_and_date(record)]
  return [record["device"], f"{counts(record)}, {record['seconds']} s",
          f"{record['tokens_per_second']:.1f} tokens/s", record["model"], version_and_date(record)]


def counts(record: dict) -> str:
  return f"{record['passed']} passed" + (f", {record['failed']} failed" if record["failed"] else "")


def status(record: dict | None) -> str:
  """Return how README.md's table of devices must begin for a backend."""
  if not record: return "not tried"
  if "runs" not in record: return record.get("status", "run on")
  devices = " and ".join(dict.fromkeys(x["device"] for x in record["runs"]))
  return f"emulated {devices} ({max(x['date'] for x in record['runs'])})"


def version_and_date(record: dict) -> str: return f"{record['tinygrad']}, {record['date']}"


def read_records() -> list[dict]: return json.loads(RECORDS.read_text()) if RECORDS.exists() else []


def replace_table(text: str, table: str) -> str:
  """Return `text` with `table` between the two marks. Raises ValueError if the marks are missing."""
  if text.count(BEGIN) != 1 or text.count(END) != 1: raise ValueError(f"needs a line {BEGIN!r} and one {END!r}")
  before, rest = text.split(BEGIN)
  return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("backends", nargs="*", metavar="BACKEND", help="value of DEV: CPU, CUDA, CL, WEBGPU, …")
  parser.add_argument("--model", metavar="DIR", help="model folder for speed.py (default: the bundled model)")
  parser.add_argument("--write", metavar="FILE", type=Path, help="write the table between the marks in FILE")
  parser.add_argument("--name-device", action="store_true", help="only print the name of DEV's device")
  args = parser.parse_args()
  if args.name_device:
    print(f"device: {device_name()}")
    return 0
  records, problems = {record["backend"]: record for record in read_records()}, list[str]()
  for backend in args.backends:
    try: record = measure(backend, args.model)
    except ValueError as e:
      problems.append(f"{backend}: {e}")
      continue
    if record["failed"]: problems.append(f"{backend}: {record['failed']} tests failed")
    records[backend] = record
    RECORDS.write_text(json.dumps(list(records.values()), indent=2, ensure_ascii=False) + "\n")
  table = render([*records.values()])
  print(f"\n{table}")
  if args.write: args.write.write_text(replace_table(args.write.read_text(), table))
  for problem in problems: print(problem, file=sys.stderr)
  return 1 if problems else 0


if __name__ == "__main__": sys.exit(main())
