"""Lifecycle of a gateway: the two moments of its end that running work waits for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """Events of a shutdown.

    ``stopping``: set by SIGTERM: readiness is off and batches are handed back; new requests are still answered.
    ``closing``: set when no connection is accepted any more: followers of job events are sent home.
    """

    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
