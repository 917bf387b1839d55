"""Compositions of adapters where jobs name policies: as teachers, targets, and samplers of rollouts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from services.common.adapters.composition import parse_published
from services.common.adapters.names import AdapterVersion
from services.common.jobs import EvalJob, GrpoJob, OpdJob
from services.common.queue.records import versions_needed

A, B = AdapterVersion("a", 3), AdapterVersion("b", 1)
TOGETHER = "a@3*0.5+b@1"


def opd(teacher: str) -> OpdJob:
    fields: dict[str, Any] = {"adapter": "s", "prompts": ["p"], "teacher": teacher, "rounds": 1, "max_tokens": 4}
    return OpdJob.model_validate(fields)


def test_a_teacher_of_several_adapters_names_all_versions() -> None:
    assert opd(TOGETHER).teacher_version == parse_published(TOGETHER)
    with pytest.raises(ValidationError, match=r'name the version \("b@3"\)'):
        opd("a@3*0.5+b")


def test_a_target_may_be_several_adapters_by_name() -> None:
    assert EvalJob.model_validate({"suites": ["s"], "targets": ["a*0.5+b", "base"]}).targets[0] == "a*0.5+b"
    with pytest.raises(ValidationError, match="the scale"):
        EvalJob.model_validate({"suites": ["s"], "targets": ["a*2000"]})


def test_rollouts_may_say_that_several_adapters_sampled_them() -> None:
    rollout = {"token_ids": [1], "logprobs": [-1.0], "adapter": "b@1+a@3*0.5", "reward": 1.0}
    others = {"token_ids": [1], "logprobs": [-1.0], "adapter": "a@3", "reward": 0.0}
    group = {"prompt": "p", "completions": [rollout, others]}
    job = GrpoJob.model_validate({"adapter": "s", "groups": [group]})
    assert job.sampled_by.keys() == {A, B}


def test_versions_that_unfinished_jobs_name_together_are_kept() -> None:
    spec = json.dumps({"teacher": TOGETHER, "targets": ["c+d@2*-1"], "prompts": ["mail me @ home + 1"]})
    assert versions_needed([spec, ""]) == {A, B, AdapterVersion("d", 2)}
