"""SFT jobs on a random model: learning, accumulation, evaluation, interruption, resume, limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.common.errors import DoesNotFit, InvalidRequest
from services.common.jobs import SftJob
from services.trainer.jobs import prepare_run
from services.trainer.jobs.base import RunState
from services.trainer.jobs.passes import complete
from services.trainer.jobs.sft import SftRun
from tests.training_support import TrainingHost, gradients, random_adapter, without_times

EXAMPLES = [{"prompt": f"What is {n} + {n}?", "completion": f"The answer is {2 * n}."} for n in range(6)]


def job(**fields: Any) -> SftJob:
    defaults = {
        "adapter": "a",
        "examples": EXAMPLES,
        "epochs": 2,
        "batch_size": 4,
        "learning_rate": 0.01,
        "lora": {"rank": 4},
        "max_tokens_per_microbatch": 128,
    }
    return SftJob.model_validate(defaults | fields)


def prepared(host: TrainingHost, parent: dict[str, bytes] | None = None, **fields: Any) -> SftRun:
    run = prepare_run(job(**fields), host, parent)
    assert isinstance(run, SftRun)
    return run


def test_training_reduces_the_loss(host: TrainingHost) -> None:
    run = prepared(host, epochs=6, eval_examples=EXAMPLES[:2], optimizer={"schedule": "cosine", "warmup_steps": 2})
    assert run.total_steps == 12
    history = [run.step(index) for index in range(run.total_steps)]
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert history[-1]["token_accuracy"] > history[0]["token_accuracy"]
    assert set(history[0]) == {
        "loss", "token_accuracy", "grad_norm", "learning_rate", "num_tokens", "tokens_per_second",
        "forward_seconds", "backward_seconds", "optimizer_seconds", "train_seconds",
    }  # fmt: skip
    evaluated = [metrics for metrics in history if "eval_loss" in metrics]
    assert len(evaluated) == 6
    assert evaluated[-1]["eval_loss"] < evaluated[0]["eval_loss"]
    assert 0 <= evaluated[-1]["eval_token_accuracy"] <= 1
    assert [round(metrics["learning_rate"], 4) for metrics in history[:3]] == [0.005, 0.01, 0.01]
    assert history[-1]["num_tokens"] == 6 * history[1]["num_tokens"]
    assert not host.gate.inside
    assert host.gate.gave_way > 0


def test_plain_text_is_learnt_beside_conversations(host: TrainingHost) -> None:
    text = "Once upon a time there was a compiler."
    run = prepared(host, examples=[{"text": text}, *EXAMPLES[:3]], epochs=8, optimizer={"schedule": "linear"})
    trained = {document.source: document.num_trained for document in run.batch(0)}
    assert trained[0] == len(host.codec.encode(text))  # all but the first, and the token that ends it
    history = [run.step(index) for index in range(run.total_steps)]
    assert history[-1]["loss"] < 0.6 * history[0]["loss"]
    assert history[-1]["learning_rate"] == pytest.approx(0.01 / 8)


def test_evaluation_schedule(host: TrainingHost) -> None:
    run = prepared(host, epochs=2, batch_size=1, eval_fraction=0.3, eval_every=3)
    assert run.total_steps == 8
    evaluated = [index for index in range(8) if "eval_loss" in run.step(index)]
    assert evaluated == [2, 5, 7]


def test_gradients_do_not_depend_on_the_microbatches(host: TrainingHost) -> None:
    parent = random_adapter(host)
    results = []
    for limit in (40, 128, 512):
        run = prepared(host, parent, batch_size=6, max_tokens_per_microbatch=limit)
        entered = host.gate.entered
        metrics, _ = run._accumulate(0, lambda: None)
        results.append((host.gate.entered - entered, metrics["loss"], gradients(run.lora)))
    assert results[0][0] > results[1][0] > results[2][0] == 1
    for _, loss, found in results[:2]:
        assert loss == pytest.approx(results[2][1], rel=1e-5)
        for name, wanted in results[2][2].items():
            assert float((found[name] - wanted).norm()) <= 1e-4 * float(wanted.norm()) + 1e-9, name


@pytest.mark.parametrize("stop", range(1, 4))
def test_resume_at_every_step_is_bitwise(host: TrainingHost, stop: int) -> None:
    fields = {"optimizer": {"schedule": "cosine", "warmup_steps": 1}, "eval_fraction": 0.2, "seed": 5}
    straight = prepared(host, **fields)
    curve = [straight.step(index) for index in range(straight.total_steps)]
    first = prepared(host, **fields)
    for index in range(stop):
        first.step(index)
    state = first.state()
    first.step(stop)  # what happens after a checkpoint does not change it
    second = prepared(host, **fields)
    assert second.load_state(state) == stop
    resumed = [second.step(index) for index in range(stop, second.total_steps)]
    for wanted, found in zip(curve[stop:], resumed, strict=True):
        assert without_times(wanted) == without_times(found)
    for left, right in zip(straight.lora.parameters(), second.lora.parameters(), strict=True):
        assert torch.equal(left, right)


def test_an_interrupted_step_changes_nothing(host: TrainingHost) -> None:
    class Cancelled(Exception):
        pass

    run = prepared(host, batch_size=6, max_tokens_per_microbatch=64)
    run.step(0)
    before = run.state()
    calls = 0

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        run.step(1, interrupt)
    after = run.state()
    assert after.data == before.data
    assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)
    straight = prepared(host, batch_size=6, max_tokens_per_microbatch=64)
    straight.step(0)
    straight.step(1)
    run.step(1)
    for left, right in zip(straight.lora.parameters(), run.lora.parameters(), strict=True):
        assert torch.equal(left, right)


def by_itself(run: SftRun, index: int, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
    return run.step(index, interrupt)


def as_a_course(run: SftRun, index: int, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
    return complete(run.stepping(index), interrupt)


@pytest.mark.parametrize("step", [by_itself, as_a_course])
@pytest.mark.parametrize("looks", range(4))  # at the microbatches of the step, and of what is held out
def test_what_goes_on_behind_an_interruption_tells_what_it_would_have_told(
    host: TrainingHost, looks: int, step: Callable[..., dict[str, float]]
) -> None:
    """Also where only the evaluation was left: in a pause of the job it must not lose the step's metrics."""

    class Paused(Exception):
        pass

    calls = 0

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls > looks:
            raise Paused

    held_out = EXAMPLES[:4]
    fields = {"batch_size": 6, "max_tokens_per_microbatch": 64, "eval_examples": held_out}
    straight = prepared(host, **fields)
    curve = [without_times(step(straight, index)) for index in range(2)]
    assert "eval_loss" in curve[1]
    run = prepared(host, **fields)
    step(run, 0)
    with pytest.raises(Paused):
        step(run, 1, interrupt)
    again = prepared(host, **fields)
    state = run.state()
    assert again.load_state(RunState(state.tensors, json.loads(json.dumps(state.data)))) == 1
    for one in (run, again):
        assert without_times(step(one, 1)) == curve[1]
        with pytest.raises(ValueError, match="step 1"):
            step(one, 1)
        for left, right in zip(straight.lora.parameters(), one.lora.parameters(), strict=True):
            assert torch.equal(left, right)


