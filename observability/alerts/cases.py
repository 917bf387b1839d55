"""Helpers to write the test cases of alerts."""

from __future__ import annotations

from collections.abc import Mapping

from observability.rules import Case, Firing

PLACE = {"namespace": "temper", "release": "r"}
"""Labels of the place that every case is in."""
ENGINE = {**PLACE, "pod": "r-engine-0"}
GATEWAY = {**PLACE, "pod": "r-gateway-0"}


def series(name: str, labels: Mapping[str, str], **more: str) -> str:
    """Series in promtool's notation."""
    inside = ",".join(f'{label}="{value}"' for label, value in {**labels, **more}.items())
    return f"{name}{{{inside}}}"


def steady(value: float, minutes: int = 240) -> str:
    """The same value every minute."""
    return f"{value:g}x{minutes}"


def rising(step: float, start: float = 0, minutes: int = 240) -> str:
    """A counter that grows by ``step`` a minute."""
    return f"{start:g}+{step:g}x{minutes}"


def once(before: float, minute: int, after: float, minutes: int = 240) -> str:
    """Values of a series: one value, and another from a minute on."""
    return f"{before:g}x{minute - 1} {after:g}x{minutes}"


def fires(found: Mapping[str, str], at: str, labels: Mapping[str, str], value: str = "") -> Case:
    """A case in which one alert fires."""
    return Case(found, at, (Firing(labels, value),))


def quiet(found: Mapping[str, str], at: str) -> Case:
    """A case in which none does."""
    return Case(found, at)
