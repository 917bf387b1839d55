"""Whether a learner begins a cycle now, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass

from services.learning.learners.policy import DAY
from services.learning.learners.record import JobTime, Learner


@dataclass(frozen=True, slots=True)
class Due:
    """Answer, with its reason in words."""

    now: bool
    why: str


def due(learner: Learner, waiting: int, now: float) -> Due:
    """Whether a cycle of a learner that collects begins at ``now`` (unix seconds).

    Args:
        waiting: new opinions and, where the policy takes those, logged requests since the last cycle's.
    """
    cycle, policy = learner.cycle, learner.policy
    if cycle.state == "stopped":
        return Due(False, "it has stopped: resume it")
    if cycle.paused:
        return Due(False, "it is paused")
    if (spent := _over_budget(learner, now)) is not None:
        return Due(False, spent)
    if cycle.asked:
        return Due(True, f"asked for, with {waiting} new rows")
    if now < cycle.not_before:
        return Due(False, f"the last cycle failed: it waits for {cycle.not_before - now:.0f} s more")
    trigger = policy.trigger
    if trigger.window is not None and not trigger.window.holds(now):
        return Due(False, f"cycles begin between {trigger.window.begin} and {trigger.window.end} UTC")
    if trigger.min_rows is not None and waiting < trigger.min_rows:
        return Due(False, f"{waiting} of {trigger.min_rows} new rows are there")
    passed = now - (cycle.began_at or learner.created_at)
    if trigger.every_seconds is not None and passed < trigger.every_seconds:
        return Due(False, f"{passed:.0f} of {trigger.every_seconds:g} s have passed")
    return Due(True, f"{waiting} new rows")


def tokens_over_budget(learner: Learner, tokens: int, now: float) -> str | None:
    """Why the job of a cycle may not train on more than the ``tokens`` that it has trained on; None: it may."""
    budget = learner.policy.budget
    if budget.cycle_tokens is not None and tokens > budget.cycle_tokens:
        return f"{tokens} tokens are trained on, over the budget of {budget.cycle_tokens} in a cycle"
    together = tokens + sum(job.tokens for job in _of_the_day(learner, now))
    if budget.training_tokens is not None and together > budget.training_tokens:
        return f"{tokens} tokens are trained on, {together} in 24 hours, over the budget of {budget.training_tokens}"
    return None


def _of_the_day(learner: Learner, now: float) -> list[JobTime]:
    return [job for job in learner.cycle.jobs if job.began_at > now - DAY]


def _over_budget(learner: Learner, now: float) -> str | None:
    budget = learner.policy.budget
    jobs = _of_the_day(learner, now)
    if budget.jobs is not None and len(jobs) >= budget.jobs:
        return f"its budget of {budget.jobs} jobs in 24 hours is used up"
    seconds = sum(job.seconds for job in jobs)
    if budget.training_seconds is not None and seconds >= budget.training_seconds:
        return f"its budget of {budget.training_seconds:g} s of training in 24 hours is used up"
    tokens = sum(job.tokens for job in jobs)
    if budget.training_tokens is not None and tokens >= budget.training_tokens:
        return f"its budget of {budget.training_tokens} trained tokens in 24 hours is used up: {tokens} are trained on"
    return None
