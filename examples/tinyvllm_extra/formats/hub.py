"""Finds a model on disk, or downloads it from the Hugging Face hub into the hub's cache, and opens it. A path that
exists is never looked up on the hub."""
import dataclasses, difflib, glob, importlib, json, os, pathlib, re, shutil, types
from collections.abc import Iterator

from tinygrad.helpers import size_to_str

from tinyvllm.config import InputError, JsonObject, check, logger, read_json
from tinyvllm_extra.kernels.cuda_source import has_wgmma, speaks_c
from tinyvllm_extra.models import text_config
from tinyvllm_extra.options import LLMConfig, optional, setup_logging

from . import fit, gguf, peft_files, weights

# ORG/NAME, or for a GGUF model ORG/NAME:TYPE or ORG/NAME:FILE. A name that ends with .gguf is a path
NAME = re.compile(r"(\w[\w.-]*/[\w.-]+)(?<!\.gguf)(?::(.+))?")
ENDING = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)   # ending of a GGUF file, or of a part of a split one
# files: of a model folder, in the root of a repository. errors: messages for classes of huggingface_hub.errors; the
# first one that matches applies
TABLES = read_json(pathlib.Path(__file__).with_suffix(".json"))
FILES = re.compile("|".join(TABLES["files"]))


def match_name(model: object) -> re.Match | None:
  """Return the match of NAME for a model that is given by its name on the hub, and not by its path."""
  return NAME.fullmatch(model) if isinstance(model, str) and not os.path.exists(model) else None


def served_name(model: str | None) -> str:
  """Return the model's default name in the API: its name on the hub, as in vLLM, or the name of its folder or file."""
  if model is None or match_name(model): return model or "tinyvllm"
  return pathlib.Path(model).resolve().name.removesuffix(".gguf")


def named_models(words: str | list[str], folder: str | None) -> dict[str, JsonObject]:
  """Return the options of models by name, if there are several or one with a name. words: a path, or several, each also
  NAME=PATH or a JSON object of options by name. folder: has models as folders and GGUF files. Raises InputError."""
  models: JsonObject = {}
  for path in sorted(pathlib.Path(folder).expanduser().glob("*")) if folder else ():
    is_file = re.search(r"(?i)(-00001-of-\d{5}|(?<!-\d{5}-of-\d{5}))\.gguf$", path.name)   # or the first part of one
    if is_file or (path / "config.json").exists(): models[served_name(str(path))] = str(path)
  check(models or not folder, f"models_dir={folder!r} has no folder of a model and no GGUF file")
  words = [words] if isinstance(words, str) else words
  plain = [word for word in words if os.path.exists(word) or "=" not in word and word[:1] != "{"]
  for word in [word for word in words if word not in plain]:
    try: models |= json.loads(word) if word[0] == "{" else dict([word.split("=", 1)])
    except ValueError as error: raise InputError(f"model={word!r} must be PATH, NAME=PATH or JSON: {error}") from error
  if models or len(plain) > 1: models |= {served_name(word): word for word in plain}
  check(not models or len(models) >= len(words) and all(models), f"model={words!r} must have different names")
  return {name: x if isinstance(x, dict) else {"model": x} for name, x in models.items()}


def local_path(model: str | pathlib.Path, config: LLMConfig = LLMConfig()) -> pathlib.Path:
  """Return the path of a model's folder or GGUF file. Download a model given by its name, unless the cache has it.
  config: the engine's, with the revision and the cache, and to estimate whether the model fits. Raises InputError if
  the model does not exist or is ambiguous, RuntimeError if the download fails."""
  match = match_name(model)
  if match is None:
    path = pathlib.Path(model).expanduser()
    check(path.exists(), f"model={str(model)!r} does not exist: pass a folder, a GGUF file, or a name ORG/NAME")
    return path
  setup_logging()
  name, suffix = match.groups()
  hub = optional("huggingface_hub", "hf", f"model={model!r}")
  importlib.import_module("huggingface_hub.file_download")   # with it the package has errors, constants and utils
  try:
    repository = Repository(hub, name, config.revision, config.download_dir)
    files = repository.choose(suffix)
    missing = [file for file in files if not (repository.folder / file).exists()]
    if missing: repository.report(files, missing, config)
    for file in missing:
      if file.endswith((".safetensors", ".gguf")): repository.download(file)
    hub.snapshot_download(name, revision=repository.commit, cache_dir=repository.cache,   # small files, and links
                          allow_patterns=[*map(glob.escape, files)])
    return repository.folder / files[0] if ENDING.search(files[0]) else repository.folder
  except (hub.errors.HTTPError, hub.errors.RevisionResolutionError, OSError) as e:
    fields = {"prefix": f"model={model!r}", "url": f"{hub.constants.ENDPOINT}/{name}", "revision": config.revision,
              "reason": str(e).partition("\n")[0]}
    texts = [text for name, text in TABLES["errors"].items() if isinstance(e, getattr(hub.errors, name))]
    if texts: raise InputError(texts[0].format(**fields)) from e
    raise RuntimeError("{prefix}: the download failed, repeat it to continue: {reason}".format(**fields)) from e


