"""Which jobs may run beside others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from services.common.jobs import DpoJob, MergeJob, SftJob
from services.common.queue.consumer import ClaimedJob
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.base import JobRun
from services.trainer.jobs.passes import Course, examination_of, steps_of
from services.trainer.runtime.interleaving import SideWork
from services.trainer.runtime.job_link import JobSession
from services.trainer.runtime.shared_steps import SharedSteps, StepLimits, may_share

EXAMPLES: list[dict[str, Any]] = [{"prompt": f"{n}+1", "completion": f"{n + 1}"} for n in range(4)]


class ImitationJob(SftJob):
    """A kind of job that somebody adds, with a loss of its own."""

    kind: Literal["imitation"] = "imitation"  # type: ignore[assignment]


def sft(**fields: Any) -> SftJob:
    return SftJob.model_validate({"adapter": "a", "examples": EXAMPLES, **fields})


def test_small_jobs_of_one_kind_share_and_none_that_would_hold_up_the_others() -> None:
    assert may_share(sft())
    assert may_share(sft(eval_fraction=0.5, publish_if={"metric": "eval_loss", "min_gain": 0.1}))
    assert not may_share(sft(publish_if={"no_loss": [{"suite": "sums@1", "max_loss": 0.1}]}))
    assert not may_share(ImitationJob.model_validate({"adapter": "a", "examples": EXAMPLES}))
    pairs = [{"prompt": "1+1", "chosen": "2", "rejected": "3"}]
    assert not may_share(DpoJob.model_validate({"adapter": "a", "examples": pairs}))


@pytest.mark.parametrize(("jobs", "tokens"), [(0, 100), (1, 1)])
def test_limits_under_which_nothing_could_run(jobs: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="at least one job"):
        StepLimits(jobs, tokens)


class Merging:
    """A run that has no property before it ends, as a merge has none of some."""

    total_steps = 1

    def step(self, index: int, interrupt: Callable[[], None]) -> dict[str, float]:
        interrupt()
        return {"merged": float(index)}

    def examine(self, interrupt: Callable[[], None]) -> dict[str, float]:
        interrupt()
        return {}

    def __getattr__(self, name: str) -> object:
        raise ValueError(f"{name}: nothing is merged yet")


def test_a_run_that_does_not_share_is_asked_for_nothing() -> None:
    host = SimpleNamespace(memory_budget=SimpleNamespace(release_together=lambda: None))
    steps = SharedSteps(cast(PolicyHost, host), StepLimits(2, 100), cast(SideWork, None), threading.Event())
    admitted: list[str] = []

    def course() -> Course[None]:
        run = cast(JobRun, Merging())
        steps.admit("merge", run)
        assert (yield from examination_of(run, lambda: None)) == {}
        assert (yield from steps_of(run, 3, lambda: None)) == {"merged": 3.0}
        admitted.append("merge")

    sources = [{"adapter": "a@1"}, {"adapter": "b@1"}]
    spec = MergeJob.model_validate({"adapter": "both", "sources": sources})
    claimed = cast(ClaimedJob, SimpleNamespace(id="merge", spec=spec))
    steps.begin(claimed, cast(JobSession, None), cast(Any, course()), last=False)
    assert admitted == ["merge"]
    assert not steps.active
