"""`publish_if`: what a job must have improved for its result to become a version."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from services.common.jobs.fields.gates import ON_SUITES, SETTINGS_GIVEN, SuiteGate
from services.common.validation.errors import contradiction
from services.common.validation.json_rules import (
    Rule,
    Rules,
    both,
    either,
    given,
    has,
    left_out,
    never,
    only_with,
    where,
)
from services.common.validation.strict_models import absent

Better: TypeAlias = Literal["lower", "higher"]


class PublishIf(SuiteGate):
    """Conditions for publishing: on one evaluation metric of the job, measured before the first step and after the last
    one, on suites, or on both."""

    metric: str | None = Field(None, min_length=1, max_length=100, exclude_if=absent)
    """One of the job's own evaluation metrics, e.g. "eval_loss"."""
    min_gain: float = Field(0.0, ge=-1e9, le=1e9)
    """Least improvement of the metric: downwards for a loss, upwards for an accuracy. 0: no worse than before.
    Negative: at most that much worse."""

    json_rules: ClassVar[Rules] = (
        either(given("metric"), ON_SUITES),
        either(given("metric"), never(has(min_gain=never({"const": 0})))),
        where(SETTINGS_GIVEN, ON_SUITES),
    )

    @model_validator(mode="after")
    def _asks_something(self) -> PublishIf:
        if self.metric is None and not self.asks:
            raise contradiction("nothing is asked for: give a metric, or suites in gain or no_loss", "metric")
        if self.metric is None and self.min_gain != 0:
            raise contradiction("min_gain is of the metric: a suite has its own, beside its name in gain", "min_gain")
        settings = (name for name in ("alpha", "against", "allow_contaminated", "max_kl") if name in self.model_dump())
        if not self.asks and (name := next(settings, None)) is not None:
            raise contradiction(f"{name} is of suites: name some in gain or no_loss, or leave it out", name)
        return self

    def gained(self, before: float, after: float, better: Better) -> float:
        """Amount by which ``after`` is better; NaN if either is."""
        return before - after if better == "lower" else after - before

    def satisfied(self, before: float, after: float, better: Better) -> bool:
        """Whether the gain is large enough; never if it is not a finite number."""
        gain = self.gained(before, after, better)
        return math.isfinite(gain) and gain >= self.min_gain


def publish_if_rule(measured: Mapping[str, Better], evaluates: Rule) -> Rule:
    """Rule by which JSON Schema says what ``check_publish_if`` checks.

    Args:
        measured: the metrics of an evaluation.
        evaluates: holds of a job that computes one.
    """
    named = both(has(publish_if=has(metric={"enum": sorted(measured)})), evaluates)
    return only_with("publish_if", either(has(publish_if=left_out("metric")), named))


def check_publish_if(condition: PublishIf | None, measured: Mapping[str, Better], way_out: str) -> None:
    """Raises PydanticCustomError unless the job computes the metric, if one is named.

    Args:
        way_out: what to do when it computes none.
    """
    if condition is None or condition.metric is None or condition.metric in measured:
        return
    if measured:
        reason = f"this job computes {', '.join(sorted(measured))}: choose one of them"
    else:
        reason = f"this job computes no evaluation: {way_out}"
    message = f"publish_if.metric is {condition.metric!r}, but {reason}"
    raise contradiction(message, "publish_if")
