"""`publish_if`: what a job must have improved for its result to become a version."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

from pydantic import Field
from pydantic_core import PydanticCustomError

from services.common.validation.json_rules import Rule, both, has, only_with
from services.common.validation.strict_models import SentModel

Better: TypeAlias = Literal["lower", "higher"]


class PublishIf(SentModel):
    """A condition on one evaluation metric, measured before the first step and after the last one."""

    metric: str = Field(min_length=1, max_length=100)
    """One of the job's own evaluation metrics, e.g. "eval_loss"."""
    min_gain: float = Field(0.0, ge=-1e9, le=1e9)
    """Least improvement: downwards for a loss, upwards for an accuracy. 0: no worse than before.
    Negative: at most that much worse."""

    def gain(self, before: float, after: float, better: Better) -> float:
        """Amount by which ``after`` is better; NaN if either is."""
        return before - after if better == "lower" else after - before

    def satisfied(self, before: float, after: float, better: Better) -> bool:
        """Whether the gain is large enough; never if it is not a finite number."""
        gain = self.gain(before, after, better)
        return math.isfinite(gain) and gain >= self.min_gain


def publish_if_rule(measured: Mapping[str, Better], evaluates: Rule) -> Rule:
    """Rule by which JSON Schema says what ``check_publish_if`` checks.

    Args:
        measured: the metrics of an evaluation.
        evaluates: holds of a job that computes one.
    """
    return only_with("publish_if", both(has(publish_if=has(metric={"enum": sorted(measured)})), evaluates))


def check_publish_if(condition: PublishIf | None, measured: Mapping[str, Better], way_out: str) -> None:
    """Raises PydanticCustomError unless the job computes the metric.

    Args:
        way_out: what to do when it computes none.
    """
    if condition is None or condition.metric in measured:
        return
    if measured:
        reason = f"this job computes {', '.join(sorted(measured))}: choose one of them"
    else:
        reason = f"this job computes no evaluation: {way_out}"
    message = f"publish_if.metric is {condition.metric!r}, but {reason}"
    raise PydanticCustomError("contradiction", "{message}", {"message": message, "param": "publish_if"})
