"""Learners that have stopped, or whose cycles do not get on."""

from __future__ import annotations

from observability.alerts.cases import GATEWAY, PLACE, fires, once, quiet, series, steady
from observability.rules import Alert, Group
from observability.series import PLACE as BY
from observability.series import ours

_STUCK_SECONDS = 3 * 3600
_LEARNER = {**GATEWAY, "learner": "support"}
_FIRED = {**PLACE, "learner": "support"}
_BUSY = 'state=~"preparing|training|evaluating"'
_STOPPED = 'state="stopped"'
_FAILED = 'outcome="failed"'


def _in_state(state: str, since: float = 0) -> dict[str, str]:
    return {
        series("temper_learner_state", _LEARNER, state=state): steady(1),
        series("temper_learner_state_entered_timestamp_seconds", _LEARNER): steady(since),
    }


def _failures(count: int) -> dict[str, str]:
    return {series("temper_learner_cycles_total", _LEARNER, outcome="failed"): once(0, 5, count)}


LEARNERS = Group(
    "learners",
    (
        Alert(
            "TemperLearnerStopped",
            f"max by ({BY}, learner) ({ours('temper_learner_state', _STOPPED)}) == 1",
            0,
            "warning",
            "A learner has stopped",
            "Candidates of the learner {{ $labels.learner }} were rejected or rolled back one after another; it waits "
            "for a person.",
            (
                fires(_in_state("stopped"), "5m", _FIRED, "1"),
                quiet(_in_state("collecting"), "5m"),
            ),
        ),
        Alert(
            "TemperLearnerStuck",
            f"max by ({BY}, learner) (\n"
            f"  (time() - {ours('temper_learner_state_entered_timestamp_seconds')} > {_STUCK_SECONDS})\n"
            f"  and on ({BY}, pod, learner) {ours('temper_learner_state', _BUSY)} == 1\n"
            ")",
            5,
            "warning",
            "A learner's cycle does not get on",
            "The learner {{ $labels.learner }} has been preparing, training or evaluating for "
            "{{ $value | humanizeDuration }}.",
            (
                fires(_in_state("training"), "190m", _FIRED, "3h 10m 0s"),
                quiet(_in_state("training"), "150m"),
                quiet(_in_state("canary"), "190m"),
            ),
        ),
        Alert(
            "TemperLearnerFails",
            f"sum by ({BY}, learner) (increase({ours('temper_learner_cycles_total', _FAILED)}[6h])) > 2",
            0,
            "warning",
            "Cycles of a learner fail",
            "Several cycles of the learner {{ $labels.learner }} failed in the last six hours before a candidate was "
            "decided on.",
            (
                fires(_failures(5), "60m", _FIRED),
                quiet(_failures(1), "60m"),
            ),
        ),
    ),
)
