"""What the API's description says about keys."""

from __future__ import annotations

from typing import Any

from services.gateway.auth.route_permissions import PermissionTable

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
