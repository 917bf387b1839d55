"""Rules between the fields of a model, as JSON Schema says them: for the description, beside the validator that holds
requests to them and has the better messages.

null counts as not given, as everywhere in the API. What a rule says has nothing to do with a field's own type.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, GetJsonSchemaHandler, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

Rule = Mapping[str, Any]
Rules = tuple[Rule, ...]

NULL: Rule = {"type": "null"}
SOME: Rule = {"type": "array", "minItems": 1}
"""A list with something in it."""
NONE: Rule = {"anyOf": [NULL, {"type": "array", "maxItems": 0}]}
"""No list, or an empty one."""
NOT_NULL: Rule = {"not": NULL}


def has(**fields: Rule | bool | float | str) -> Rule:
    """The object has these fields, each with a value of its schema or equal to the constant."""
    return {"type": "object", **if_any(**fields), "required": list(fields)}


def if_any(**fields: Rule | bool | float | str) -> Rule:
    """Rule for these fields if the object has them: for a value that is the default or goes with it."""
    return {
        "properties": {name: rule if isinstance(rule, Mapping) else {"const": rule} for name, rule in fields.items()}
    }


def given(*fields: str) -> Rule:
    """The object has them, and not as null."""
    return has(**dict.fromkeys(fields, NOT_NULL))


def left_out(*fields: str) -> Rule:
    """The object does not have them, except as null."""
    return if_any(**dict.fromkeys(fields, NULL))


def either(*rules: Rule) -> Rule:
    """At least one of the rules holds."""
    return {"anyOf": list(rules)}


def both(*rules: Rule) -> Rule:
    """All of the rules hold."""
    return {"allOf": list(rules)}


def where(condition: Rule, rule: Rule) -> Rule:
    """Rule that holds where the condition holds."""
    return never(both(condition, never(rule)))


def never(rule: Rule) -> Rule:
    """The rule does not hold."""
    return {"not": rule}


def exactly_one(*fields: str) -> Rule:
    """One of the fields is given."""
    return either(*(both(given(field), left_out(*_others(field, fields))) for field in fields))


def at_least_one(*fields: str) -> Rule:
    """One of the fields is given, or several."""
    return either(*map(given, fields))


def at_most_one(*fields: str) -> Rule:
    """One of the fields is given, or none."""
    return never(either(*(given(*pair) for pair in itertools.combinations(fields, 2))))


def only_with(field: str, rule: Rule) -> Rule:
    """The field is given only where the rule holds."""
    return where(given(field), rule)


def true_only_with(field: str, rule: Rule) -> Rule:
    """The field is true only where the rule holds."""
    return where(has(**{field: True}), rule)


def only(*values: Any) -> WithJsonSchema:
    """Annotates a field that takes these values alone, where its validator has a better message than a Literal."""
    return WithJsonSchema({"enum": list(values)})


def items(rule: Rule) -> Rule:
    """Every entry of a list is so."""
    return {"items": rule}


def contains(rule: Rule) -> Rule:
    """A list of which an entry is so."""
    return {"type": "array", "contains": rule}


def _others(field: str, fields: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(other for other in fields if other != field)


class Ruled(BaseModel):
    """A base of models whose description has rules."""

    json_rules: ClassVar[Rules] = ()
    """The model's own, in the names of JSON; those of its bases hold as well, as their validators do."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        described = handler(core_schema)
        schema = handler.resolve_ref_schema(described)
        rules = [rule for base in reversed(cls.__mro__) for rule in base.__dict__.get("json_rules", ())]
        if barred := [rule["not"] for rule in rules if "not" in rule]:
            # As one: who makes values from a schema would take each for another split of all that it allows.
            schema["not"] = either(*barred)
        if others := [rule for rule in rules if "not" not in rule]:
            schema["allOf"] = others
        return described
