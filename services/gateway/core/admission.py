"""Bounded admission, and the shutdown that ends it.

A place is reserved before a prompt is rendered or tokenized, and given back at the end of the request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from services.common.errors import Overloaded


class Reservation:
    """Places that one HTTP request holds. Releasing twice is harmless."""

    __slots__ = ("_admission", "_places")

    def __init__(self, admission: Admission, places: int) -> None:
        self._admission = admission
        self._places = places

    def release(self) -> None:
        """Gives the places back."""
        places, self._places = self._places, 0
        self._admission.give_back(places)


class Admission:
    """Counts completions in the gateway. Used from the event loop only.

    Args:
        limit: most places at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        """Places in use."""
        return self._in_flight

    @property
    def full(self) -> bool:
        """No place is left."""
        return self._in_flight >= self._limit

    def reserve(self, places: int) -> Reservation:
        """Takes places at once or refuses.

        Raises:
            Overloaded: the gateway has no room for so many completions now.
        """
        if self._in_flight + places > self._limit:
            raise Overloaded(
                f"{self._in_flight} completions are in flight and the limit is {self._limit}: try again shortly",
                retry_after=1.0,
            )
        self._in_flight += places
        return Reservation(self, places)

    def give_back(self, places: int) -> None:
        """Called by Reservation."""
        self._in_flight -= places


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """Events of a shutdown.

    ``stopping``: set by SIGTERM: readiness is off and batches are handed back; new requests are still answered.
    ``closing``: set when no connection is accepted any more: followers of job events are sent home.
    """

    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
