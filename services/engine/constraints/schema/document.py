"""Document: the schemas inside a schema, each with its place, and the targets of references."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from services.engine.constraints.refusal import Refused

_LARGEST_EXPONENT = 400
_LONGEST_QUOTE = 80
_DATA = frozenset({"enum", "const", "default", "examples"})


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """Schema inside a document, compared by identity.

    Args:
        number: unique number within the document.
        schema: as it was sent.
        path: place, as a JSON pointer.
        base: schema that pointers start from.
    """

    number: int
    schema: Any
    path: str
    base: Node | None = None

    def refuse(self, keyword: str, why: str) -> Refused:
        """Refusal that names a keyword of this schema."""
        return Refused(f"{self.path}: '{keyword}' {why}")


class Document:
    """Whole schema; its parts are made on demand, once each.

    Args:
        root: schema from ``parsed``.
        path: place of the root.
    """

    def __init__(self, root: Any, path: str = "#") -> None:
        self._parts: dict[tuple[int, tuple[str | int, ...]], Node] = {}
        self._derived: dict[tuple[int, str], Node] = {}
        self._count = 0
        self.root = self._node(root, path, None)
        self._named: dict[str, Node] | None = None

    def _node(self, schema: Any, path: str, base: Node | None) -> Node:
        self._count += 1
        return Node(self._count, schema, path, base)

    def part(self, node: Node, *keys: str | int) -> Node:
        """Schema inside another one."""
        found = self._parts.get((node.number, keys))
        if found is None:
            schema = node.schema
            for key in keys:
                schema = schema[key]
            # Pointers start from the nearest schema around that has an identifier.
            own = node.schema.get("$id") if isinstance(node.schema, dict) else None
            base = node if isinstance(own, str) and not own.startswith("#") else node.base or self.root
            # Definitions are at the root of what was sent, wherever the schema itself was in it.
            path = "#" if node is self.root and keys[0] in ("$defs", "definitions") else node.path
            found = self._parts[node.number, keys] = self._node(schema, path + _pointer(keys), base)
        return found

    def derived(self, node: Node, key: str, schema: Callable[[], Any]) -> Node:
        """Schema that is derived from a keyword of another one."""
        found = self._derived.get((node.number, key))
        if found is None:
            found = self._derived[node.number, key] = self._node(schema(), node.path, node.base)
        return found

    def target(self, node: Node) -> Node:
        """Target of the ``$ref`` of a schema.

        Raises:
            Refused: it leads nowhere, or out of the document.
        """
        reference = node.schema["$ref"]
        found = self._find(node, reference) if isinstance(reference, str) else None
        if found is None:
            shown = json.dumps(reference)[:_LONGEST_QUOTE]
            raise node.refuse("$ref", f"{shown} leads to nothing within this schema: put it under $defs")
        return found

    def _find(self, node: Node, reference: str) -> Node | None:
        own = node.schema.get("$id")
        base = node if isinstance(own, str) and node is not self.root else node.base or self.root
        if self._named is None:
            self._named = self._all_named()
        address, fragment = urldefrag(urljoin(self._address(base), reference))
        start = (
            base
            if address == self._address(base)
            else self._named.get(address) or self._named.get(urldefrag(reference)[0])
        )
        if start is None:
            return None
        if not fragment:
            return start
        if not fragment.startswith("/"):
            return self._named.get(f"{address}#{fragment}") or self._named.get(f"#{fragment}")
        return self._walk(start, unquote(fragment))

    def _address(self, node: Node) -> str:
        schema = node.schema
        found = schema.get("$id") if isinstance(schema, dict) else None
        return urldefrag(found)[0] if isinstance(found, str) else ""

    def _walk(self, start: Node, pointer: str) -> Node | None:
        keys: list[str | int] = []
        value = start.schema
        for piece in pointer.split("/")[1:]:
            key: str | int = piece.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and str(key).isascii() and str(key).isdigit() and int(key) < len(value):
                key = int(key)
            elif not (isinstance(value, dict) and key in value):
                return None
            value = value[key]
            keys.append(key)
        return self.part(start, *keys) if keys else start

    def _all_named(self) -> dict[str, Node]:
        """Schemas that have an identifier or an anchor, by name."""
        named: dict[str, Node] = {}
        waiting: list[tuple[Any, tuple[str | int, ...], str]] = [(self.root.schema, (), "")]
        while waiting:
            value, keys, address = waiting.pop()
            if isinstance(value, list):
                waiting += [(each, (*keys, place), address) for place, each in enumerate(value)]
            if not isinstance(value, dict):
                continue
            place = self.part(self.root, *keys) if keys else self.root
            if isinstance(own := value.get("$id"), str):
                address = urldefrag(urljoin(address, own))[0]
                named.setdefault(address, place)
                named.setdefault(own, place)
            if isinstance(anchor := value.get("$anchor"), str):
                named.setdefault(f"{address}#{anchor}", place)
            waiting += [(each, (*keys, key), address) for key, each in value.items() if key not in _DATA]
        return named


def parsed(text: str) -> Any:
    """Parses a schema; numbers with a point or an exponent are exact.

    Raises:
        Refused: it is not JSON, or has a number of absurd size.
    """
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_decimal)
    except RecursionError:
        raise Refused("the schema is nested too deeply") from None
    except ValueError as error:
        raise Refused(f"the schema is not JSON: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _decimal(text: str) -> Decimal:
    value = Decimal(text)
    if value and abs(value.adjusted()) > _LARGEST_EXPONENT:
        raise ValueError(f"the number {text[:40]} is beyond 1e{_LARGEST_EXPONENT}")
    return value


def _pointer(keys: tuple[str | int, ...]) -> str:
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)
