"""Jobs that fail, stop, or wait."""

from __future__ import annotations

from observability.alerts.cases import ENGINE, GATEWAY, PLACE, fires, once, quiet, rising, series, steady
from observability.rules import Alert, Group
from observability.series import PLACE as BY
from observability.series import ours

_USERS = 'outcome="failed"'
_CRASHES = 'outcome=~"crashed|unsettled"'
_TRAINING = 'queue="training"'
_BATCHES = 'queue="batches"'
_STUCK_SECONDS = 1800
_SIGNS = 2
_WAIT = {"training": 2 * 3600, "batches": 12 * 3600}
"""Seconds that the oldest of a queue may wait."""


def _done(outcome: str, values: str) -> dict[str, str]:
    return {series("temper_trainer_jobs_total", ENGINE, outcome=outcome): values}


def _oldest(queue: str, seconds: float) -> dict[str, str]:
    return {series("temper_gateway_job_oldest_queued_seconds", GATEWAY, queue=queue): steady(seconds)}


def _running(now: int) -> dict[str, str]:
    """A job whose last step was at second 0 of the test."""
    return {
        series("temper_trainer_progress_timestamp_seconds", ENGINE): steady(0),
        series("temper_trainer_running", ENGINE): steady(now),
    }


def _signs(values: str, running: int = 1) -> dict[str, str]:
    return {
        series("temper_trainer_job_hacking_signs", ENGINE, kind="grpo"): values,
        series("temper_trainer_running", ENGINE): steady(running),
    }


def _waits(share: float, running: int = 1) -> dict[str, str]:
    return {
        series("temper_trainer_gate_wait_seconds_total", ENGINE): rising(60 * share),
        series("temper_trainer_running", ENGINE): steady(running),
    }


TRAINING = Group(
    "training",
    (
        Alert(
            "TemperJobFailed",
            f"sum by ({BY}) (increase({ours('temper_trainer_jobs_total', _USERS)}[30m])) > 0",
            0,
            "info",
            "A training job failed",
            "A job of release {{ $labels.release }} failed in the last half hour; the job says why.",
            (
                fires(_done("failed", once(0, 5, 1)), "10m", PLACE),
                quiet(_done("succeeded", once(0, 5, 1)), "10m"),
            ),
        ),
        Alert(
            "TemperJobsCrash",
            f"sum by ({BY}, pod) (increase({ours('temper_trainer_jobs_total', _CRASHES)}[1h])) > 1",
            0,
            "warning",
            "Jobs crash",
            "{{ $labels.pod }} let go of several jobs in the last hour because of errors of its own; each is tried "
            "again until its attempts are used up.",
            (
                fires(_done("crashed", once(0, 5, 3)), "10m", ENGINE),
                quiet(_done("crashed", once(0, 5, 1)), "10m"),
            ),
        ),
        Alert(
            "TemperJobStuck",
            f"time() - {ours('temper_trainer_progress_timestamp_seconds')} > {_STUCK_SECONDS}\n"
            f"and on ({BY}, pod) {ours('temper_trainer_running')} > 0",
            5,
            "warning",
            "A job does not advance",
            "The job on {{ $labels.pod }} finished no step for {{ $value | humanizeDuration }}.",
            (
                fires(_running(1), "40m", ENGINE, "40m 0s"),
                quiet(_running(0), "40m"),
                quiet(_running(1), "20m"),
            ),
        ),
        Alert(
            "TemperRewardGamed",
            f"{ours('temper_trainer_job_hacking_signs')} >= {_SIGNS}\n"
            f"and on ({BY}, pod) {ours('temper_trainer_running')} > 0",
            10,
            "info",
            "A reward may be gamed",
            "The reward of the job on {{ $labels.pod }} rises, and {{ $value }} things that it does not reward have "
            "drifted since the first round.",
            (
                fires(_signs(steady(2)), "15m", {**ENGINE, "kind": "grpo"}, "2"),
                quiet(_signs(steady(1)), "15m"),
                quiet(_signs(once(1, 10, 3)), "15m"),
                quiet(_signs(steady(2), running=0), "15m"),
            ),
        ),
        Alert(
            "TemperDeadLetters",
            f"max by ({BY}, queue) (delta({ours('temper_gateway_dead_letters')}[1h])) > 0",
            0,
            "warning",
            "The queue gave up on something",
            "There are new dead letters in the queue {{ $labels.queue }}: jobs whose attempts are used up, or entries "
            "that are no jobs.",
            (
                fires(
                    {series("temper_gateway_dead_letters", GATEWAY, queue="training"): once(2, 30, 3)},
                    "65m",
                    {**PLACE, "queue": "training"},
                ),
                quiet({series("temper_gateway_dead_letters", GATEWAY, queue="training"): steady(3)}, "65m"),
            ),
        ),
        Alert(
            "TemperJobsWait",
            f"max by ({BY}, queue) ({ours('temper_gateway_job_oldest_queued_seconds', _TRAINING)}) "
            f"> {_WAIT['training']}\n"
            f"or max by ({BY}, queue) ({ours('temper_gateway_job_oldest_queued_seconds', _BATCHES)}) "
            f"> {_WAIT['batches']}",
            10,
            "warning",
            "Jobs wait for long",
            "The oldest job in the queue {{ $labels.queue }} was submitted {{ $value | humanizeDuration }} ago and has "
            "not begun.",
            (
                fires(_oldest("training", 9000), "15m", {**PLACE, "queue": "training"}, "2h 30m 0s"),
                quiet(_oldest("batches", 9000), "15m"),
                quiet(_oldest("training", 600), "15m"),
            ),
        ),
        Alert(
            "TemperTrainerStarves",
            f"rate({ours('temper_trainer_gate_wait_seconds_total')}[15m]) > 0.85\n"
            f"and on ({BY}, pod) min_over_time({ours('temper_trainer_running')}[15m]) > 0",
            30,
            "info",
            "Training hardly gets the device",
            "The job on {{ $labels.pod }} waits {{ $value | humanizePercentage }} of the time for serving.",
            (
                fires(_waits(0.9), "60m", ENGINE, "90%"),
                quiet(_waits(0.5), "60m"),
                quiet(_waits(0.9, running=0), "60m"),
            ),
        ),
    ),
)
