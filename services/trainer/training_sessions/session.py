"""One session with all that belongs to it, and how it and its calls look from outside."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import TemperError
from services.common.jobs.training_sessions.calls import Call, OpenSession
from services.trainer.memory.budget import MemoryNeed
from services.trainer.settings import TrainerSettings
from services.trainer.training_sessions.call_queue import CallQueue, CallQueueLimits, CallState, QueuedCall
from services.trainer.training_sessions.programs import Compute, Program, ResidentSession

_PENDING_CALLS_OF_TOKENS = 8
"""Calls of the largest size that one session may have waiting."""


class SessionEnded(Exception):
    """The session was closed while it computed."""


@dataclass(frozen=True, slots=True)
class FutureView:
    """A call as its client sees it."""

    id: str
    session: str
    seq: int
    kind: str
    state: CallState
    running: bool
    ahead: int
    """Calls of the session that come before it."""
    missing: int | None
    """The sequence number it waits for and that nobody has sent."""
    result: bytes | None
    error: BaseException | None


@dataclass(eq=False)
class TrainingSession:
    resident: ResidentSession
    request: OpenSession
    calls: CallQueue[Call]
    ttl: float
    created: float
    used: float
    """Monotonic, of the last call."""
    owner: str = ""
    """Id of the API key that opened it; empty: there are no keys."""
    opened: Future[None] = field(default_factory=Future)
    program: Program | None = None
    """Program of the call that runs, or of the opening."""
    entry: QueuedCall[Call] | None = None
    """The call that runs; None while opening."""
    part: Compute | None = None
    """Waits for the trainer thread."""
    computing: bool = False
    ended: TemperError | None = None
    """Error that tells why the session has ended; None: it has not."""

    @property
    def id(self) -> str:
        return self.resident.id


def call_queue_limits(settings: TrainerSettings) -> CallQueueLimits:
    """Bounds of one session's queue."""
    return CallQueueLimits(
        pending=settings.session_pending_calls,
        pending_tokens=_PENDING_CALLS_OF_TOKENS * settings.session_call_tokens,
        gap_seconds=settings.session_gap_seconds,
        results=settings.session_results,
        result_seconds=settings.session_result_seconds,
    )


def view_of(session: TrainingSession, entry: QueuedCall[Call]) -> FutureView:
    """A call of the session, now."""
    pending = entry.state is CallState.PENDING
    return FutureView(
        id=entry.id,
        session=session.id,
        seq=entry.seq,
        kind=entry.kind,
        state=entry.state,
        running=entry.started and pending,
        ahead=session.calls.ahead_of(entry) if pending else 0,
        missing=session.calls.missing_before(entry) if pending else None,
        result=entry.result,
        error=entry.error,
    )


def describe(session: TrainingSession, held: MemoryNeed | None, now: float) -> dict[str, Any]:
    """The session as JSON.

    Args:
        held: what the budget says.
        now: monotonic seconds.
    """
    resident, policy = session.resident, session.resident.policy
    described: dict[str, Any] = {
        "id": session.id,
        "object": "train.session",
        "created_at": session.created,
        "expires_at": time.time() + max(0.0, session.ttl - (now - session.used)),
        "ttl_seconds": session.ttl,
        "next_seq": session.calls.next_seq,
        "pending": session.calls.pending,
        "adapter": str(resident.parent) if resident.parent is not None else None,
        "max_tokens_per_microbatch": resident.shape.microbatch_tokens,
        "recompute": resident.shape.recompute,
        "memory_bytes": {"resident": held.resident, "working": held.working} if held is not None else None,
        "metadata": session.request.metadata,
    }
    if policy is not None:
        described |= {
            "step": policy.steps,
            "lora": {"rank": policy.lora.rank, "target_modules": list(policy.lora.target_modules)},
            "parameters": policy.lora.num_parameters(),
        }
    return described
