"""Events of an engine: one stream for all that listen, such as metrics, traces and logs.

A part of the engine emits an event where something has happened, on whatever thread that is. A listener never blocks.
A new measurement is an event here, a line that emits it, and a case of the listener that counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from services.engine.kv_cache.cache_journal import CacheChange
from services.engine.kv_cache.keys import Tier
from services.engine.observability.status import Counts
from services.engine.requests.outputs import Finished

AdapterPhase: TypeAlias = Literal["download", "bind", "upload", "flip"]
"""Phase of a swap: files from the store, their tensors checked and read, into a slot, and a name moved between two
steps."""
LoadFailure: TypeAlias = Literal["rejected", "missing", "unavailable", "no_slot", "error"]
"""Reason why a version could not be loaded."""
CopyFailure: TypeAlias = Literal["damaged", "missing", "unreadable", "full", "slow", "away", "late"]
"""Reason why a copy could not be read or written: its bytes are not those that were written; it is gone; the disk
fails, or a later release wrote it; there is no room; the store takes too long, or does not answer; a load took so long
that computing was the better way. Each is a miss for whoever asked, and nothing worse."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step has run. Emitted on the loop thread."""

    seconds: float
    """Duration with the wait for the training slice before it."""
    compute_seconds: float
    decodes: int
    prefill_tokens: int
    counts: Counts
    """Counts of the scheduler after the step."""
    waiting_for_adapters: int
    mask_seconds: float = 0.0
    """Duration of making the masks of the step; 0: it had none."""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step has failed. Emitted on the loop thread."""

    error: Exception


@dataclass(frozen=True, slots=True)
class RequestDone:
    """A user's request has ended. Emitted on the loop thread; times are on the loop's clock."""

    finished: Finished
    submitted_at: float
    now: float


@dataclass(frozen=True, slots=True)
class GrammarDone:
    """The grammar of a request was found or made. Emitted on the thread that takes requests in."""

    result: str
    """Result: "cached", "compiled", "refused" or "overloaded"."""
    seconds: float


@dataclass(frozen=True, slots=True)
class AdapterPhaseDone:
    """A phase of an adapter swap has succeeded. Emitted on the threads that load adapters."""

    phase: AdapterPhase
    seconds: float


@dataclass(frozen=True, slots=True)
class AdapterLoadFailed:
    """A version could not be loaded. Emitted on the threads that load adapters."""

    reason: LoadFailure


@dataclass(frozen=True, slots=True)
class CopyLoaded:
    """Bytes were read from a tier to the device. Emitted on any thread, as all events of tiers."""

    tier: Tier
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CopySaved:
    """Bytes were written to a tier."""

    tier: Tier
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CopyNotMade:
    """A copy could not be read or written."""

    tier: Tier
    reason: CopyFailure


@dataclass(frozen=True, slots=True)
class CopyEvicted:
    """A tier gave up bytes for others."""

    tier: Tier
    size: int


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """The device's prefix cache has changed. Emitted on the loop thread, if the scheduler keeps a journal of it."""

    changes: Sequence[CacheChange]


CopyEvent: TypeAlias = CopyLoaded | CopySaved | CopyNotMade | CopyEvicted
EngineEvent: TypeAlias = (
    StepDone | StepFailed | RequestDone | GrammarDone | AdapterPhaseDone | AdapterLoadFailed | CacheChanged | CopyEvent
)
Listener: TypeAlias = Callable[[EngineEvent], None]


class EventStream:
    """Hands each event to every listener, on the thread that emits it. Without listeners nobody measures."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def emit(self, event: EngineEvent) -> None:
        for listener in self._listeners:
            listener(event)
