"""What a distillation job may ask for."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from services.common.adapters.names import AdapterVersion
from services.common.jobs import OpdJob

JOB: dict[str, Any] = {"adapter": "a", "prompts": ["x", "y"], "teacher": "base", "rounds": 2, "max_tokens": 8}
ANSWERED: dict[str, Any] = {"prompts": [{"prompt": "x", "completion": "z"}]}


def job(**fields: Any) -> OpdJob:
    return OpdJob.model_validate(JOB | fields)


def test_defaults() -> None:
    made = job()
    assert (made.lmbda, made.beta, made.temperature, made.loss) == (1, 1, 1, "divergence")
    assert made.checkpoint_every == 1
    assert made.round_prompts == made.step_prompts == 2
    assert made.teacher_version is None
    assert OpdJob.model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize(
    ("teacher", "version"), [("base", None), ("checkpoint", None), ("polite@3", AdapterVersion("polite", 3))]
)
def test_teachers(teacher: str, version: AdapterVersion | None) -> None:
    assert job(teacher=teacher).teacher_version == version


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"beta": -0.01}, "beta"),
        ({"beta": 1.01}, "beta"),
        ({"beta": float("nan")}, "beta"),
        ({"lmbda": -0.5}, "lmbda"),
        ({"lmbda": 1.5}, "lmbda"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"sampling_temperature": -1}, "sampling_temperature"),
        ({"learning_rate": 2}, "learning_rate"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"rounds": 0}, "rounds"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompts": []}, "prompts"),
        ({"prompts": [{"prompt": "x", "prompt_token_ids": [1]}]}, "exactly one of prompt, messages, prompt_token_ids"),
        ({"prompts": [{"prompt_token_ids": [-1]}]}, "prompt_token_ids"),
        ({"prompts": [{"prompt_token_ids": []}]}, "prompt_token_ids"),
        ({"prompts": [{"prompt": "x", "answer": "y"}]}, "answer"),
        (
            ANSWERED | {"lmbda": 0.5, "prompts": [{"prompt": "x", "completion": "a", "completion_token_ids": [1]}]},
            "both",
        ),
        ({"lmbda": 0.5}, r"lmbda is 0\.5.*prompts\[0\] has none"),
        (ANSWERED, r"prompts\[0\] has a completion, which lmbda 1 never uses"),
        ({"prompts_per_round": 3}, "there are 2 prompts"),
        ({"prompts_per_round": 1, "prompts_per_step": 2}, "a round has 1 prompts"),
        ({"eval_every": 1}, "eval_every needs eval_prompts"),
        ({"teacher": "polite"}, "name the version"),
        ({"teacher": "polite@0"}, "positive number"),
        ({"teacher": "../x@1"}, "adapter name"),
        ({"teacher": ""}, "adapter name"),
        ({"loss": "sampled_reverse_kl", "beta": 0.5}, "beta would do nothing"),
        ({"loss": "sampled_reverse_kl", "temperature": 2}, "temperature would do nothing"),
        ({"loss": "sampled_reverse_kl", "sampling_temperature": 0}, "sampling_temperature above 0"),
        (ANSWERED | {"loss": "sampled_reverse_kl", "lmbda": 0.5}, "sampled_reverse_kl needs lmbda 1"),
        ({"loss": "mse"}, "loss"),
        ({"top_p": 0.9}, "top_p"),
    ],
)
def test_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        job(**fields)


def test_the_teacher_is_required() -> None:
    with pytest.raises(ValidationError, match="teacher"):
        OpdJob.model_validate({name: value for name, value in JOB.items() if name != "teacher"})
