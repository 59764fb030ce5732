"""Add LangChain's and pydantic's schemas to those of record_schemas.mjs, and write tests/data/generated_schemas.json.

python tests/outside/record_schemas.py schemas.json (pip install langchain-core==1.8.3 pydantic==2.14.4)"""
import datetime
import decimal
import json
import sys
from pathlib import Path
from typing import Literal, TypedDict

import pydantic
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool


class Item(pydantic.BaseModel):
  """An item of an order."""
  name: str = pydantic.Field(min_length=1, max_length=20, examples=["pen"])
  price: decimal.Decimal
  kind: Literal["a", "b"] = "a"


class Order(pydantic.BaseModel):
  id: int = pydantic.Field(gt=0)
  items: list[Item] = pydantic.Field(max_length=3)
  by_kind: dict[Literal["a", "b"], int] = {}
  day: datetime.date | None = None


class Search(TypedDict):
  query: str
  limit: int | None


@tool
def search(query: str, limit: int = 10, kinds: list[Literal["news", "web"]] | None = None) -> str:
  """Search. query: what to search."""
  return ""


schemas = json.loads(Path(sys.argv[1]).read_text())
schemas["pydantic: model"] = Order.model_json_schema()
schemas["pydantic: union of types"] = pydantic.TypeAdapter(Item | list[int]).json_schema()
for name, function in (("model", Order), ("TypedDict", Search), ("tool", search)):
  for strict in (False, True):
    parameters = convert_to_openai_tool(function, strict=strict)["function"]["parameters"]
    schemas[f"LangChain: {name}{', strict' if strict else ''}"] = parameters
target = Path(__file__).parents[1] / "data" / "generated_schemas.json"
target.write_text("{\n" + ",\n".join(f"{json.dumps(x)}: {json.dumps(y)}" for x, y in schemas.items()) + "\n}\n")
