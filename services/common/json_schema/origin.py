"""Origin of a schema inside a grammar: so a refusal names the request's field, the function and the place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_KEY = "x-temper-origin"
_NEEDED = re.compile(r"^// temper: (\w+) has a text: (\{.*\})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Origin:
    """
    Args:
        field: of the request.
        function: that the schema is a parameter's of; empty: of none.
        path: of the schema within the field, as a JSON pointer.
        types: JSON types that are wanted of its values; empty: all that it allows.
    """

    field: str
    function: str = ""
    path: str = ""
    types: tuple[str, ...] = ()

    def refusal(self, why: str) -> str:
        """A refusal that names the function."""
        return f"function {self.function!r}: {why}" if self.function else why

    def _said(self) -> dict[str, Any]:
        return {"field": self.field, "function": self.function, "path": self.path, "types": list(self.types)}


def marked(schema: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    """A schema with its origin in it."""
    return {**schema, _KEY: origin._said()}


def needed(terminal: str, origin: Origin) -> str:
    """A line of a grammar, a comment: no value fulfils the schema of ``origin`` unless a terminal has a text."""
    return f"// temper: {terminal} has a text: {json.dumps(origin._said())}"


def all_needed(grammar: str) -> Iterator[tuple[str, Origin]]:
    """The terminals of a grammar that must have a text."""
    for found in _NEEDED.finditer(grammar):
        origin = origin_of({_KEY: json.loads(found[2])})[1]
        if origin is not None:
            yield found[1], origin


def origin_of(schema: Mapping[str, Any]) -> tuple[dict[str, Any], Origin | None]:
    """A schema without its origin, and its origin; None if there is none in it."""
    rest = {key: value for key, value in schema.items() if key != _KEY}
    said = schema.get(_KEY)
    if not isinstance(said, dict):
        return rest, None
    types = said.get("types")
    return rest, Origin(
        str(said.get("field")),
        str(said.get("function", "")),
        str(said.get("path", "")),
        tuple(each for each in types if isinstance(each, str)) if isinstance(types, list) else (),
    )
