"""What the API's description says about keys."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from services.gateway.auth.route_permissions import RuleBook

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


def describe_keys(app: FastAPI, rules: RuleBook, *, needed: bool) -> None:
    """Adds to the description which operations need a key, and of which scope.

    Args:
        needed: this gateway has keys; without, they are described as optional.
    """
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        description = plain()
        description.setdefault("components", {})["securitySchemes"] = _SCHEMES
        for path, operations in description["paths"].items():
            for method, operation in operations.items():
                rule, _ = rules.find(method.upper(), path)
                if rule.public:
                    operation["security"] = []
                    continue
                operation["security"] = _KEY if needed else [{}, *_KEY]
                scopes = " or ".join(f"`{scope}`" for scope in sorted(rule.scopes))
                text = operation.get("description", "")
                operation["description"] = f"{text}\n\nScope of the API key: {scopes}.".strip()
        app.openapi_schema = description
        return description

    app.openapi = openapi  # type: ignore[method-assign]
