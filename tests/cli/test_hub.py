"""Models named ORG/NAME, which are downloaded from a small server that speaks the hub's protocol."""
import contextlib
import json
import logging
import math
import re
import shutil
from pathlib import Path

import pytest
from helpers.commands import FLAGS, error_line, run_command
from helpers.data import read_data, write_files
from helpers.engines import ENGINE, greedy, tokens
from helpers.hub import COMMIT, Hub
from helpers.models import tensor_shapes, tiny_config, tiny_model
from helpers.servers import LocalServer
from huggingface_hub import constants, get_hf_file_metadata, hf_api

from tinyvllm import LLM, InputError
from tinyvllm_extra.formats import fit
from tinyvllm_extra.formats.hub import local_path, match_name, served_name
from tinyvllm_extra.options import LLMConfig

GIB = 2**30
CASES = read_data("hub.json")   # files of a name, unused files of a repository, errors, names
UNUSED = CASES["unused"]
PARTS = [f"BF16/tiny-BF16-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.fixture
def hub(tmp_path, monkeypatch):
  """A hub, which huggingface_hub uses in this process, with the cache `hub.cache`."""
  with Hub(tmp_path / "hub") as hub:
    hub.cache = tmp_path / "cache"
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(hub.cache),
                        "HF_TOKEN_PATH": str(tmp_path / "token")}.items(): monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("time.sleep", lambda seconds: None)   # between huggingface_hub's attempts
    yield hub


def write_contents(folder, names): write_files(folder, {name: f"content of {name}" for name in names})


def contents(folder): return {str(x.relative_to(folder)): x.read_bytes() for x in folder.rglob("*") if x.is_file()}


