"""Compositions of adapters where jobs name policies: as teachers, targets, and samplers of rollouts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from services.common.adapters.composition import parse_published
from services.common.adapters.names import AdapterVersion, check_adapter_name, parse_adapter_ref
from services.common.errors import InvalidRequest
from services.common.jobs import DraftJob, EvalJob, GrpoJob, OpdJob
from services.common.jobs.fields.gates import AttachIf
from services.common.jobs.scorers.judge import JudgeSpec
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


def test_a_judge_and_a_drafters_target_of_several_adapters_name_all_versions() -> None:
    assert JudgeSpec(judge=TOGETHER).version == parse_published(TOGETHER)
    examples = [{"prompt": "p", "completion": "c"}]
    draft = DraftJob.model_validate({"adapter": "d", "examples": examples, "target": TOGETHER})
    assert draft.target_version == parse_published(TOGETHER)
    for made in (lambda: JudgeSpec(judge="a+b@1"), lambda: DraftJob(adapter="d", examples=examples, target="a@1+b")):
        with pytest.raises(ValidationError, match="must name a version"):
            made()


def test_a_gate_may_compare_with_several_adapters_by_name() -> None:
    assert AttachIf.model_validate({"gain": [{"suite": "s"}], "against": "a*0.5+b"}).against == "a*0.5+b"
    with pytest.raises(ValidationError, match="the scale"):
        AttachIf.model_validate({"gain": [{"suite": "s"}], "against": "a*2000"})


@pytest.mark.parametrize("text", ["a+b", "a@3*0.5", "a@3+b@1", "a*2"])
def test_where_one_adapter_is_asked_for_several_are_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"several adapters, or one with a scale.*merge them into one"):
        parse_adapter_ref(text)
    with pytest.raises(InvalidRequest, match="merge"):
        check_adapter_name(text)


def test_versions_that_unfinished_jobs_name_together_are_kept() -> None:
    spec = json.dumps({"teacher": TOGETHER, "targets": ["c+d@2*-1"], "prompts": ["mail me @ home + 1"]})
    assert versions_needed([spec, ""]) == {A, B, AdapterVersion("d", 2)}
