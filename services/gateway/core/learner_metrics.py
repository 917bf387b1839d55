"""Series of learners, of the gateway that acts for them."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.learning.learners.record import OUTCOMES, STATES, Learner, NewEvent

_SHOWN = (*STATES, "paused")


class LearnerMetrics:
    """All series. Those of a gateway that does not hold the lease say nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._state = Gauge(
            "temper_learner_state", "1: the learner is in this state.", ("learner", "state"), registry=registry
        )
        self._entered = Gauge(
            "temper_learner_state_entered_timestamp_seconds",
            "When the learner came into its state, as unix seconds.",
            ("learner",),
            registry=registry,
        )
        self._waiting = Gauge(
            "temper_learner_rows_waiting",
            "New opinions, and logged requests where it takes those, since the last cycle's.",
            ("learner",),
            registry=registry,
        )
        self._cycles = Counter(
            "temper_learner_cycles",
            "Cycles that ended here, by outcome: promoted, rejected, rolled_back, superseded or failed.",
            ("learner", "outcome"),
            registry=registry,
        )

    def show(self, learners: Sequence[Learner]) -> None:
        """Shows where they stand; others are not shown any more."""
        for gauge in (self._state, self._entered):
            gauge.clear()
        if not learners:
            self._waiting.clear()
        for learner in learners:
            for state in _SHOWN:
                self._state.labels(learner.name, state).set(state == learner.state)
            self._entered.labels(learner.name).set(learner.cycle.entered_at)

    def waiting(self, learner: Learner, rows: int) -> None:
        """Shows how many new rows there are."""
        self._waiting.labels(learner.name).set(rows)

    def happened(self, learner: Learner, event: NewEvent) -> None:
        """Counts the end of a cycle."""
        if event.kind in OUTCOMES:
            self._cycles.labels(learner.name, event.kind).inc()
