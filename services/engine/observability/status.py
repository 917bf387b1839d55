"""State of the engine's parts as gauges and health checks read it: plain values, made anew after each step."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.requests.adapter import AdapterPin


@dataclass(frozen=True, slots=True)
class Counts:
    """What is in use now. ``used`` is by live sequences, ``cached`` by the prefix cache alone."""

    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    slots_used: int
    slots_cached: int
    slots_total: int
    preemptions: int
    """Since the start."""
    num_draft_tokens: int = 0
    """Drafted tokens that were checked since the start."""
    num_accepted_tokens: int = 0
    evicted_bytes: int = 0
    """Given up by the prefix cache since the start."""


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


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """The loop as seen from outside after its latest step."""

    counts: Counts
    waiting_for_adapters: int
    healthy: bool
    """False after several failed steps in a row, until one succeeds."""
    accepting: bool
    """False while draining and after stop()."""
    steps: int
    failed_steps: int
    background: int = 0
    """Live background requests, which the counts include."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier now."""

    entries: int
    size: int
    """Bytes."""
    limit: int
    """Bytes."""
