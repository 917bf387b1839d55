"""Kinds of a run's steps, and the time of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from services.engine.observability.events import EngineEvent, EventStream, StepDone

if TYPE_CHECKING:
    from services.engine.loop.step_pipeline import StepPipeline

_DECODES = (0, 1, 8, 16, 32, 64, 128, 192, 256)


@contextmanager
def recorded_steps(pipeline: StepPipeline) -> Iterator[list[StepDone]]:
    """Inside, every step's figures are noted as the loop reports them."""
    steps: list[StepDone] = []
    before = pipeline._events

    def note(event: EngineEvent) -> None:
        if isinstance(event, StepDone):
            steps.append(event)

    with patch.object(pipeline, "_events", EventStream(note, before.emit)):
        yield steps


def by_kind(steps: list[StepDone]) -> list[dict[str, Any]]:
    """Steps of up to so many decodes beside so many prompt tokens: how many there were, and their median milliseconds.

    Decodes are counted in buckets, up to the number given.
    """
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        most = next((bucket for bucket in _DECODES if bucket >= step.decodes), step.decodes)
        found[most, step.prefill_tokens].append(1e3 * step.compute_seconds)
    return [
        {"decodes": decodes, "prefill": prefill, "steps": len(times), "ms": round(median(times), 3)}
        for (decodes, prefill), times in sorted(found.items())
    ]