def open_checkpoint(path: pathlib.Path, quantization: str | None = None, activations: str = "auto",
                    adapter: str | None = None) -> weights.FastCheckpoint:
  """Open a folder in Hugging Face's layout or a GGUF file. quantization: LLM's option. activations: its
  activation_quantization. adapter: its merge_lora. Raises InputError for anything else."""
  is_gguf = path.suffix == ".gguf" and not path.is_dir()
  checkpoint = gguf.GGUFCheckpoint(path) if is_gguf else weights.FastCheckpoint(path)
  checkpoint.hf_config = text_config(checkpoint.hf_config)
  checkpoint.quantization = None if is_gguf and quantization == "gguf" else quantization   # any file, as in vLLM
  check(activations != "int8" or speaks_c(), "activation_quantization='int8' needs a CPU with clang: use 'auto'")
  check(activations != "fp8" or has_wgmma(), "activation_quantization='fp8' needs DEV=CUDA and Hopper: use 'auto'")
  check(activations != "fp8" or checkpoint.method in ("fp8", "compressed-tensors"),
        "activation_quantization='fp8' needs an fp8 checkpoint: use 'auto'")
  checkpoint.activations = activations
  if adapter: checkpoint.adapter = peft_files.read_adapter(adapter, "merge_lora")
  return checkpoint


