"""What the adapter manager needs of the parts around it, and what it tells them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from services.engine.requests.request import AdapterPin


class Nudges(Protocol):
    """Adapter events (services/common/adapters/events.py): a hint to look now instead of at the next poll."""

    def wait(self, timeout: float) -> object:
        """Blocks until something happened to an adapter, at most ``timeout`` seconds; falsy if nothing did."""
        ...


class Loop(Protocol):
    """What the manager needs of the engine loop."""

    def call_at_boundary(self, function: Callable[[], None]) -> Future[None]:
        """Runs a function on the loop thread between two steps; the future fails if the loop has stopped."""
        ...

    def retry_adapters(self) -> None:
        """A request that waited for its adapter may try `pin` again."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The manager's part of the engine's settings."""

    num_slots: int
    poll_seconds: float
    wait_seconds: float
    """How long a request, or a job's policy, may wait for a slot."""
    turn_seconds: float = 1.0
    """How long a version takes new requests at least once it has a slot, whoever waits for one."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """One version in a slot, for status and metrics."""

    pin: AdapterPin
    requests: int


@dataclass(frozen=True, slots=True)
class AdapterSnapshot:
    attached: str
    """"name@n", empty for the base."""
    loaded: tuple[LoadedAdapter, ...]
    serving: tuple[str, ...] = ()
    """Those of ``loaded`` as clients ask for them: "name" where it is the name's current version, else "name@n"."""
    waiting: tuple[str, ...] = ()
    """What requests wait for, "name" or "name@n" as they asked for it."""
