"""Every method has a page whose examples are valid jobs, and which names every field of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from services.common.jobs import JOBS, GrpoJob, JobBase
from services.common.jobs.fields.dataset import OfDataset
from services.common.jobs.kinds.environment import EnvironmentReward, FailureKind
from services.common.jobs.kinds.generate import GenerateSettings, RolloutPrompt, check_rewards
from services.common.jobs.scorers.registry import REWARDS
from services.common.queue.records import SPEC

GUIDES = Path(__file__).resolve().parents[4] / "docs" / "guides"


@pytest.mark.parametrize("kind", JOBS)
def test_the_examples_are_valid_jobs(kind: str) -> None:
    blocks = re.findall(r"```json\n(.*?)```", (GUIDES / "training" / f"{kind}.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        assert SPEC.validate_python({"kind": kind, **json.loads(block)}).kind == kind


def test_rollout_jobs_have_a_page_of_their_own() -> None:
    page = (GUIDES / "training" / "rollouts.md").read_text()
    (block,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    job = SPEC.validate_python({"kind": "grpo", **json.loads(block)})
    assert isinstance(job, GrpoJob)
    assert job.generate is not None
    check_rewards(job.generate)
    assert not sorted(name for name in GenerateSettings.model_fields if f"`{name}`" not in page)
    for reward in REWARDS:
        assert not sorted(name for name in reward.model_fields if name not in page)
        assert f"| `{reward.model_fields['type'].default}` |" in page
    assert not sorted(name for name in RolloutPrompt.model_fields if f"`{name}`" not in page)


def test_environments_have_a_page_of_their_own() -> None:
    page = (GUIDES / "training" / "environments.md").read_text()
    for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL):
        job = SPEC.validate_python({"kind": "grpo", **json.loads(block)})
        assert isinstance(job, GrpoJob)
        assert job.generate is not None
        assert job.generate.environment is not None
        check_rewards(job.generate)
    assert not sorted(name for name in EnvironmentReward.model_fields if f"`{name}`" not in page)
    assert not sorted(kind for kind in FailureKind if f"`environment_failures_{kind.value}`" not in page)


@pytest.mark.parametrize("kind", JOBS)
def test_every_field_is_on_the_page(kind: str) -> None:
    page = (GUIDES / "training" / f"{kind}.md").read_text()
    own = JOBS[kind].model_fields.keys() - JobBase.model_fields.keys() - OfDataset.model_fields.keys() - {"kind"}
    assert not sorted(name for name in own if name not in page)


def test_the_index_links_to_every_page() -> None:
    index = (GUIDES / "training.md").read_text()
    assert all(f"(training/{kind}.md)" in index for kind in JOBS)
    shared = JobBase.model_fields.keys() - {"optimizer", "lora"}
    assert not sorted(name for name in shared if name not in index)
    assert "optimizer." in index
    assert "`dataset`" in index
    assert "lora." in index
