"""Who sent a request."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from services.common.security.api_keys import ANONYMOUS, Scope
from services.gateway.rate_limits.limits import Limits

_NONE = Limits()


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller: the id of its key, and what it may do."""

    id: str
    scopes: frozenset[Scope]
    limits: Limits = _NONE

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a principal needs an id")


INTERNAL = "temper.internal"
"""Key of the ASGI scope of a request that the gateway makes to itself for somebody whose own request was let in
before, as a batch does. Its value has that caller's id as ``owner``, and the ``priority`` of what it asks for. Servers
build their scopes themselves: nothing that a client sends becomes a key."""
EVERYBODY = Principal(ANONYMOUS, frozenset(Scope))
"""Callers of a gateway without keys."""
NOBODY = Principal(ANONYMOUS, frozenset())
"""Callers of public routes."""


def internal_priority(request: HTTPConnection) -> int | None:
    """The priority of a request that the gateway makes to itself; None: it is a client's."""
    caller = request.scope.get(INTERNAL)
    return None if caller is None else int(caller.priority)


def principal_of(request: HTTPConnection) -> Principal:
    """The caller of a request; also `request.state.principal`."""
    found = request.state.principal
    if not isinstance(found, Principal):
        raise RuntimeError("the request did not come through the Access middleware")
    return found
