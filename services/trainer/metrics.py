"""Prometheus metrics of the trainer."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_STEP_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class TrainerMetrics:
    """One set a process; give it the registry that the process exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.jobs = Counter(
            "temper_trainer_jobs_total", "Jobs that this trainer let go of.", ["outcome"], registry=registry
        )
        self.running = Gauge("temper_trainer_running", "1 while a job runs here.", registry=registry)
        self.step_seconds = Histogram(
            "temper_trainer_step_seconds", "Wall time of an optimizer step.", buckets=_STEP_BUCKETS, registry=registry
        )
        self.sessions = Gauge("temper_trainer_sessions", "Training sessions that are open here.", registry=registry)
        self.session_calls = Counter(
            "temper_trainer_session_calls_total",
            "Calls of training sessions that have ended.",
            ["operation", "outcome"],
            registry=registry,
        )
        self.session_call_seconds = Histogram(
            "temper_trainer_session_call_seconds",
            "From a call's submission to its end.",
            ["operation"],
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
