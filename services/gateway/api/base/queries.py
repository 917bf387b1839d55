"""Query parameters: those that a route does not have are refused by name, as the fields of bodies are.

A filter that is left out because its name is misspelt would widen what a DELETE removes, or whom a POST concerns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from fastapi import Request, params
from fastapi.dependencies.utils import get_flat_params
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from services.common.errors import InvalidRequest
from services.common.validation.errors import suggestion

_OF_CLIENTS = frozenset({"api-version", "beta", "client_version"})
"""Sent with every request by clients for Azure, by Anthropic's and by Codex. They choose nothing here."""
_MOST_PAIRS = 16
_PAIR = re.compile(r"metadata\[(.{1,64})\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class QueryNames:
    """Names of the query parameters of one route.

    Args:
        once: those that are given once at most.
        lists: those that may be repeated.
        objects: those that are given as pairs, NAME[KEY]=VALUE, which the handler reads itself.
    """

    once: frozenset[str]
    lists: frozenset[str]
    objects: frozenset[str]

    @classmethod
    def of(cls, route: APIRoute) -> QueryNames:
        """The names that a route declares."""
        fields = [field for field in get_flat_params(route.dependant) if isinstance(field.field_info, params.Query)]
        lists = {field.alias for field in fields if _is_list(field.field_info.annotation)}
        more = (route.openapi_extra or {}).get("parameters", ())
        return cls(
            once=frozenset(field.alias for field in fields) - lists,
            lists=frozenset(lists),
            objects=frozenset(one["name"] for one in more if one["in"] == "query"),
        )

    def check(self, request: Request) -> None:
        """Raises RequestValidationError: the request has a parameter that is unknown, or one twice."""
        for name, times in Counter(name for name, _ in request.query_params.multi_items()).items():
            if name in self.lists or name in _OF_CLIENTS or name.partition("[")[0] in self.objects:
                continue
            if name not in self.once:
                raise _refusal(name, self._unknown(request, name), "unknown_parameter")
            if times > 1:
                raise _refusal(name, f"the query parameter {name!r} is given {times} times: send it once")

    def _unknown(self, request: Request, name: str) -> str:
        known = sorted({*self.once, *self.lists, *self.objects})
        place = f"{request.method} {request.scope['route'].path}"
        if not known:
            return f"Unknown query parameter: {name[:80]!r}. {place} has none: remove it."
        meant = suggestion(name, known) or "."
        return f"Unknown query parameter: {name[:80]!r}{meant} {place} has {', '.join(known)}."


def _is_list(annotation: Any) -> bool:
    return any(get_origin(one) is list for one in (annotation, *get_args(annotation)))


def _refusal(name: str, message: str, code: str = InvalidRequest.code) -> RequestValidationError:
    error = {"type": "unsupported", "loc": ("query", name[:80]), "msg": message, "ctx": {"code": code}}
    return RequestValidationError([error])


def metadata_filter(what: str) -> dict[str, Any]:
    """`openapi_extra` of a route that lists ``what`` and reads ``metadata_pairs``."""
    schema: Mapping[str, Any] = {
        "type": "object",
        "propertyNames": {"minLength": 1, "maxLength": 64},
        "additionalProperties": {"type": "string"},
        "maxProperties": _MOST_PAIRS,
    }
    parameter = {
        "in": "query",
        "name": "metadata",
        "required": False,
        "style": "deepObject",
        "explode": True,
        "schema": schema,
        "description": f"Only {what} whose metadata have these pairs: metadata[key]=value.",
    }
    return {"parameters": [parameter]}


def metadata_pairs(request: Request) -> dict[str, str]:
    """Metadata that a query asks for. Raises InvalidRequest."""
    pairs: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name != "metadata" and not name.startswith("metadata["):
            continue
        named = _PAIR.fullmatch(name)
        if named is None or named[1] in pairs or len(pairs) == _MOST_PAIRS:
            raise InvalidRequest(
                f"metadata must be given as up to {_MOST_PAIRS} pairs, metadata[key]=value, each key once",
                param="metadata",
            )
        pairs[named[1]] = value
    return pairs
