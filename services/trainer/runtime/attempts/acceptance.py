"""The metric of `publish_if`: measured before the first step and after the last one, and remembered in every checkpoint
between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

from services.common.errors import InvalidRequest, TemperError
from services.common.jobs import JobBase, PublishingSpec
from services.common.jobs.record import NOT_PUBLISHED
from services.trainer.jobs.base import JobRun, RunState

_KEY = "publish_if_before"


class NotPublished(TemperError):
    """A trained adapter did not improve by what its job asks for."""

    code: ClassVar[str] = "not_published"


class Acceptance:
    """One job's condition on a metric of its own; without one every method does nothing. Conditions on suites are
    services.trainer.evaluation.gates."""

    def __init__(self, spec: PublishingSpec) -> None:
        condition = spec.publish_if if isinstance(spec, JobBase) else None
        condition = None if condition is None or condition.metric is None else condition
        self._adapter = spec.adapter
        self._condition = condition
        self._metric = "" if condition is None else condition.metric or ""
        self._better = spec.eval_metrics[self._metric] if condition and isinstance(spec, JobBase) else "lower"
        self._before: float | None = None

    def begin(self, run: JobRun, interrupt: Callable[[], None]) -> dict[str, float]:
        """Evaluates the starting point, unless a checkpoint has it; returns what was measured.

        Raises:
            InvalidRequest: the run does not compute the metric; what ``interrupt`` raises.
        """
        if self._condition is None or self._before is not None:
            return {}
        measured = run.evaluate(interrupt)
        self._before = self._read(measured)
        return measured

    def stamp(self, state: RunState) -> RunState:
        """The state of a checkpoint with the starting point's value."""
        if self._before is None:
            return state
        return dataclasses.replace(state, data={**state.data, _KEY: self._before})

    def restore(self, state: RunState) -> None:
        """Takes the starting point's value from a checkpoint.

        Raises:
            InvalidRequest: it has none.
        """
        if self._condition is None:
            return
        before = state.data.get(_KEY)
        if not isinstance(before, float):
            raise InvalidRequest("the checkpoint does not have the evaluation before the first step")
        self._before = before

    def check(self, run: JobRun, after: Mapping[str, float] | None, interrupt: Callable[[], None]) -> dict[str, float]:
        """Compares the end with the start; returns the start's value as a metric of the version.

        Args:
            after: metrics with those of the evaluation that fell on the last step; None: that was before a restart.

        Raises:
            NotPublished: the gain is too small; names both values.
        """
        if self._condition is None or self._before is None:
            return {}
        value = self._read(run.evaluate(interrupt) if after is None else after)
        metric, before = self._metric, self._before
        if not self._condition.satisfied(before, value, self._better):
            gain = self._condition.gained(before, value, self._better)
            raise NotPublished(
                f"{NOT_PUBLISHED}{metric} was {before:.6g} before training and is {value:.6g} after it, a gain of "
                f"{gain:.6g}, and publish_if.min_gain is {self._condition.min_gain:g}; {self._adapter} stays as it was",
                param="publish_if",
            )
        return {f"start_{metric}": before}

    def _read(self, metrics: Mapping[str, float]) -> float:
        metric = self._metric
        if metric not in metrics:
            raise InvalidRequest(
                f"publish_if.metric is {metric!r}, and nothing is left to evaluate it on: give more eval_examples",
                param="publish_if",
            )
        return float(metrics[metric])