def test_steps_come_in_order_and_states_from_the_same_job(host: TrainingHost) -> None:
    run = prepared(host)
    with pytest.raises(ValueError, match="step 1"):
        run.step(1)
    with pytest.raises(InvalidRequest, match="another job"):
        prepared(host, seed=1).load_state(run.state())


def test_every_example_is_seen_once_an_epoch(host: TrainingHost) -> None:
    run = prepared(host)
    for epoch in range(2):
        seen = [document.source for index in (0, 1) for document in run.batch(2 * epoch + index)]
        assert sorted(seen) == list(range(6))
    assert [d.source for d in prepared(host, shuffle=False).batch(0)] == [0, 1, 2, 3]


def test_continuing_an_adapter(host: TrainingHost) -> None:
    parent = random_adapter(host, rank=4)
    fresh, continued = prepared(host), prepared(host, parent, lora={})
    assert float(fresh.step(0)["loss"]) != float(continued.step(0)["loss"])
    with pytest.raises(InvalidRequest, match=r"lora.rank is 8, but the adapter this job continues has 4"):
        prepared(host, parent, lora={"rank": 8})
    with pytest.raises(InvalidRequest, match="target_modules"):
        prepared(host, parent, lora={"target_modules": ["q_proj"]})
    # The defaults of fields that were not given do not count, also after a trip through the queue.
    spec = SftJob.model_validate_json(job(lora={}).model_dump_json())
    assert prepare_run(spec, host, parent).total_steps == 4


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "self"])
def test_template_variables_cannot_replace_the_conversation(host: TrainingHost, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"must not contain {name}"):
        prepared(host, chat_template_kwargs={name: 1})


