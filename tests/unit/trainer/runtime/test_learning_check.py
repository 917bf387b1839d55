"""What a job says of how well its own examples were learnt."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.queue.records import SPEC
from services.trainer.jobs import prepare_run
from services.trainer.jobs.adapter_run import evenly
from services.trainer.jobs.base import RunState
from services.trainer.jobs.passes import complete
from services.trainer.runtime.attempts.learning_check import LearningCheck
from tests.training_support import TrainingHost, through_a_checkpoint

PAIR = {"prompt": "hello", "completion": "Good day!"}
DATA: dict[str, dict[str, Any]] = {
    "sft": {"examples": [PAIR]},
    "dpo": {"examples": [{"prompt": "hello", "chosen": "Good day!", "rejected": "yo"}]},
    "kto": {"examples": [{**PAIR, "label": True}, {"prompt": "bye", "completion": "yo", "label": False}]},
    "grpo": {"prompt": "hello", "completions": ["Good day!", "yo"], "rewards": [1, 0]},
}


def trained(host: TrainingHost, kind: str, **fields: Any) -> tuple[dict[str, float], str | None]:
    """Metrics and note of a job that is run to its end."""
    spec = SPEC.validate_python({"kind": kind, "adapter": "greeter", **DATA[kind], **fields})
    run = prepare_run(spec, host, None)
    learning = LearningCheck(spec)
    complete(learning.begin(run, lambda: None))
    metrics: dict[str, float] = {}
    for index in range(run.total_steps):
        metrics |= run.step(index)
        learning.saw(metrics)
    found = complete(learning.end(run, metrics, lambda: None))
    return found, learning.note(run, metrics)


@pytest.mark.parametrize("kind", DATA)
def test_defaults_are_learnt_and_say_so(host: TrainingHost, kind: str) -> None:
    found, note = trained(host, kind)
    assert note is None
    assert found["loss_after"] < found["loss_before"]
    assert all(name.endswith(("_before", "_after")) for name in found)


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto"])
def test_what_is_hardly_learnt_says_what_to_change(host: TrainingHost, kind: str) -> None:
    found, note = trained(host, kind, epochs=1, learning_rate=1e-6)
    assert note is not None
    assert note.startswith("hardly learnt: the loss on its own examples was ")
    assert f"{found['loss_before']:.4g} before and is {found['loss_after']:.4g} after 1 steps" in note
    assert "leave epochs and learning_rate out, for the default here is epochs " in note
    assert "attached all the same" in note
    _, quiet = trained(host, kind, epochs=1, learning_rate=1e-6, attach=False)
    assert quiet is not None
    assert "attached" not in quiet


def test_only_what_is_below_the_default_is_to_be_left_out(host: TrainingHost) -> None:
    _, note = trained(host, "sft", epochs=31, learning_rate=1e-6)
    assert note is not None
    assert "leave learning_rate out, for the default here is learning_rate 0.002" in note


def test_a_resumed_job_knows_what_it_started_from(host: TrainingHost) -> None:
    spec = SPEC.validate_python({"kind": "sft", "adapter": "greeter", **DATA["sft"]})
    run = prepare_run(spec, host, None)
    first = LearningCheck(spec)
    complete(first.begin(run, lambda: None))
    run.step(0)
    state = first.stamp(run.state())
    resumed = LearningCheck(spec)
    resumed.restore(state)
    assert next(resumed.begin(run, lambda: None), None) is None, "examined again"
    start = prepare_run(spec, host, None).examine()["loss"]
    assert complete(resumed.end(run, {}, lambda: None))["loss_before"] == pytest.approx(start)


def test_an_examination_that_was_interrupted_is_made_when_the_job_goes_on(host: TrainingHost) -> None:
    spec = SPEC.validate_python({"kind": "sft", "adapter": "greeter", **DATA["sft"]})
    run = prepare_run(spec, host, None)
    first = LearningCheck(spec)
    next(first.begin(run, lambda: None))  # paused in the middle of it
    resumed = LearningCheck(spec)
    resumed.restore(through_a_checkpoint(first.stamp(run.state())))
    complete(resumed.begin(run, lambda: None))
    run.step(0)
    assert complete(resumed.end(run, {}, lambda: None)).keys() >= {"loss_before", "loss_after"}


def test_checkpoints_of_others(host: TrainingHost) -> None:
    spec = SPEC.validate_python({"kind": "sft", "adapter": "greeter", **DATA["sft"]})
    run = prepare_run(spec, host, None)
    old = LearningCheck(spec)
    old.restore(RunState({}, {"step": 3}))
    assert complete(old.end(run, {}, lambda: None)) == {}
    assert old.note(run, {}) is None
    with pytest.raises(InvalidRequest, match="unreadable"):
        LearningCheck(spec).restore(RunState({}, {"lesson_before": 3}))


def test_an_examination_changes_nothing(host: TrainingHost) -> None:
    for kind in DATA:
        spec = SPEC.validate_python({"kind": kind, "adapter": "greeter", **DATA[kind]})
        plain, examined = prepare_run(spec, host, None), prepare_run(spec, host, None)
        examined.examine()
        assert plain.step(0)["loss"] == pytest.approx(examined.step(0)["loss"])
        assert plain.lora.flat_b.equal(examined.lora.flat_b)


def test_examples_are_spread_and_bounded() -> None:
    assert evenly([10] * 5, 1000) == [0, 1, 2, 3, 4]
    assert evenly([10] * 100, 50) == [0, 20, 40, 60, 80]
    assert evenly([10_000] * 3, 50) == [0]
    assert evenly([10_000] * 4, 50, least=2) == [0, 2]
