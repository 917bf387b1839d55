"""Draft jobs as data: their examples, and those that follow on other jobs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from services.common.adapters.drafter_form import MTP_FORM, DrafterForm
from services.common.adapters.names import AdapterVersion
from services.common.jobs import DraftJob, GrpoJob, OpdJob, SftJob
from services.common.jobs.kinds.draft import refresh

ASKED = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "yo"}
VERSION = AdapterVersion("polite", 3)


@pytest.mark.parametrize(
    ("example", "answered"),
    [
        ({"prompt": "hi", "completion": "yo"}, True),
        ({"messages": [ASKED, SAID]}, True),
        ({"text": "Once upon a time"}, True),
        ({"prompt": "hi"}, False),
        ({"prompt": [ASKED]}, False),
        ({"messages": [ASKED, SAID, ASKED]}, False),
        ({"prompt_token_ids": [1, 2]}, False),
    ],
)
def test_an_example_has_an_answer_or_gets_one(example: dict[str, Any], answered: bool) -> None:
    (found,) = DraftJob.model_validate({"adapter": "sharp", "examples": [example]}).examples
    assert found.answered is answered


@pytest.mark.parametrize(
    "example",
    [
        {},
        {"completion": "yo"},
        {"prompt": "hi", "text": "ho"},
        {"messages": [ASKED, SAID], "completion": "yo"},
        {"messages": [SAID]},
        {"messages": []},
        {"prompt": [ASKED, SAID]},
        {"prompt_token_ids": [1], "tools": [{}]},
        {"text": "ho", "tools": [{}]},
    ],
)
def test_an_example_of_no_form_is_refused(example: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DraftJob.model_validate({"adapter": "sharp", "examples": [example]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": 4}, "block is of block drafters"),
        ({"form": "mtp", "layers": 2}, "layers is of block drafters"),
        ({"form": "block", "depth": 2}, "a block drafter learns its block"),
        ({"form": "block", "block": 17}, "less than or equal to 16"),
        ({"form": "block", "layers": 5}, "less than or equal to 4"),
    ],
)
def test_fields_of_the_other_form_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DraftJob.model_validate({"adapter": "sharp", "examples": [{"text": "ho"}], **fields})


def test_the_form_that_it_makes() -> None:
    def made(before: DrafterForm | None, **fields: Any) -> DrafterForm:
        spec = DraftJob.model_validate({"adapter": "sharp", "examples": [{"text": "ho"}], **fields})
        return spec.form_from(before)

    assert made(None) == made(MTP_FORM) == made(MTP_FORM, depth=2) == MTP_FORM
    assert made(None, form="block") == made(MTP_FORM, form="block") == DrafterForm(8, 1)
    assert made(MTP_FORM, form="block", block=12, layers=2) == DrafterForm(12, 2)
    assert made(DrafterForm(12, 2)) == made(DrafterForm(12, 2), form="block") == DrafterForm(12, 2)


def follow(spec: SftJob | GrpoJob | OpdJob) -> list[dict[str, Any]]:
    found = refresh(spec, VERSION, "sharp", metadata={"refreshes_for": "job-1"})
    assert (found.adapter, found.target, found.overlong) == ("sharp", "polite@3", "drop")
    return [example.model_dump(exclude_none=True) for example in found.examples]


def test_it_follows_on_the_examples_of_an_sft_job() -> None:
    examples = [{"prompt": f"{n}", "completion": "yo", "tools": None} for n in range(12)] + [{"text": "ho"}] * 2
    spec = SftJob.model_validate({"adapter": "polite", "examples": examples, "draft": True, "seed": 7})
    found = follow(spec)
    assert found == [{"prompt": f"{n}", "completion": "yo"} for n in range(12)] + [{"text": "ho"}]
    made = refresh(spec, VERSION, "sharp", metadata={})
    assert (made.eval_fraction, made.seed) == (0.1, 7)
    assert made == refresh(spec, VERSION, "sharp", metadata={})  # a repeated end submits the same job
    many = [{"prompt": f"{n}", "completion": "yo"} for n in range(2500)]
    assert 800 <= len(follow(SftJob.model_validate({"adapter": "polite", "examples": many}))) <= 1000


def test_it_follows_on_the_prompts_of_jobs_that_sample() -> None:
    generate = {"prompts": ["2+2", {"prompt_token_ids": [1, 2], "answer": "3"}], "rounds": 1, "max_tokens": 8}
    reward = {"reward": [{"type": "regex", "pattern": "x"}]}
    sampled = GrpoJob.model_validate({"adapter": "polite", "generate": generate | reward})
    assert follow(sampled) == [{"prompt": "2+2"}, {"prompt_token_ids": [1, 2]}]
    assert refresh(sampled, VERSION, "sharp", metadata={}).max_tokens == 8
    scored = {"prompt": "2+2", "completions": ["4", "5"], "rewards": [1, 0]}
    assert follow(GrpoJob.model_validate({"adapter": "polite", **scored})) == [{"prompt": "2+2"}]
    taught = {"adapter": "polite", "teacher": "base", "prompts": ["a", {"messages": [ASKED]}], "rounds": 1}
    found = follow(OpdJob.model_validate({**taught, "max_tokens": 900}))
    assert [sorted(one) for one in found] == [["prompt"], ["messages"]]
    assert refresh(OpdJob.model_validate({**taught, "max_tokens": 900}), VERSION, "s", metadata={}).max_tokens == 256


def test_jobs_without_it_are_written_as_before() -> None:
    assert "draft" not in SftJob.model_validate({"adapter": "a", "examples": [{"text": "ho"}]}).model_dump()
