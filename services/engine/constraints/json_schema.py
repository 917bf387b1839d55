"""A JSON schema as llguidance is to compile it: what it reads more loosely than the specification is made stricter, or
refused. So whatever is generated is valid, though not all that is valid is generated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from services.engine.constraints.refusal import Refused

Schema = dict[str, Any]

_OPTIONS = {
    # At most one of these between two tokens of JSON: with any number, a model can go on with blanks for ever.
    "whitespace_pattern": r"\n[ \t]{0,64}| {1,2}",
    # What is not enforced is refused.
    "lenient": False,
    "coerce_one_of": False,
}
_ONE = (
    "additionalProperties",
    "items",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_EXACT = 2**53
"""Integers up to here are exact in llguidance, which computes with doubles."""

_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[a-zA-Z0-9]{1,31}(?:-[a-zA-Z0-9]{1,15})?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}\.[a-zA-Z]{{2,15}}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_N = "[0-9]{1,6}"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_HOURS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_N}W|{_DAYS}(?:{_HOURS})?|{_HOURS})",
    "hostname": _HOST,
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOST}",
}
"""Stricter than llguidance's own: these know leap years, no 60th second, the lengths of names and of numbers (RFC 3339,
RFC 5321, RFC 1123). Each begins and ends where the text does."""
_ESCAPE = re.compile(r"\\.|\[|\]", re.DOTALL)
_BLANK = r" \t\n\r\f\v"


def prepared(text: str) -> str:
    """The schema in one line, with our options in place of any that it brings.

    Raises:
        Refused: it is no JSON, or asks for what would not be enforced.
    """
    try:
        schema = json.loads(text, parse_constant=_no_constant)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise Refused("the schema must be an object: false allows nothing")
        for part in list(_parts(schema)):
            _check(part)
            _tighten(part)
        return json.dumps({**schema, "x-guidance": _OPTIONS})
    except RecursionError:
        raise Refused("the schema is nested too deeply") from None
    except ValueError as error:
        raise Refused(f"the schema is not JSON: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _parts(root: Schema) -> Iterator[Schema]:
    """Every schema within a schema, itself first; what is only data (const, enum) is none."""
    waiting: list[Any] = [root]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        waiting.extend(part[key] for key in _ONE if key in part)
        waiting.extend(each for key in _LISTS if isinstance(part.get(key), list) for each in part[key])
        waiting.extend(each for key in _MAPS if isinstance(part.get(key), dict) for each in part[key].values())


def _check(part: Schema) -> None:
    least = part.get("minProperties", 0)
    if isinstance(least, int | float) and least > 1 and part.get("additionalProperties") is not False:
        # A name may come twice among those that are not listed, and counts once.
        raise Refused("minProperties above 1 needs additionalProperties: false")
    values = [part.get("const"), *(part["enum"] if isinstance(part.get("enum"), list) else ())]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(value)
        elif isinstance(value, int) and abs(value) > _EXACT:
            raise Refused(f"{value} is not exact as a double; give it as a string")


def _tighten(part: Schema) -> None:
    if isinstance(part.get("pattern"), str):
        part["pattern"] = _ascii_blanks(part["pattern"])
    names = part.get("patternProperties")
    if isinstance(names, dict):
        part["patternProperties"] = {_ascii_blanks(name): value for name, value in names.items()}
    shape = part.get("format")
    if not isinstance(shape, str) or shape not in _FORMATS:
        return
    pattern = f"^(?:{_FORMATS[shape]})$"
    if "pattern" not in part:
        del part["format"]
        part["pattern"] = pattern
    elif isinstance(part.get("allOf", []), list):
        del part["format"]
        part["allOf"] = [*part.get("allOf", []), {"pattern": pattern}]


def _ascii_blanks(pattern: str) -> str:
    r"""Blanks of ASCII for ``\s``, which is more in Rust than in ECMA-262, whose expressions patterns are."""
    inside = False

    def replace(found: re.Match[str]) -> str:
        nonlocal inside
        text = found.group(0)
        if text in "[]":
            inside = text == "["
            return text
        if text != r"\s":
            return text
        return _BLANK if inside else f"[{_BLANK}]"

    return _ESCAPE.sub(replace, pattern)
