"""publish_if: what each method promises to measure, it measures; and the condition through a checkpoint."""

from __future__ import annotations

import math
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.jobs import JOBS, JobBase, PublishIf
from services.common.queue.records import SPEC
from services.trainer.jobs import prepare_run
from services.trainer.jobs.base import RunState
from services.trainer.runtime.attempts.acceptance import Acceptance, NotPublished
from tests.training_support import TrainingHost, random_drafter

DATA: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": "hello", "completion": "Good day!"}, {"prompt": "hi", "completion": "Good day to you!"}],
    "dpo": [{"prompt": "hello", "chosen": "Good day!", "rejected": "What?"}] * 2,
    "kto": [
        {"prompt": "hello", "completion": "Good day!", "label": True},
        {"prompt": "hello", "completion": "What?", "label": False},
    ],
    "draft": [{"prompt": "hello", "completion": "Good day!"}, {"prompt": "hi", "completion": "Good day to you!"}],
}


def parent(host: TrainingHost, kind: str) -> dict[str, bytes] | None:
    """What a job starts from: the random model has no layer for a new drafter."""
    return random_drafter(host) if kind == "draft" else None


def job(kind: str, **fields: Any) -> Any:
    data = DATA[kind]
    return SPEC.validate_python({"kind": kind, "adapter": "a", "examples": data, "eval_examples": data, **fields})


def test_every_method_with_evaluations_is_tried_here() -> None:
    assert set(DATA) == {kind for kind, model in JOBS.items() if "eval_examples" in model.model_fields}


@pytest.mark.parametrize("kind", DATA)
def test_what_a_method_promises_it_measures(host: TrainingHost, kind: str) -> None:
    spec = job(kind, epochs=1)
    assert spec.eval_metrics
    run = prepare_run(spec, host, parent(host, kind))
    before = run.evaluate()
    assert spec.eval_metrics.keys() <= before.keys()
    metrics: dict[str, float] = {}
    for index in range(run.total_steps):
        metrics = run.step(index)
    assert spec.eval_metrics.keys() <= metrics.keys(), "the last step evaluates"
    again = run.evaluate()
    for name in spec.eval_metrics:
        assert math.isfinite(before[name])
        assert again[name] == pytest.approx(metrics[name], abs=1e-6)


@pytest.mark.parametrize("kind", DATA)
def test_nothing_held_out_is_nothing_measured(host: TrainingHost, kind: str) -> None:
    spec = job(kind, eval_examples=[])
    assert spec.eval_metrics == {}
    assert prepare_run(spec, host, parent(host, kind)).evaluate() == {}


def test_a_measurement_before_the_first_step_changes_no_bit(host: TrainingHost) -> None:
    """References that DPO computes for it are those that a run without it computes later."""
    results = []
    for measured in (False, True):
        run = prepare_run(job("dpo", epochs=2, batch_size=1), host, None)
        if measured:
            run.evaluate()
        for index in range(run.total_steps):
            run.step(index)
        results.append(run.lora.to_files("base"))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("metric", "better", "before", "after", "min_gain", "satisfied"),
    [
        ("eval_loss", "lower", 2.0, 1.5, 0.5, True),
        ("eval_loss", "lower", 2.0, 1.5, 0.51, False),
        ("eval_loss", "lower", 2.0, 2.0, 0.0, True),
        ("eval_loss", "lower", 2.0, 2.1, 0.0, False),
        ("eval_loss", "lower", 2.0, 2.1, -0.2, True),
        ("eval_accuracy", "higher", 0.5, 0.75, 0.25, True),
        ("eval_accuracy", "higher", 0.75, 0.5, 0.0, False),
        ("eval_loss", "lower", 2.0, math.nan, -1e9, False),
        ("eval_loss", "lower", math.inf, 1.0, 0.0, False),
    ],
)
def test_gains(metric: str, better: Any, before: float, after: float, min_gain: float, satisfied: bool) -> None:
    assert PublishIf(metric=metric, min_gain=min_gain).satisfied(before, after, better) is satisfied


class _Run:
    """Evaluates to what is put in."""

    def __init__(self, *values: dict[str, float]) -> None:
        self.values = list(values)

    def evaluate(self, interrupt: Any) -> dict[str, float]:
        interrupt()
        return self.values.pop(0)


def acceptance(min_gain: float = 0.5) -> Acceptance:
    spec = job("sft", publish_if={"metric": "eval_loss", "min_gain": min_gain})
    assert isinstance(spec, JobBase)
    return Acceptance(spec)


def test_the_start_travels_with_the_checkpoint() -> None:
    calls: list[None] = []
    first = acceptance()
    assert first.begin(_Run({"eval_loss": 2.0}), lambda: calls.append(None)) == {"eval_loss": 2.0}  # type: ignore[arg-type]
    state = first.stamp(RunState(data={"step": 3}))
    assert state.data == {"step": 3, "publish_if_before": 2.0}
    second = acceptance()
    second.restore(state)
    assert second.begin(_Run(), lambda: None) == {}  # type: ignore[arg-type]
    with pytest.raises(NotPublished, match=r"eval_loss was 2 before training and is 1\.6 after it, a gain of 0\.4"):
        second.check(_Run(), {"eval_loss": 1.6}, lambda: None)  # type: ignore[arg-type]
    assert second.check(_Run(), {"eval_loss": 1.5}, lambda: None) == {"start_eval_loss": 2.0}  # type: ignore[arg-type]
    # All steps were done before a restart: the end is measured again.
    assert second.check(_Run({"eval_loss": 1.0}), None, lambda: None)  # type: ignore[arg-type]
    assert len(calls) == 1


def test_a_checkpoint_without_the_start_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="before the first step"):
        acceptance().restore(RunState(data={"step": 3}))
    with pytest.raises(InvalidRequest, match="eval_examples"):
        acceptance().begin(_Run({}), lambda: None)  # type: ignore[arg-type]


def test_without_a_condition_nothing_is_measured() -> None:
    plain = Acceptance(job("sft"))
    assert plain.begin(_Run(), lambda: None) == {}  # type: ignore[arg-type]
    state = RunState(data={"step": 1})
    assert plain.stamp(state) is state
    plain.restore(state)
    assert plain.check(_Run(), None, lambda: None) == {}  # type: ignore[arg-type]
