"""Jobs whose passes are computed together learn what each would learn alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import InvalidRequest
from services.common.jobs import SftJob
from services.trainer.jobs import prepare_run
from services.trainer.jobs.passes import Pass, complete, compute_together
from services.trainer.jobs.sft import SftRun
from tests.training_support import TrainingHost, random_adapter, without_times, write_checkpoint


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory, tokenizer_files: dict[str, bytes]) -> Path:
    """Checkpoint of small weights: with larger ones a rounding grows a thousandfold in some steps, also alone."""
    return write_checkpoint(tmp_path_factory.mktemp("smooth"), tokenizer_files, initializer_range=0.05)


@pytest.fixture
def host(smooth: Path) -> TrainingHost:
    return TrainingHost(smooth)


def job(number: int, **fields: Any) -> SftJob:
    """Jobs that differ in all that is a job's own."""
    own = {
        "adapter": f"a{number}",
        "examples": [
            {"prompt": f"What is {n} + {number}?", "completion": f"It is {n + number}."} for n in range(4 + number)
        ],
        "epochs": 1 + number % 2,
        "batch_size": 2 + number,
        "learning_rate": 0.004 * (1 + number),
        "optimizer": {
            "schedule": ("constant", "linear", "cosine")[number % 3],
            "warmup_steps": number,
            "max_grad_norm": 0.05 * (1 + number),
        },
        "eval_fraction": 0.3,
        "seed": number,
        "lora": {"rank": 4, "alpha": 8.0, "seed": number},
        "max_tokens_per_microbatch": 512,
    }
    return SftJob.model_validate(own | fields)


def prepared(host: TrainingHost, number: int, **fields: Any) -> SftRun:
    run = prepare_run(job(number, **fields), host, random_adapter(host, rank=4, seed=number))
    assert isinstance(run, SftRun)
    return run


Curve = list[dict[str, float]]


def curve_alone(run: SftRun) -> Curve:
    return [without_times(run.step(index)) for index in range(run.total_steps)]


def curves_together(runs: Sequence[SftRun], goes_on: Callable[[Pass], bool] = lambda _: True) -> list[Curve]:
    """Each run's steps, as far as it goes on; one that has ended leaves the others to themselves."""
    curves: list[Curve] = [[] for _ in runs]

    def course(run: SftRun, curve: Curve) -> Any:
        for index in range(run.total_steps):
            curve.append(without_times((yield from run.stepping(index))))

    courses = {number: course(run, curves[number]) for number, run in enumerate(runs)}
    wanted: dict[int, Pass] = {}
    for number, one in list(courses.items()):
        wanted[number] = next(one)
    while wanted:
        for trained in (True, False):
            group = {number: one for number, one in wanted.items() if one.trained is trained}
            if not group:
                continue
            compute_together(list(group.values()), lambda: None, goes_on)
            for number, one in group.items():
                following = next(courses[number], None) if goes_on(one) else None
                wanted.pop(number)
                if following is not None:
                    wanted[number] = following
    return curves


def assert_same(found: Curve, expected: Curve) -> None:
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert left.keys() == right.keys()
        for name, value in right.items():
            assert left[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_every_job_learns_as_if_alone(host: TrainingHost) -> None:
    alone = [prepared(host, number) for number in range(4)]
    expected = [curve_alone(run) for run in alone]
    entered = host.gate.entered
    together = [prepared(host, number) for number in range(4)]
    curves = curves_together(together)
    steps = sum(run.total_steps for run in alone)
    assert host.gate.entered - entered - steps < (entered - steps) / 2, "fewer forwards"
    for found, wanted in zip(curves, expected, strict=True):
        assert_same(found, wanted)
    for left, right in zip(together, alone, strict=True):
        state, wanted_state = left.state(), right.state()
        assert state.data == wanted_state.data
        assert state.tensors.keys() == wanted_state.tensors.keys()
        for name, tensor in wanted_state.tensors.items():
            assert torch.allclose(state.tensors[name].float(), tensor.float(), rtol=1e-3, atol=1e-5), name


def test_a_document_over_the_packing_size_is_alone_in_its_forward(host: TrainingHost) -> None:
    runs = [prepared(host, number, max_tokens_per_microbatch=16) for number in range(2)]
    expected = [curve_alone(prepared(host, number, max_tokens_per_microbatch=16)) for number in range(2)]
    for found, wanted in zip(curves_together(runs), expected, strict=True):
        assert_same(found, wanted)


def test_one_that_does_not_go_on_changes_nothing_for_the_others(host: TrainingHost) -> None:
    expected = [curve_alone(prepared(host, number)) for number in range(3)]
    runs = [prepared(host, number) for number in range(3)]
    before = runs[1].state()
    curves = curves_together(runs, lambda one: one.run is not runs[1])
    assert curves[1] == []
    assert all(torch.equal(value, before.tensors[name]) for name, value in runs[1].state().tensors.items())
    for number in (0, 2):
        assert_same(curves[number], expected[number])
    assert_same(curve_alone(runs[1]), expected[1])


def test_one_that_diverges_fails_alone(host: TrainingHost) -> None:
    expected = curve_alone(prepared(host, 0))
    good, bad = prepared(host, 0), prepared(host, 1)
    with torch.no_grad():
        bad.lora.flat_b.fill_(float("nan"))
    steps = [good.stepping(0), bad.stepping(0)]
    compute_together([next(course) for course in steps], lambda: None, lambda _: True)
    with pytest.raises(InvalidRequest, match="training diverged at step 0"):
        next(steps[1])
    with pytest.raises(StopIteration) as ended:
        next(steps[0])
    rest = [without_times(good.step(index)) for index in range(1, good.total_steps)]
    assert_same([without_times(ended.value.value), *rest], expected)


def test_a_course_alone_is_the_step_bit_by_bit(host: TrainingHost) -> None:
    left, right = prepared(host, 1), prepared(host, 1)
    assert complete(left.examining()) == right.examine()
    for index in range(left.total_steps):
        assert without_times(complete(left.stepping(index))) == without_times(right.step(index))
    assert left.lora.flat_b.equal(right.lora.flat_b)


def test_seconds_and_tokens_of_a_shared_step_are_a_jobs_own(host: TrainingHost) -> None:
    runs = [prepared(host, number) for number in range(2)]
    steps = [run.stepping(0) for run in runs]
    wanted = [next(course) for course in steps]
    compute_together(wanted, lambda: None, lambda _: True)
    for course, run, one in zip(steps, runs, wanted, strict=True):
        metrics = complete(course)
        assert metrics["num_tokens"] == one.inputs <= run.step_tokens
        assert metrics["forward_seconds"] <= metrics["train_seconds"]
        assert metrics["tokens_per_second"] == pytest.approx(one.inputs / metrics["train_seconds"])