def test_limits(host: TrainingHost) -> None:
    # A document over the packing size trains alone.
    assert prepared(host, max_tokens_per_microbatch=16).total_steps == 4
    host.max_train_tokens = 128
    more = [*EXAMPLES, {"prompt": "x" * 300, "completion": "y"}]
    run = prepared(host, examples=more, overlong="drop")
    assert run.notes == ("1 documents over 128 tokens dropped: examples 6",)
    with pytest.raises(InvalidRequest, match=r"examples\[6\] has \d+ tokens, over this engine's limit of 128"):
        prepared(host, examples=more)
    with pytest.raises(InvalidRequest, match=r"eval_examples\[0\] has \d+ tokens"):
        prepared(host, eval_examples=more[-1:])
    host.max_lora_rank = 2
    with pytest.raises(InvalidRequest, match="up to rank 2"):
        prepared(host)


def test_a_job_that_does_not_fit_is_refused_with_the_numbers(host: TrainingHost) -> None:
    host.train_memory_bytes = 2**20
    with pytest.raises(DoesNotFit, match=r"needs .* MiB .*leaves 1.0 MiB"):
        prepared(host)
    assert host.gate.entered == 0


def test_a_device_without_memory_fails_the_job_in_words_and_leaves_it_as_it_was(
    host: TrainingHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(host, max_tokens_per_microbatch=40)
    run.step(0)
    before = run.state()
    forward = host.model.forward_train
    calls = 0

    def exhausted(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*arguments, **options)

    monkeypatch.setattr(host.model, "forward_train", exhausted)
    with pytest.raises(DoesNotFit, match=r'out of memory in step 1.*recompute to "full"'):
        run.step(1)
    assert not host.gate.inside
    after = run.state()
    assert after.data == before.data
    assert all(torch.equal(value, before.tensors[name]) for name, value in after.tensors.items())
    monkeypatch.undo()
    again = prepared(host, max_tokens_per_microbatch=40)
    again.load_state(before)
    assert run.step(1)["loss"] == again.step(1)["loss"]


@pytest.mark.parametrize("where", ["optimizer", "evaluation"])
def test_a_device_without_memory_behind_the_backward_pass_fails_the_job_in_words_too(
    where: str, host: TrainingHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(host, max_tokens_per_microbatch=40, eval_fraction=0.5)

    def exhausted(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    target, method = (run._optimizer, "step") if where == "optimizer" else (run, "_evaluate")
    monkeypatch.setattr(target, method, exhausted)
    with pytest.raises(DoesNotFit, match=r"out of memory in (step 0|the evaluation)"):
        run.step(0) if where == "optimizer" else run.evaluate()
    assert not host.gate.inside