class Cache:
  """The hub's cache. models: huggingface_hub's CachedRepoInfo by name."""
  def __init__(self, download_dir: str | None = None):
    hub = optional("huggingface_hub", "hf", "the cache of models")
    importlib.import_module("huggingface_hub.constants")
    folder = pathlib.Path(download_dir or hub.constants.HF_HUB_CACHE).expanduser()
    check(folder.is_dir() or not download_dir, f"download_dir={download_dir!r} is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    self.content = hub.scan_cache_dir(folder)
    self.models = {repo.repo_id: repo for repo in self.content.repos if repo.repo_type == "model"}

  def rows(self) -> Iterator[tuple[str, str, str, str]]:
    """Yield the name, size, formats of the files and last use of each model. Formats: "safetensors", and the types of
    GGUF files, as in NAME:TYPE."""
    for name, repo in sorted(self.models.items()):
      files = {file.file_name for revision in repo.revisions for file in revision.files}
      types = {re.split("[-./]", ENDING.sub("", file))[-1] for file in files if ENDING.search(file)}
      formats = ["safetensors"] * any(file.endswith(".safetensors") for file in files) + sorted(types)
      yield name, size_to_str(repo.size_on_disk), ", ".join(formats), repo.last_accessed_str

  def delete(self, name: str) -> str:
    """Delete a model, and return the freed size. Raises InputError for a name that is not in the cache."""
    close = difflib.get_close_matches(name, self.models, 1, 0.5)
    check(name in self.models, f"model={name!r} is not in the cache: "
          f"{f'did you mean {close[0]}?' if close else 'see tinyvllm list'}")
    content = dataclasses.replace(self.content, repos=frozenset([self.models[name]]))   # copies have equal hashes
    strategy = content.delete_revisions(*(revision.commit_hash for revision in self.models[name].revisions))
    strategy.execute()
    return size_to_str(strategy.expected_freed_size)


class Repository:
  """A model's repository at one commit, and its folder in the cache."""
  def __init__(self, hub: types.ModuleType, name: str, revision: str | None, download_dir: str | None):
    self.hub = hub
    self.name = name
    self.cache = pathlib.Path(download_dir or hub.constants.HF_HUB_CACHE).expanduser()
    self.commit = hub.resolve_revision(name, revision=revision, cache_dir=self.cache)   # offline: from the cache
    folder = hub.file_download.repo_folder_name(repo_id=name, repo_type="model")
    self.blobs = self.cache / folder / "blobs"     # complete files, named after their hashes
    self.locks = self.cache / ".locks" / folder
    self.folder = self.cache / folder / "snapshots" / self.commit.resolved   # links to blobs
    try: tree = hub.get_cached_repo_tree(name, revision=self.commit, cache_dir=self.cache)
    except hub.errors.CachedRepoTreeNotFoundError:   # this program has not completed a download
      try: tree = [*hub.list_repo_tree(name, recursive=True, revision=self.commit.resolved)]
      except (hub.errors.HTTPError, OSError):
        if not self.folder.exists(): raise
        tree = []   # the hub cannot be reached: only the cached files
    # In bytes, by file, without folders
    self.sizes = {x.path: x.size for x in tree if isinstance(x, hub.RepoFile)} or {
      str(path.relative_to(self.folder)): path.stat().st_size for path in self.folder.rglob("*")}

  def choose(self, suffix: str | None) -> list[str]:
    """Return the files of the model folder, or all parts of a GGUF model in order. suffix: its type or file."""
    files = [file for file in self.sizes if FILES.fullmatch(file)]
    if not suffix and any(file.endswith(".safetensors") for file in files): return files
    models: dict[str, list[str]] = {}   # by path without the ending
    for file in sorted(self.sizes):
      if ENDING.search(file) and not file.startswith("mmproj"): models.setdefault(ENDING.sub("", file), []).append(file)
    check(models, f"model='{self.name}' has no *.safetensors and no *.gguf, which tinyvllm reads: choose another one")
    pattern = re.compile(rf"(^|[-./]){re.escape(ENDING.sub('', suffix or ''))}$", re.IGNORECASE)
    matches = [model for model in models if not suffix or pattern.search(model)]
    candidates = matches or [*models]
    endings = {re.split("[-./]", model)[-1] for model in candidates}
    choices = sorted(endings if len(endings) == len(candidates) else candidates)
    check(len(matches) == 1, f"model='{self.name}{f':{suffix}' if suffix else ''}' matches {len(matches)} GGUF models: "
          f"use {self.name}:TYPE with one of {', '.join(choices)}")
    return models[matches[0]]

  def report(self, files: list[str], missing: list[str], config: LLMConfig) -> None:
    """Log the size of a download and whether the model fits in the device's memory. Raises InputError if the model is
    not supported or the disk is too small."""
    for folder in (self.blobs, self.locks): folder.mkdir(parents=True, exist_ok=True)
    num_received = sum(path.stat().st_size for path in self.blobs.glob("*.part"))
    size = max(0, sum(self.sizes[file] for file in missing) - num_received)
    free = shutil.disk_usage(self.blobs).free
    check(size <= free, f"download_dir={str(self.cache)!r} has {size_to_str(free)} of free disk space, but "
          f"{self.name} needs {size_to_str(size)}: free some space or choose another folder")
    device = fit.open_device()
    needed = sum(self.sizes[file] for file in files) / fit.GIB   # GGUF's; others are estimated
    if "config.json" in files:
      path = self.hub.hf_hub_download(self.name, "config.json", revision=self.commit, cache_dir=self.cache)
      needed = fit.estimate_fit(self.name, read_json(pathlib.Path(path)), device, config)["weights_gib"]
    available = device["free_gib"] * config.tensor_parallel_size * config.pipeline_parallel_size
    text = f"downloading {self.name}: {size_to_str(size)} in {len(missing)} files to {self.cache}; the weights use " \
      f"{needed:.2f} of {available:.2f} GiB of free memory"
    if needed < available * config.gpu_memory_utilization: logger.info(text)
    else: logger.warning(f"{text}, so that the model does not fit: choose a smaller or quantized one")

  def download(self, file: str) -> None:
    """Download a large file to the cache. huggingface_hub would begin again if an earlier process has been stopped."""
    if self.sizes[file] > self.hub.constants.MAX_HTTP_DOWNLOAD_SIZE: return   # snapshot_download has another protocol
    url = self.hub.hf_hub_url(self.name, file, revision=self.commit.resolved)
    metadata = self.hub.get_hf_file_metadata(url)
    blob = self.blobs / metadata.etag
    part = self.blobs / f"{metadata.etag}.part"
    with self.hub.utils.WeakFileLock(self.locks / f"{metadata.etag}.lock"):   # huggingface_hub uses the same one
      if blob.exists(): return
      with part.open("ab") as output:
        self.hub.file_download.http_get(url, output, resume_size=output.tell(), expected_size=metadata.size,
                                        headers=self.hub.utils.build_hf_headers(), displayed_filename=file)
      part.rename(blob)
