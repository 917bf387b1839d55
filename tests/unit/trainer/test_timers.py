"""What a step says of where its time went: every method by the same names, and the parts are the whole."""

from __future__ import annotations

import time
from typing import Any

import pytest

from services.common.queue.records import SPEC
from services.trainer.jobs import prepare_run
from services.trainer.jobs.base import JobRun
from services.trainer.optimizer import ScheduledOptimizer
from tests.training_support import CountingGate, TrainingHost, random_adapter
from tests.unit.trainer.jobs.test_grpo_run import token_groups
from tests.unit.trainer.jobs.test_preference_runs import PAIRS, RATED
from tests.unit.trainer.jobs.test_sft_run import EXAMPLES

TRAINED = {"forward_seconds", "backward_seconds", "optimizer_seconds", "train_seconds"}


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowGate(CountingGate):
    """Every piece that is queued takes a second."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def give_way(self) -> None:
        super().give_way()
        self._clock.now += 1


@pytest.fixture
def clock(host: TrainingHost, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Goes on in pieces of the trainer and, by ten seconds, in the update of the parameters: nowhere else."""
    clock = Clock()
    host.gate = SlowGate(clock)
    update = ScheduledOptimizer.step

    def slow_update(optimizer: ScheduledOptimizer, index: int) -> dict[str, float]:
        clock.now += 10
        return update(optimizer, index)

    monkeypatch.setattr(ScheduledOptimizer, "step", slow_update)
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def prepared(host: TrainingHost, kind: str, **fields: Any) -> JobRun:
    learnt_from = {
        "sft": {"examples": EXAMPLES},
        "dpo": {"examples": PAIRS},
        "kto": {"examples": RATED},
        "grpo": {},
    }
    shared = {"kind": kind, "adapter": "a", "max_tokens_per_microbatch": 64}
    spec = SPEC.validate_python(shared | learnt_from[kind] | fields)
    return prepare_run(spec, host, random_adapter(host))


CASES: list[tuple[str, dict[str, Any], list[set[str]]]] = [
    ("sft", {"eval_fraction": 0.34, "eval_every": 1, "batch_size": 2, "epochs": 1}, [set(), set()]),
    # The reference says the same in every epoch, and is asked once.
    ("dpo", {"batch_size": 6, "epochs": 2}, [{"reference_seconds"}, set()]),
    ("dpo", {"batch_size": 6, "epochs": 2, "reference": "start"}, [{"reference_seconds"}, set()]),
    # But of the reference point, which each step estimates anew.
    ("kto", {"batch_size": 6, "epochs": 2, "eval_fraction": 0.34}, [{"reference_seconds"}, {"reference_seconds"}]),
    ("grpo", {"epochs": 2}, [set(), set()]),
    ("grpo", {"epochs": 2, "mismatch_correction": "token_mask"}, [set(), set()]),
    ("grpo", {"epochs": 2, "beta": 0.1}, [{"reference_seconds"}, {"reference_seconds"}]),
]


@pytest.mark.parametrize(("kind", "fields", "wanted"), CASES)
def test_the_parts_of_a_step_are_the_whole(
    host: TrainingHost, clock: Clock, kind: str, fields: dict[str, Any], wanted: list[set[str]]
) -> None:
    if kind == "grpo":
        fields = {**fields, "groups": token_groups(host, None, 2)}
    run = prepared(host, kind, **fields)
    for index, more in enumerate(wanted):
        metrics = run.step(index)
        times = {name: value for name, value in metrics.items() if name.endswith("_seconds")}
        evaluation = times.pop("eval_seconds", None)
        assert (evaluation is not None) == ("eval_loss" in metrics)
        assert set(times) == TRAINED | more
        whole = times.pop("train_seconds")
        assert sum(times.values()) == pytest.approx(whole, abs=1e-9)
        assert times["optimizer_seconds"] == 10
        # Four layers and a tile of the head in either direction.
        assert min(times.values()) >= 5
