"""The reference of the HTTP API, from the gateway's own OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from docs_tools.paths import DOCS
from services.gateway.server.app import create_app
from services.gateway.settings import GatewaySettings

TARGET = DOCS / "reference" / "http.md"
_HEADER = """# HTTP API

<!-- Written by `python -m docs_tools.generate` from the gateway's OpenAPI document; change the routes, not this. -->

Every route with its parameters and the fields of its body. A running gateway has the whole document under
`/openapi.json` and a page to try it under `/docs`. The guide [HTTP API](../guides/http-api.md) says what holds for all
routes: keys, errors, limits, idempotency. `*` marks a field that is needed.

"""
_METHODS = ("get", "post", "put", "patch", "delete")


@cache
def document() -> Mapping[str, Any]:
    """The OpenAPI document of a gateway without settings."""
    return create_app(GatewaySettings()).openapi()


def openapi_json() -> str:
    """The document as a file."""
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


def render() -> str:
    """The whole page."""
    routes = list(_routes())
    table = "| route | |\n|---|---|\n" + "".join(
        f"| [`{name}`](#{_anchor(name)}) | {_cell(_summary(operation))} |\n" for name, operation in routes
    )
    return _HEADER + table + "".join(_section(name, operation) for name, operation in routes)


def _routes() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path, operations in sorted(document()["paths"].items()):
        for method in _METHODS:
            if method in operations:
                yield f"{method.upper()} {path}", operations[method]


def _section(name: str, operation: Mapping[str, Any]) -> str:
    parts = [f"\n## {name}\n\n{' '.join(str(operation.get('description') or _summary(operation)).split())}\n"]
    rows = [
        (one["name"], f"{one['in']}, {_type(one.get('schema', {}))}", one.get("required", False), one)
        for one in operation.get("parameters", [])
    ]
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = _resolved(content.get("schema", {}))
        needed = schema.get("required", [])
        if not schema.get("properties"):
            parts.append(f"\nBody: {media}, {_type(content.get('schema', {}))}.\n")
        rows += [(key, _type(value), key in needed, value) for key, value in schema.get("properties", {}).items()]
    if rows:
        parts.append("\n| field | type | |\n|---|---|---|\n")
        parts += [
            f"| `{key}`{' *' if needed else ''} | {_cell(kind)} | {_cell(_description(one))} |\n"
            for key, kind, needed, one in rows
        ]
    return "".join(parts)


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def _type(schema: Mapping[str, Any]) -> str:
    """A type in a few words: what a reader needs before the document itself."""
    if "$ref" in schema:
        return _type(_resolved(schema)) if "type" in _resolved(schema) or "enum" in _resolved(schema) else "object"
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return ", ".join(json.dumps(value) for value in schema["enum"])
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[word]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _description(schema: Mapping[str, Any]) -> str:
    text = schema.get("description") or schema.get("schema", {}).get("description") or ""
    default = schema.get("default", schema.get("schema", {}).get("default"))
    told = "" if default is None or isinstance(default, dict | list) else f" Default {json.dumps(default)}."
    return f"{text}{told}".strip()


def _summary(operation: Mapping[str, Any]) -> str:
    text = str(operation.get("description") or operation.get("summary", ""))
    return re.split(r"(?<=[.]) (?=[A-Z])", " ".join(text.split()))[0]


def _anchor(name: str) -> str:
    kept = "".join(letter for letter in name.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
