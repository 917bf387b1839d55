"""What OpenAPI says of answers that a handler writes itself, also as a stream of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

Responses = dict[int | str, dict[str, Any]]
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def answers_with(whole: type[BaseModel], *, stream: type[BaseModel], done: bool = False) -> Responses:
    """`responses` of a route that answers with JSON, or with events whose data is JSON.

    Args:
        stream: the data of an event.
        done: the last event is `[DONE]`, which is no JSON.
    """
    return {200: {"model": whole, "content": {"text/event-stream": {"schema": _event(stream, done=done)}}}}


def whole_bounds(value: Any) -> Any:
    """A description whose bounds that are whole numbers are integers: FastAPI writes all as floating-point numbers,
    and what is next to 2**63 is not told from it as one of those."""
    if isinstance(value, list):
        return [whole_bounds(member) for member in value]
    if not isinstance(value, dict):
        return value
    return {
        key: int(member)
        if key in _BOUNDS and isinstance(member, float) and member.is_integer()
        else whole_bounds(member)
        for key, member in value.items()
    }


def _event(data: type[BaseModel], *, done: bool) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": _inlined(data.model_json_schema()),
        }
    ]
    if done:
        kinds.insert(0, {"const": "[DONE]"})
    properties = {"event": {"type": "string"}, "id": {"type": "string"}, "data": {"anyOf": kinds}}
    return {"type": "object", "properties": properties, "required": ["data"]}


def _inlined(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without references: FastAPI collects definitions of JSON bodies only."""
    definitions = schema.get("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return resolve(definitions[value["$ref"].rpartition("/")[2]])
            return {key: resolve(member) for key, member in value.items() if key != "$defs"}
        return [resolve(member) for member in value] if isinstance(value, list) else value

    inlined: dict[str, Any] = resolve(dict(schema))
    return inlined
