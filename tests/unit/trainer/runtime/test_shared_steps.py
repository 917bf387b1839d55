"""Which jobs may run beside others."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from services.common.jobs import DpoJob, SftJob
from services.trainer.runtime.shared_steps import StepLimits, may_share

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
