"""Canaries that were rolled back by a guardrail, or that nobody watches over."""

from __future__ import annotations

from observability.alerts.cases import GATEWAY, PLACE, fires, once, quiet, series, steady
from observability.rules import Alert, Group
from observability.series import PLACE as BY
from observability.series import ours

_GUARDRAIL = 'reason="guardrail"'
_UNWATCHED_SECONDS = 30


def _ended(reason: str) -> dict[str, str]:
    labels = {"state": "rolled_back", "reason": reason}
    return {series("temper_gateway_canaries_ended_total", GATEWAY, **labels): once(0, 5, 1)}


def _age(seconds: float) -> dict[str, str]:
    return {series("temper_gateway_canary_look_age_seconds", GATEWAY): steady(seconds)}


CANARIES = Group(
    "canaries",
    (
        Alert(
            "TemperCanaryRolledBack",
            f"sum by ({BY}) (increase({ours('temper_gateway_canaries_ended_total', _GUARDRAIL)}[30m])) > 0",
            0,
            "warning",
            "A guardrail rolled a candidate back",
            "A candidate of release {{ $labels.release }} crossed a guardrail of its canary in the last half hour; the "
            "version from before answers everybody.",
            (
                fires(_ended("guardrail"), "10m", PLACE),
                quiet(_ended("not_better"), "10m"),
            ),
        ),
        Alert(
            "TemperCanaryUnwatched",
            f"max by ({BY}) ({ours('temper_gateway_canary_look_age_seconds')}) > {_UNWATCHED_SECONDS}",
            1,
            "warning",
            "Nobody looks at a canary",
            "No gateway of release {{ $labels.release }} has looked at one of its canaries for "
            "{{ $value | humanizeDuration }}; its candidate answers nobody until one does.",
            (
                fires(_age(90), "10m", PLACE, "1m 30s"),
                quiet(_age(1), "10m"),
            ),
        ),
    ),
)