@pytest.fixture
def repository(hub):
  """A sharded safetensors model with a chat template, and files that are not a part of it."""
  folder = tiny_model(hub.root / "org/tiny", words=True, shards=3)
  (folder / "tokenizer_config.json").write_text("{}")
  (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
  write_contents(folder, UNUSED)
  return folder


@pytest.fixture
def gguf_repository(hub):
  """GGUF files of three types, one of them in parts, and a file for images."""
  folder = hub.root / "org/tiny-GGUF"
  write_contents(folder, ["tiny-F16.gguf", "tiny-Q8_0.gguf", "mmproj-F16.gguf", *PARTS])
  return folder


@pytest.fixture
def report(caplog):
  """Return a function that returns the line about the last download, its level and its numbers of GiB."""
  caplog.set_level(logging.INFO, "tinyvllm")

  def report():
    record, = [record for record in caplog.records if record.getMessage().startswith("downloading ")]
    caplog.clear()
    text = record.getMessage()
    weights, free = re.search(r"the weights use ([\d.]+) of ([\d.]+) GiB of free memory", text).groups()
    return text, record.levelname, float(weights), float(free)
  return report


def test_name_downloads_the_models_files(hub, repository, report):
  write_contents(repository, ["modules.json", "1_Pooling/config.json"])
  path = local_path("org/tiny")
  assert path == hub.cache / "models--org--tiny/snapshots" / COMMIT
  expected = {name: content for name, content in contents(repository).items() if name not in UNUSED}
  assert contents(path) == expected and hub.downloads() == sorted(expected)
  text, level, weights, free = report()
  size = sum(map(len, expected.values()))
  assert text.startswith(f"downloading org/tiny: {size / 1024:.2f} KB in {len(expected)} files to {hub.cache}; ")
  assert level == "INFO" and weights == 0 and free > 0


@pytest.mark.parametrize("is_offline", [True, False])
def test_offline_or_unreachable_hub_uses_the_cache(hub, repository, monkeypatch, is_offline):
  path = local_path("org/tiny")
  hub.requests.clear()
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
  monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
  monkeypatch.setattr(hf_api.api, "endpoint", hub.url if is_offline else "http://127.0.0.1:9")
  assert local_path("org/tiny") == path
  shutil.rmtree(path.parents[1] / "trees")   # older programs write none
  assert local_path("org/tiny") == path
  with pytest.raises(InputError, match="'org/other' is neither a path nor in the cache"): local_path("org/other")
  assert not hub.requests


def test_only_missing_files_are_downloaded(hub, repository, report):
  first = local_path("org/tiny")
  report()
  config, weights = first / "config.json", first / "model-00002-of-00003.safetensors"
  size = config.stat().st_size + weights.stat().st_size
  weights.resolve().unlink()
  for link in (config, weights): link.unlink()
  hub.requests.clear()
  assert local_path("org/tiny") == first and hub.downloads() == [weights.name]
  assert f"{size / 1024:.2f} KB in 2 files" in report()[0]


def test_gguf_name_downloads_all_parts_of_its_type(hub, gguf_repository, report):
  for file in PARTS: (gguf_repository / file).write_bytes(file.encode() + bytes(2**22))
  path = local_path("org/tiny-GGUF:bf16")
  assert path.relative_to(hub.cache / "models--org--tiny-GGUF/snapshots" / COMMIT) == Path(PARTS[0])
  assert hub.downloads() == PARTS
  assert contents(path.parent) == contents(gguf_repository / "BF16")
  text, _, weights, _ = report()
  assert " in 3 files to " in text and weights == pytest.approx(3 / 256, abs=0.005)


@pytest.mark.parametrize("case", CASES["chosen"])
def test_files_of_a_name_are_chosen_by_type(hub, case):
  write_contents(hub.root / "org/m", case["files"])
  if "config.json" in case["files"]: (hub.root / "org/m/config.json").write_text(json.dumps(tiny_config()))
  error = pytest.raises(InputError, match=re.escape(case["error"])) if "error" in case else contextlib.nullcontext()
  with error: local_path(case["model"])
  assert hub.downloads() == case.get("chosen", [])


def test_llm_applies_revision_and_download_dir(hub, repository, tmp_path):
  cache = tmp_path / "models"
  llm = LLM("org/tiny", revision="dev", download_dir=str(cache), **ENGINE)
  assert llm.path == cache / "models--org--tiny/snapshots" / COMMIT and not hub.cache.exists()
  assert (cache / "models--org--tiny/refs/dev").read_text() == COMMIT
  with pytest.raises(InputError, match="no field 'tensor_paralel_size'"): LLM("org/tiny", tensor_paralel_size=1)
  assert not hub.cache.exists(), "options are checked before the download"


def test_prefix_cache_is_saved_with_a_draft_model_of_the_hub(hub, repository, tmp_path):
  with LLM("org/tiny", speculative_config={"model": "org/tiny", "num_speculative_tokens": 2}, **ENGINE) as llm:
    llm.generate(tokens([5] * 40), greedy(2), use_tqdm=False)
    assert llm.save_prefix_cache(tmp_path / "blocks") > 0


def test_server_takes_a_name(hub, repository):
  with LocalServer("org/tiny", *FLAGS) as server:
    assert server.get("/v1/models").json()["data"][0]["id"] == "org/tiny"
    assert server.post("/v1/completions", {"model": "org/tiny", "prompt": "the cat"}).status_code == 200


# The commands pull, list and rm

def test_pull_list_and_rm_of_models(hub, repository, gguf_repository, monkeypatch):
  monkeypatch.setattr("tinyvllm_extra.options.logger", logging.Logger("quiet"))
  assert run_command("list").stdout.split() == ["NAME", "SIZE", "FORMAT", "LAST", "USE"]
  for name in ("org/tiny", "org/tiny-GGUF:Q8_0", "org/tiny-GGUF:bf16"):
    assert run_command("pull", name).stdout == f"{local_path(name)}\n"
  _, *rows = [line.split(maxsplit=3) for line in run_command("list").stdout.splitlines()]
  assert [(name, re.sub("  .*", "", rest)) for name, _, _, rest in rows] == [
    ("org/tiny", "safetensors"), ("org/tiny-GGUF", "BF16, Q8_0")]
  assert "did you mean org/tiny?" in error_line(run_command("rm", "org/tny"))
  assert "see tinyvllm list" in error_line(run_command("rm", "another/name"))
  run = run_command("rm", "org/tiny", "org/tiny-GGUF")
  assert re.sub(r"[\d.]+ (MB|KB|B) ", "", run.stdout) == "deleted org/tiny: freed\ndeleted org/tiny-GGUF: freed\n"
  assert not [*hub.cache.glob("models--*")] and run_command("list").stdout.count("\n") == 1
  assert "download_dir='/nowhere' is not a folder" in error_line(run_command("list", "--download-dir", "/nowhere"))


# Sizes

@pytest.mark.parametrize("options,needed,room", CASES["memory"])
def test_model_larger_than_memory_logs_warning(hub, repository, report, monkeypatch, options, needed, room):
  """The model consists of matrices in float32 almost entirely."""
  config = tiny_config(hidden_size=2**14, intermediate_size=2**16, num_hidden_layers=9, vocab_size=320)
  (repository / "config.json").write_text(json.dumps(config))
  size = needed * sum(4 * math.prod(shape) for shape in tensor_shapes(config).values()) / GIB
  device = fit.open_device()
  for factor, level, end in ((1.02, "INFO", "memory"), (0.98, "WARNING", "fit: choose a smaller or quantized one")):
    free = factor * size / 0.9 / room
    monkeypatch.setattr(fit, "open_device", lambda free=free: {**device, "free_gib": free})
    local_path("org/tiny", LLMConfig(**options))
    text, actual, weights, available = report()
    assert (actual, weights) == (level, pytest.approx(size, rel=0.01)) and text.endswith(end)
    assert available == pytest.approx(free * options.get("tensor_parallel_size", 1), abs=0.01)
    shutil.rmtree(hub.cache)


def test_unsupported_architecture_raises_before_weights_are_downloaded(hub, repository):
  (repository / "config.json").write_text(json.dumps(tiny_config(architectures=["OtherForCausalLM"])))
  with pytest.raises(InputError, match="architecture 'OtherForCausalLM' is not supported"): local_path("org/tiny")
  assert hub.downloads() == ["config.json"]


# Failures

def test_closed_connection_resumes_the_download(hub, gguf_repository, report, monkeypatch):
  content = bytes(range(256)) * 2**12
  (gguf_repository / "tiny-F16.gguf").write_bytes(content)
  monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
  blobs = hub.cache / "models--org--tiny-GGUF/blobs"
  blobs.mkdir(parents=True)
  hub.limit["tiny-F16.gguf"] = 5000
  path = local_path("org/tiny-GGUF:F16")
  assert path.read_bytes() == content and hub.ranges("tiny-F16.gguf") == [None, "bytes=5000-"]
  assert [file.name for file in blobs.iterdir()] == [path.resolve().name], "no partial file remains"
  part = path.resolve().rename(path.resolve().with_suffix(".part"))   # of a process that was stopped
  path.unlink()
  part.write_bytes(content[:7000])
  report()
  assert local_path("org/tiny-GGUF:F16").read_bytes() == content and hub.ranges("tiny-F16.gguf")[2:] == ["bytes=7000-"]
  assert f": {(len(content) - 7000) / 1024:.2f} KB in 1 files" in report()[0]


@pytest.mark.parametrize("size,is_own", [(0, True), (1, False)])
def test_file_above_http_limit_is_left_to_huggingface_hub(hub, gguf_repository, monkeypatch, size, is_own):
  """Its other protocol is not used here, so that it fails."""
  calls = []
  monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", (gguf_repository / "tiny-F16.gguf").stat().st_size - size)
  monkeypatch.setattr("huggingface_hub.get_hf_file_metadata",
                      lambda url: calls.append(url) or get_hf_file_metadata(url))
  with contextlib.nullcontext() if is_own else pytest.raises(ValueError): local_path("org/tiny-GGUF:F16")
  assert bool(calls) == is_own


@pytest.mark.parametrize("case", CASES["errors"], ids=lambda case: case["about"])
def test_error_names_the_remedy(hub, gguf_repository, monkeypatch, case):
  vars(hub).update(case["hub"])
  message = case["message"].format(page=f"{hub.url}/org/tiny-GGUF")
  error = RuntimeError if case["about"] == "broken" else InputError
  with pytest.raises(error, match=message): local_path("org/tiny-GGUF:F16", LLMConfig(**case["options"]))
  assert case["about"] == "broken" or not hub.downloads()
  monkeypatch.setenv("HF_TOKEN", "secret")
  if "token" in case["hub"]: assert local_path("org/tiny-GGUF:F16").read_bytes() == b"content of tiny-F16.gguf"


# Paths

def test_local_folder_precedes_name_on_the_hub(tmp_path, monkeypatch):
  (tmp_path / "org/tiny").mkdir(parents=True)
  monkeypatch.chdir(tmp_path)
  assert local_path("org/tiny") == Path("org/tiny")
  monkeypatch.setenv("HOME", str(tmp_path))
  assert local_path("~/org/tiny") == tmp_path / "org/tiny"


@pytest.mark.parametrize("name,expected", [*CASES["is_name"].items(), (None, False), (Path("org/tiny"), False)])
def test_match_name_accepts_org_and_name_only(name, expected): assert bool(match_name(name)) is expected


@pytest.mark.parametrize("model,name", CASES["served names"])
def test_served_name_is_the_name_or_the_last_part_of_the_path(model, name): assert served_name(model) == name
