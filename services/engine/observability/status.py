"""Status of the engine's parts for gauges and health checks: plain values, made after each step."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.engine.requests.adapter import AdapterPin


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of the scheduler. ``used`` is held by live sequences, ``cached`` only by the prefix cache."""

    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    slots_used: int
    slots_cached: int
    slots_total: int
    preemptions: int
    """Preemptions since the start."""
    num_drafts: int = 0
    """Chunks with draft tokens."""
    num_draft_tokens: int = 0
    """Draft tokens that were verified since the start."""
    num_accepted_tokens: int = 0
    evicted_bytes: int = 0
    """Bytes that the prefix cache has evicted since the start."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """Adapter version in a slot, for status and metrics."""

    pin: AdapterPin
    requests: int


@dataclass(frozen=True, slots=True)
class AdapterSnapshot:
    attached: str
    """Attached version "name@n", empty for the base."""
    loaded: tuple[LoadedAdapter, ...]
    serving: tuple[str, ...] = ()
    """Names of ``loaded`` as clients use them: "name" for the name's current version, else "name@n"."""
    waiting: tuple[str, ...] = ()
    """Adapters that requests wait for, "name" or "name@n" as requested."""
    drafter: str = ""
    """Version of the followed drafter that drafts; empty: the checkpoint's own layer, or one of a directory."""


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """Status of the loop after its latest step."""

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
    paused: bool = False
    """Whether nothing is computed for requests now."""


class Phase(enum.Enum):
    """Phase of a request that has not ended."""

    LOADING = "loading"
    """Its adapter is loading, or waits for a slot."""
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request that has not ended."""

    request_id: str
    owner: str
    """Id of the API key; empty: there are no keys."""
    phase: Phase
    adapter: str
    """Version "name@n", or as it was asked for while it loads; empty: the base, or a private policy."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that came from the prefix cache; 0 until it is first scheduled."""
    computed_tokens: int
    """Prompt tokens whose state is there, cached ones too."""
    output_tokens: int
    age_seconds: float
    priority: int
    background: bool
    """True for a rollout of a job."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Status of one tier."""

    entries: int
    size: int
    """Bytes."""
    limit: int
    """Bytes."""
