"""The trace of one attempt at a job: a trace of its own, linked to the request that submitted the job."""

from __future__ import annotations

from services.common.jobs import Job
from services.common.telemetry.tracing import NO_SPAN, Attributes, Span, Tracer

_STEP_SPANS = 128
"""Spans of steps in one attempt at most; of a longer job every second, third, … step has one."""
_BAD = frozenset({"failed", "crashed", "lost", "unsettled"})


class JobTrace:
    """Spans of one attempt.

    Args:
        submitter: traceparent of whoever submitted it; empty: nobody traced that.
    """

    def __init__(self, tracer: Tracer, job: Job, attempt: int, submitter: str) -> None:
        self._tracer = tracer
        self.span = tracer.start(
            f"job {job.kind}",
            kind="consumer",
            links=[submitter] if submitter else [],
            attributes={
                "temper.job.id": job.id,
                "temper.job.kind": job.kind,
                "temper.job.attempt": attempt,
                "temper.adapter": job.adapter,
            },
        )

    def part(self, name: str, attributes: Attributes | None = None) -> Span:
        """Something that the job does, as a context manager."""
        return self._tracer.start(name, parent=self.span.traceparent, attributes=attributes)

    def step(self, index: int, total: int) -> Span:
        """Step ``index`` (from 0) of ``total``; many steps share the spans there are."""
        every = -(-total // _STEP_SPANS)
        return self.part("step", {"temper.job.step": index + 1}) if index % every == 0 else NO_SPAN

    def ended(self, outcome: str) -> None:
        """Writes the outcome of the attempt into its span, which is about to end."""
        self.span.set({"temper.job.outcome": outcome})
        if outcome in _BAD:
            self.span.fail(outcome)
