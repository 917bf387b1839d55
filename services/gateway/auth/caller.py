"""The caller on whose behalf a task works: its principal, its deadline and tokens, and what it may see or change.

Whatever a request calls finds its caller here, without a parameter in between."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from services.common.errors import DeadlineExceeded, Forbidden
from services.common.pb import engine_pb2
from services.common.security.api_keys import ANONYMOUS, Scope
from services.gateway.rate_limits.limiter import Grant
from services.gateway.rate_limits.limits import Limits

_NONE = Limits()


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller: the id of its key, and what it may do."""

    id: str
    scopes: frozenset[Scope]
    limits: Limits = _NONE
    log_share: float | None = None
    """Share of its requests that the request log has; None: the gateway's default."""

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a principal needs an id")


ON_BEHALF_OF = "temper.internal"
"""Key of the ASGI scope of a request that the gateway makes to itself for somebody whose own request was let in
before, as a batch does. Its value has that caller's id as ``owner``, and the ``priority`` of what it asks for. Servers
build their scopes themselves: nothing that a client sends becomes a key."""
UNRESTRICTED = Principal(ANONYMOUS, frozenset(Scope))
"""Callers of a gateway without keys."""
UNAUTHENTICATED = Principal(ANONYMOUS, frozenset())
"""Callers of public routes."""


def internal_priority(request: HTTPConnection) -> int | None:
    """The priority of a request that the gateway makes to itself; None: it is a client's."""
    caller = request.scope.get(ON_BEHALF_OF)
    return None if caller is None else int(caller.priority)


def principal_of(request: HTTPConnection) -> Principal:
    """The caller of a request; also `request.state.principal`."""
    found = request.state.principal
    if not isinstance(found, Principal):
        raise RuntimeError("the request did not come through the Access middleware")
    return found


_CURRENT: ContextVar[Caller | None] = ContextVar("temper_caller", default=None)


@dataclass(slots=True)
class Caller:
    """A request that was let in. ``deadline``: on time.monotonic(), if the client set one; it ends with the request."""

    principal: Principal
    grant: Grant
    deadline: float | None = None


def current_caller() -> Caller | None:
    """Caller of the HTTP request that this task belongs to, also after its end; None for the gateway's own work."""
    return _CURRENT.get()


@contextmanager
def working_for(caller: Caller) -> Iterator[None]:
    """Sets the caller in the block and in the tasks that it starts."""
    token = _CURRENT.set(caller)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def seconds_left(limit: float) -> float:
    """Seconds that a completion may take which starts now.

    Args:
        limit: the most that any may.

    Raises:
        DeadlineExceeded: nothing of the client's time is left.
    """
    caller = _CURRENT.get()
    if caller is None or caller.deadline is None:
        return limit
    left = caller.deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the request's time (x-request-timeout-seconds) was over before it reached an engine")
    return min(limit, left)


class TokenAccount:
    """Account of the tokens a minute that the engine requests of one request group take from their caller's limit.

    Args:
        requests: choices of the same prompt stand side by side, and the prompt is counted once.
    """

    def __init__(self, requests: Sequence[engine_pb2.GenerateRequest]) -> None:
        caller = _CURRENT.get()
        limited = caller is not None and caller.principal.limits.tokens_per_minute > 0
        self._grant = caller.grant if caller is not None and limited else None
        self._reserved = 0
        self._used = 0
        self._prompts: list[int] = []
        if self._grant is None:
            return
        before: Sequence[int] | None = None
        for request in requests:
            prompt = request.prompt_token_ids
            self._prompts.append(0 if prompt == before else len(prompt))
            self._reserved += self._prompts[-1] + request.sampling.max_tokens
            before = prompt

    async def reserve(self) -> None:
        """Takes the most that the requests can use.

        Raises:
            InvalidRequest: more than the caller gets in a minute.
            RateLimited: not now.
        """
        if self._grant is not None:
            grant, self._grant = self._grant, None
            await grant.take(self._reserved)
            self._grant = grant

    def update(self, index: int, tokens: int, *, first: bool) -> None:
        """An engine answered with so many tokens."""
        if self._grant is not None:
            self._used += tokens + (self._prompts[index] if first else 0)

    def settle(self) -> None:
        """Gives back what was not used. Twice is harmless."""
        if self._grant is not None:
            grant, self._grant = self._grant, None
            grant.correct(self._used - self._reserved)


def owner() -> str:
    """The id of the API key that this task works for; empty where there are no keys."""
    caller = current_caller()
    return "" if caller is None or caller.principal.id == ANONYMOUS else caller.principal.id


def sees(key_id: str | None) -> bool:
    """True if the caller may see what an API key has made: a caller sees its own, and an administrator everybody's."""
    found = owner()
    return not found or found == key_id or _may(Scope.ADMIN)


def check_name_owner(kind: str, name: str, key_id: str) -> None:
    """Raises Forbidden unless the caller may make and remove versions of a name that belongs to an API key.

    Args:
        kind: what it is the name of.
    """
    if not sees(key_id):
        raise Forbidden(
            f"{kind} {name} belongs to another API key, which alone (and a key of the scope admin) makes and removes "
            "versions of it: choose another name",
            param="name",
        )


def may_attach() -> bool:
    """True if the caller may change which version answers under the base model's name."""
    return _may(Scope.ATTACH, Scope.ADMIN)


def check_attach(param: str) -> None:
    """Raises Forbidden unless the caller may attach a version."""
    if not may_attach():
        raise Forbidden(
            f"the API key {owner()} lacks the scope attach or admin, which changing what the base model's name answers "
            f"needs: leave {param} out or false, and call the version by its name",
            param=param,
        )


def _may(*scopes: Scope) -> bool:
    caller = current_caller()
    return caller is None or not caller.principal.scopes.isdisjoint(scopes)
