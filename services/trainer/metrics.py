"""Prometheus metrics of the trainer."""

from __future__ import annotations

import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.common.jobs import JobProgress
from services.common.jobs.fields.cut import ROLLOUTS_CHANGED, ROLLOUTS_DROPPED, ROLLOUTS_REQUEUED
from services.common.jobs.kinds.environment import DROPPED, FAILURES

_STEP_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


OUTCOMES = ("succeeded", "failed", "cancelled", "paused", "requeued", "crashed", "lost", "unsettled")
"""Outcomes of an attempt. requeued: handed back, at a shutdown or because it cannot run beside others; lost: another
trainer has the job; unsettled: a fault of ours."""
_CUT = {"requeued": ROLLOUTS_REQUEUED, "dropped": ROLLOUTS_DROPPED}
_SHOWN = {
    "loss": "loss",
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "completion_length": "completion_length_mean",
    "repetition": "repetition_mean",
    "hacking_signs": "hacking_signs",
    "kl": "kl",
    "tokens_per_second": "tokens_per_second",
}
"""Gauge of the running job → what a step calls it."""


class TrainerMetrics:
    """One set a process; give it the registry that the process exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.jobs = Counter(
            "temper_trainer_jobs_total", "Jobs that this trainer let go of.", ["outcome"], registry=registry
        )
        # From the start on, at zero: the first increase of a series that was not there is none to Prometheus.
        for outcome in OUTCOMES:
            self.jobs.labels(outcome)
        self.running = Gauge(
            "temper_trainer_running",
            "Jobs that run here now; more than one take their steps together.",
            registry=registry,
        )
        self._progress = Gauge(
            "temper_trainer_progress_timestamp_seconds",
            "When the running job began or finished its last step, unix seconds; 0 when none ever ran.",
            registry=registry,
        )
        self._tokens = Counter("temper_trainer_tokens", "Tokens trained on.", ["kind"], registry=registry)
        self._step = Gauge(
            "temper_trainer_job_step", "Steps that the running job has done.", ["kind"], registry=registry
        )
        self._total_steps = Gauge(
            "temper_trainer_job_total_steps", "Steps of the running job.", ["kind"], registry=registry
        )
        texts = {
            "loss": "Loss of the running job's last step.",
            "reward": "Mean reward of the running job's last step, where it samples.",
            "reward_std": "Standard deviation of the rewards of the running job's last step.",
            "completion_length": "Mean tokens of the completions of the running job's last step.",
            "repetition": "Share of repeated pieces of four tokens in what the running job sampled last.",
            "hacking_signs": "Signs that the running job's reward rises in another way than was meant.",
            "kl": "Divergence from the reference in the running job's last step, where it has one.",
            "tokens_per_second": "Of the running job's last step.",
        }
        self._shown = {
            name: Gauge(f"temper_trainer_job_{name}", text, ["kind"], registry=registry) for name, text in texts.items()
        }
        self.step_seconds = Histogram(
            "temper_trainer_step_seconds", "Wall time of an optimizer step.", buckets=_STEP_BUCKETS, registry=registry
        )
        self._environment_failures = Counter(
            "temper_trainer_environment_failures_total",
            "Environments that failed an episode of a job.",
            ["reason"],
            registry=registry,
        )
        for reason in FAILURES:
            self._environment_failures.labels(reason.value)
        self._dropped_episodes = Counter(
            "temper_trainer_dropped_episodes_total",
            "Episodes of jobs that no environment brought to their end; nothing of them is learnt.",
            registry=registry,
        )
        self._cut_rollouts = Counter(
            "temper_trainer_cut_rollouts_total",
            "Rollouts of jobs that were cut with the tail of their round: requeued into the next one, or dropped.",
            ["then"],
            registry=registry,
        )
        for then in _CUT:
            self._cut_rollouts.labels(then)
        self._parts = Counter(
            "temper_trainer_part_seconds_total",
            "Time of jobs' steps: of the trainer, waiting (for what its steps learn from) and training; "
            "of the sampling, which may go on beside it, sampling and reward.",
            ["part"],
            registry=registry,
        )
        for part in ("sampling", "reward", "waiting", "training"):
            self._parts.labels(part)
        self._changed_rollouts = Counter(
            "temper_trainer_changed_rollouts_total",
            "Times that a rollout of a job under way went on with a newer policy.",
            registry=registry,
        )
        self._jobs = 0
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

    def job_began(self, kind: str) -> None:
        """A job of this kind runs from now on, too."""
        if self._jobs == 0:
            self._forget()
        self._jobs += 1
        self.running.set(self._jobs)
        self._progress.set(time.time())
        self._step.labels(kind).set(0)

    def progress(self, kind: str, progress: JobProgress, metrics: Mapping[str, float]) -> None:
        """A running job has come so far; ``metrics`` are those of its newest step, none before the first."""
        self._progress.set(time.time())
        self._step.labels(kind).set(progress.step)
        self._total_steps.labels(kind).set(progress.total_steps)
        for name, gauge in self._shown.items():
            if (value := metrics.get(_SHOWN[name])) is not None:
                gauge.labels(kind).set(value)
        for reason, name in FAILURES.items():
            self._environment_failures.labels(reason.value).inc(metrics.get(name, 0.0))
        self._dropped_episodes.inc(metrics.get(DROPPED, 0.0))
        for then, name in _CUT.items():
            self._cut_rollouts.labels(then).inc(metrics.get(name, 0.0))
        self._changed_rollouts.inc(metrics.get(ROLLOUTS_CHANGED, 0.0))
        rewards = metrics.get("reward_seconds", 0.0)
        self._parts.labels("sampling").inc(max(0.0, metrics.get("sampling_seconds", 0.0) - rewards))
        self._parts.labels("reward").inc(rewards)
        self._parts.labels("waiting").inc(metrics.get("waiting_seconds", 0.0))
        self._parts.labels("training").inc(metrics.get("train_seconds", 0.0))
        self._tokens.labels(kind).inc(round(metrics.get("tokens_per_second", 0.0) * metrics.get("train_seconds", 0.0)))

    def job_ended(self) -> None:
        """A job runs no more; with the last one its numbers are of the past."""
        self._jobs -= 1
        self.running.set(self._jobs)
        if self._jobs == 0:
            self._forget()

    def _forget(self) -> None:
        for gauge in (self._step, self._total_steps, *self._shown.values()):
            gauge.clear()
