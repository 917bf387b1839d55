"""Versions that do not get where they should serve."""

from __future__ import annotations

from observability.alerts.cases import ENGINE, PLACE, fires, once, quiet, series, steady
from observability.rules import Alert, Group
from observability.series import PLACE as BY
from observability.series import ours

_FAILURES = "temper_engine_adapter_load_failures_total"
_OWN = 'reason!="missing"'
_OTHER = {**PLACE, "pod": "r-engine-1"}


def _attached(first: str, second: str) -> dict[str, str]:
    name = "temper_engine_attached_adapter"
    return {series(name, ENGINE, adapter=first): steady(1), series(name, _OTHER, adapter=second): steady(1)}


def _failed(reason: str) -> dict[str, str]:
    return {series(_FAILURES, ENGINE, reason=reason): once(0, 5, 3)}


ADAPTERS = Group(
    "adapters",
    (
        Alert(
            "TemperAdapterLoadsFail",
            f"sum by ({BY}, pod, reason) (increase({ours(_FAILURES, _OWN)}[15m])) > 0",
            1,
            "warning",
            "An engine cannot load an adapter",
            "{{ $labels.pod }} could not load a version ({{ $labels.reason }}). What served before goes on serving; "
            "requests that name the version get an error.",
            (
                fires(_failed("rejected"), "10m", {**ENGINE, "reason": "rejected"}),
                # A client that names what does not exist is no fault of the engine.
                quiet(_failed("missing"), "10m"),
            ),
        ),
        Alert(
            "TemperEnginesDisagree",
            f"count by ({BY}) (count by ({BY}, adapter) ({ours('temper_engine_attached_adapter')})) > 1",
            10,
            "warning",
            "Engines serve different versions",
            "{{ $value }} versions answer under the base model's name in release {{ $labels.release }}: the same "
            "request gets another answer on another engine.",
            (
                fires(_attached("tone@3", "tone@2"), "20m", PLACE, "2"),
                fires(_attached("tone@3", "base"), "20m", PLACE, "2"),
                quiet(_attached("tone@3", "tone@3"), "20m"),
                quiet(_attached("tone@3", "tone@2"), "5m"),
            ),
        ),
    ),
)
