"""Who sends a request."""

from __future__ import annotations

from starlette.requests import Request


def owner_of(request: Request) -> str:
    """The id of the API key that a request came with; empty where there are no keys."""
    principal = getattr(request.state, "principal", None)
    return "" if principal is None else str(principal.id)
