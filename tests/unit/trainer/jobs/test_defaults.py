"""What the trainer chooses where a job names nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.jobs import JOBS, DpoJob, KtoJob, SftJob
from services.common.queue.records import SPEC, spec_json, spec_sha, text_sha
from services.trainer.jobs import prepare_run
from tests.training_support import TrainingHost


@pytest.mark.parametrize(
    ("method", "examples", "steps_per_epoch", "expected"),
    [
        ("sft", 1, 1, 30),
        ("sft", 2, 1, 30),
        ("sft", 8, 1, 30),
        ("sft", 9, 2, 15),
        ("sft", 40, 5, 6),
        ("sft", 79, 10, 3),
        ("sft", 8_000, 1_000, 3),
        ("sft", 8_400, 1_050, 2),
        ("sft", 100_000, 12_500, 1),
        ("sft", 100_000, 1, 30),
        ("dpo", 1, 1, 20),
        ("kto", 64, 8, 3),
        ("dpo", 1_000, 125, 1),
    ],
)
def test_epochs_make_steps(method: str, examples: int, steps_per_epoch: int, expected: int) -> None:
    assert JOBS[method].pace.passes(examples, steps_per_epoch) == expected


def test_the_rate_falls_with_the_width() -> None:
    assert JOBS["sft"].pace.rate(2560) == pytest.approx(2e-4)
    assert JOBS["sft"].pace.rate(256) == pytest.approx(2e-3)
    assert JOBS["sft"].pace.rate(64) == JOBS["sft"].pace.rate(256)
    assert JOBS["sft"].pace.rate(5120) == JOBS["sft"].pace.rate(20_000) == pytest.approx(1e-4)
    assert JOBS["dpo"].pace.rate(2560) == JOBS["kto"].pace.rate(2560) == pytest.approx(2e-5)


def job(**fields: Any) -> SftJob:
    return SftJob.model_validate(
        {"adapter": "greeter", "examples": [{"prompt": "hello", "completion": "Good day!"}], **fields}
    )


def test_what_is_named_is_what_is_used(host: TrainingHost) -> None:
    chosen = prepare_run(job(), host, None)
    assert chosen.settings == {"learning_rate": 2e-3, "steps": 30, "lora_rank": 16, "epochs": 30, "batch_size": 8}
    assert chosen.defaults == {"epochs": 30, "learning_rate": 2e-3}
    assert chosen.total_steps == 30
    for fields in (
        {"epochs": 3, "learning_rate": 1e-4},
        {"epochs": 3, "optimizer": {"learning_rate": 1e-4}},
    ):
        named = prepare_run(job(**fields, lora={"rank": 4}), host, None)
        assert named.settings == {"learning_rate": 1e-4, "steps": 3, "lora_rank": 4, "epochs": 3, "batch_size": 8}
        assert named.defaults == chosen.defaults
        assert named.step(0)["learning_rate"] == 1e-4


def test_what_is_open_is_written_nowhere() -> None:
    """A spec's JSON stays what it is for old readers, and numbers of old specs stay theirs."""
    text = spec_json(job())
    assert '"epochs"' not in text
    assert '"learning_rate":null' in text
    assert '"learning_rate":0' not in text
    old = {**json.loads(text), "epochs": 3}
    old["optimizer"]["learning_rate"] = 1e-4
    again = SPEC.validate_python(old)
    assert isinstance(again, SftJob)
    assert (again.epochs, again.named_learning_rate) == (3, 1e-4)
    assert json.loads(spec_json(again)) == old


def test_an_idempotency_key_knows_a_submission_from_before() -> None:
    """The first release wrote its defaults into what the key stands for."""
    before = job(epochs=3, optimizer={"learning_rate": 1e-4})
    assert spec_sha(job()) == spec_sha(before) == text_sha(spec_json(before))
    assert spec_sha(job(epochs=4)) != spec_sha(job())
    assert spec_sha(job(learning_rate=1e-4)) != spec_sha(job())


@pytest.mark.parametrize("kind", [DpoJob, KtoJob])
def test_preference_jobs_leave_epochs_open_too(kind: type[DpoJob] | type[KtoJob]) -> None:
    assert kind.model_fields["epochs"].default is None
