"""JSON's integers in strict models: 16.0 is one, as JSON Schema has it (2020-12, Core, 6.3), and some clients write it.

pydantic takes integral floats only together with numeric strings and booleans, which are mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


def _is_int(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "int"


def _integer(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def _integers(values: Any) -> Any:
    if not isinstance(values, list) or float not in set(map(type, values)):
        return values
    return [_integer(value) for value in values]


_OURS: tuple[Callable[[Any], Any], ...] = (_integer, _integers)


def _taking_floats(schema: Any, of: Any) -> Any:
    """Returns the schema of model ``of`` with integers that take floats. Models in it that have theirs stay."""
    if isinstance(schema, list | tuple):
        return type(schema)(_taking_floats(one, of) for one in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if kind == "int":
        return core_schema.no_info_before_validator_function(_integer, schema)
    if kind in ("list", "tuple") and _is_int(schema.get("items_schema")):
        return core_schema.no_info_before_validator_function(_integers, schema)  # a call a list, not one a number
    if kind == "function-before" and schema["function"]["function"] in _OURS:
        return schema
    if kind == "model" and schema["cls"] is not of and issubclass(schema["cls"], JsonIntegers):
        return schema
    return {key: value if key == "metadata" else _taking_floats(value, of) for key, value in schema.items()}


class JsonIntegers(BaseModel):
    """A base of models whose fields take integral floats as integers, also in lists and dictionaries."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = handler(source)
        if schema is not cls.__dict__.get("__pydantic_core_schema__"):  # which a model that is in another one has
            schema = _taking_floats(schema, source)
        return schema
