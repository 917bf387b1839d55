"""Permissions: what each route asks of its callers, in the application and in its OpenAPI document.

A route says it where it is declared; the table is computed from all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.routing import compile_path

from services.common.security.api_keys import Scope

INFERENCE = frozenset({Scope.INFERENCE})
TRAIN = frozenset({Scope.TRAIN})
ADMIN = frozenset({Scope.ADMIN})
TRAIN_OR_ADMIN = TRAIN | ADMIN
ATTACH = frozenset({Scope.ATTACH, Scope.ADMIN})
ANY_KEY = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Permission:
    """Requirements that a route has of its callers.

    ``scopes``: the caller's API key needs one of these; empty: the route is open to everybody. ``audited``: calls are
    written to the audit log. ``generates``: refused before its body is read while the gateway is full. ``upload``:
    takes a large multipart body. ``streams``: takes a larger body, which is passed on and not kept. ``idempotent``:
    understands Idempotency-Key. ``route``: method and path, filled in where the route is declared.
    """

    scopes: frozenset[Scope]
    audited: bool = False
    generates: bool = False
    upload: bool = False
    streams: bool = False
    idempotent: bool = False
    route: str = ""

    @property
    def public(self) -> bool:
        return not self.scopes

    @property
    def path(self) -> str:
        """Template of the path, without the method."""
        return self.route.partition(" ")[2]

    def of(self, method: str, path: str) -> Permission:
        """The permission of one route."""
        return replace(self, route=f"{method} {path}")


PUBLIC = Permission(frozenset())
PERMISSION = "temper.permission"
"""Key of the ASGI scope: the Permission of the request's route."""
METRICS = "GET /metrics"
UNKNOWN = Permission(ANY_KEY, route="unknown")
"""The permission of a path without route: any valid key."""


class PermissionTable:
    """The permissions of an application's routes, searched in the order in which its router would.

    Args:
        permissions: of the routes, in the router's order.
        metrics_public: /metrics needs no key.
    """

    def __init__(self, permissions: Iterable[Permission], *, metrics_public: bool = True) -> None:
        self.permissions = tuple(
            replace(permission, scopes=ANY_KEY) if permission.route == METRICS and not metrics_public else permission
            for permission in permissions
        )
        self._exact: dict[str, Permission] = {}
        self._patterns: list[tuple[str, re.Pattern[str], Permission]] = []
        for permission in self.permissions:
            method, path = permission.route.split(" ")
            if "{" in path:
                self._patterns.append((method, compile_path(path)[0], permission))
            else:
                self._exact[permission.route] = permission

    def find(self, method: str, path: str) -> tuple[Permission, Mapping[str, str]]:
        """The permission of the route that a request goes to, and the values of the path's parameters."""
        method = "GET" if method == "HEAD" else method
        if (permission := self._exact.get(f"{method} {path}")) is not None:
            return permission, {}
        for wanted, pattern, permission in self._patterns:
            if wanted == method and (match := pattern.match(path)) is not None:
                return permission, match.groupdict()
        return UNKNOWN, {}


_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send it."},
    "x-api-key": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The same, as Anthropic's send it.",
    },
}
_KEY: list[dict[str, list[str]]] = [{name: []} for name in _SCHEMES]


def add_keys(description: dict[str, Any], permissions: PermissionTable, *, needed: bool) -> None:
    """Adds to the description of the API which operations need a key, and of which scope.

    Args:
        needed: this gateway has keys; without, they are described as optional.
    """
    description.setdefault("components", {})["securitySchemes"] = _SCHEMES
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            permission, _ = permissions.find(method.upper(), path)
            if permission.public:
                operation["security"] = []
                continue
            operation["security"] = _KEY if needed else [{}, *_KEY]
            scopes = " or ".join(f"`{scope}`" for scope in sorted(permission.scopes))
            text = operation.get("description", "")
            operation["description"] = f"{text}\n\nScope of the API key: {scopes}.".strip()
