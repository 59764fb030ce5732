"""`tinyvllm pull`, `list` and `rm`: models in the hub's cache."""
from tinyvllm_extra.formats import hub
from tinyvllm_extra.options import LLMConfig


def main(args: dict) -> None:
  """Run the command. Raises InputError for a model that does not exist."""
  folder = args.get("download_dir")
  if args["command"] == "pull": return print(hub.local_path(args["names"][0], LLMConfig(download_dir=folder)))
  cache = hub.Cache(folder)
  for name in args.get("names", ()): print(f"deleted {name}: {cache.delete(name)} freed")
  rows = [("NAME", "SIZE", "FORMAT", "LAST USE"), *cache.rows()] if args["command"] == "list" else []
  for name, size, form, last in rows: print(f"{name:48}  {size:>10}  {form:20}  {last}")
