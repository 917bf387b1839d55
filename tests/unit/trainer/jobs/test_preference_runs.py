"""DPO and KTO jobs on a random model: learning, microbatches, evaluation, resume, interruption, bad pairs."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from services.common.errors import InvalidRequest
from services.common.jobs import DpoJob
from services.common.jobs.documents import completion_document
from services.common.queue.records import SPEC
from services.trainer.jobs import prepare_run
from services.trainer.jobs.dpo import DpoRun
from services.trainer.jobs.kto import KtoRun, mismatched
from services.trainer.jobs.preference_run import PreferenceRun
from services.trainer.packing import pack_together
from tests.training_support import CPU, TrainingHost, gradients, random_adapter, without_times

PAIRS = [
    {"prompt": f"What is {n} + {n}?", "chosen": f"The answer is {2 * n}.", "rejected": f"I do not know {n}."}
    for n in range(6)
]
RATED = [
    {"prompt": pair["prompt"], "completion": pair["chosen" if number % 3 else "rejected"], "label": bool(number % 3)}
    for number, pair in enumerate(PAIRS)
]
SHARED = {"adapter": "a", "batch_size": 3, "learning_rate": 0.01, "lora": {"rank": 4}, "max_tokens_per_microbatch": 128}


def prepared(host: TrainingHost, kind: str, parent: dict[str, bytes] | None = None, **fields: Any) -> PreferenceRun:
    examples = {"dpo": PAIRS, "kto": RATED}[kind]
    if parent is not None:
        fields = {"lora": {}, **fields}
    run = prepare_run(SPEC.validate_python(SHARED | {"kind": kind, "examples": examples} | fields), host, parent)
    assert isinstance(run, {"dpo": DpoRun, "kto": KtoRun}[kind])
    return run


def test_dpo_learns_the_preference(host: TrainingHost) -> None:
    run = prepared(host, "dpo", epochs=6, eval_examples=PAIRS[:2])
    assert run.total_steps == 12
    history = [run.step(index) for index in range(12)]
    # The first step compares the base model with itself.
    assert history[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert history[0]["margin"] == pytest.approx(0.0, abs=1e-4)
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert history[-1]["accuracy"] == 1
    assert history[-1]["rewards_chosen"] > history[-1]["rewards_rejected"]
    assert set(history[0]) == {
        "loss", "rewards_chosen", "rewards_rejected", "margin", "accuracy", "logps_chosen", "logps_rejected",
        "grad_norm", "learning_rate", "num_tokens", "tokens_per_second",
        "reference_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "train_seconds",
    }  # fmt: skip
    evaluated = [metrics for metrics in history if "eval_loss" in metrics]
    assert len(evaluated) == 6
    assert evaluated[-1]["eval_loss"] < evaluated[0]["eval_loss"]
    assert evaluated[-1]["eval_margin"] > evaluated[0]["eval_margin"]
    assert evaluated[-1]["eval_accuracy"] == 1
    assert not host.gate.inside


def test_kto_learns_from_thumbs(host: TrainingHost) -> None:
    run = prepared(host, "kto", epochs=6, eval_examples=RATED[:2])
    history = [run.step(index) for index in range(run.total_steps)]
    assert history[0]["loss"] == pytest.approx(0.5, abs=1e-4)
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-3)
    assert all(metrics["kl"] >= 0 for metrics in history)
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]
    evaluated = [metrics for metrics in history if "eval_loss" in metrics]
    assert evaluated[-1]["eval_margin"] > 0.5
    assert evaluated[-1]["eval_rewards_desirable"] > evaluated[-1]["eval_rewards_undesirable"]


def test_a_step_with_one_label_reports_that_one(host: TrainingHost) -> None:
    run = prepared(host, "kto", batch_size=2, shuffle=False, examples=[RATED[0], RATED[3], *RATED[1:3]])
    first = run.step(0)
    assert "rewards_undesirable" in first
    assert "rewards_desirable" not in first
    assert "margin" not in first


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_gradients_do_not_depend_on_the_microbatches(host: TrainingHost, kind: str) -> None:
    parent = random_adapter(host)
    results = []
    for limit in (30, 128, 2048):
        run = prepared(host, kind, parent, batch_size=6, max_tokens_per_microbatch=limit, beta=0.5)
        metrics, inputs = run._accumulate(0, lambda: None)
        results.append((metrics, inputs, gradients(run.lora)))
    for metrics, inputs, found in results[:2]:
        assert metrics == pytest.approx(results[2][0], rel=1e-4, abs=1e-5)
        assert inputs == results[2][1]
        for name, wanted in results[2][2].items():
            assert float((found[name] - wanted).norm()) <= 1e-4 * float(wanted.norm()) + 1e-9, name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stop", range(1, 4))
@pytest.mark.parametrize("kind", ["dpo", "dpo from start", "kto"])
def test_resume_at_every_step_is_bitwise(host: TrainingHost, kind: str, stop: int) -> None:
    parent = random_adapter(host)
    fields: dict[str, Any] = {"epochs": 2, "eval_fraction": 0.34, "eval_every": 1, "batch_size": 2, "seed": 3}
    if kind == "dpo from start":
        fields["reference"] = "start"
    kind = kind.split()[0]
    straight = prepared(host, kind, parent, **fields)
    assert straight.total_steps == 4
    curve = [straight.step(index) for index in range(4)]
    first = prepared(host, kind, parent, **fields)
    for index in range(stop):
        first.step(index)
    state = first.state()
    first.step(stop)  # what happens after a checkpoint does not change it
    second = prepared(host, kind, parent, **fields)
    assert second.load_state(state) == stop
    for index in range(stop, 4):
        assert without_times(second.step(index)) == without_times(curve[index])
    for left, right in zip(straight.lora.parameters(), second.lora.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_an_interrupted_step_changes_nothing(host: TrainingHost, kind: str) -> None:
    class Cancelled(Exception):
        pass

    fields: dict[str, Any] = {"max_tokens_per_microbatch": 40, "epochs": 2}
    straight = prepared(host, kind, **fields)
    curve = [straight.step(index) for index in range(2)]
    run = prepared(host, kind, **fields)
    run.step(0)
    before = run.state()
    for stop in (1, 4, 6):
        calls = iter(range(stop))

        def interrupt(calls: Any = calls) -> None:
            if next(calls, None) is None:
                raise Cancelled

        with pytest.raises(Cancelled):
            run.step(1, interrupt)
        after = run.state()
        assert after.data == before.data
        assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)
    assert without_times(run.step(1)) == without_times(curve[1])


def test_the_reference_is_computed_once(host: TrainingHost) -> None:
    run = prepared(host, "dpo", epochs=2, max_tokens_per_microbatch=4096)
    entered = []
    for index in range(4):
        before = host.gate.entered
        run.step(index)
        entered.append(host.gate.entered - before)
    # Reference, gradients, optimizer; in the second epoch the reference is known.
    assert entered == [3, 3, 2, 2]
    assert len(run.state().tensors["reference.sources"]) == 12


def test_the_start_as_reference(host: TrainingHost) -> None:
    parent = random_adapter(host, scale=0.2)
    # At first the policy is its reference: no margin, whatever the parent prefers.
    start = prepared(host, "dpo", parent, reference="start")
    assert start.step(0)["margin"] == pytest.approx(0, abs=1e-4)
    base = prepared(host, "dpo", parent)
    assert abs(base.step(0)["margin"]) > 1e-3
    # A new adapter starts as the base model, and needs no scoring before the first step.
    assert without_times(prepared(host, "dpo", reference="start").step(0)) == without_times(
        prepared(host, "dpo").step(0)
    )


def test_pairs_that_prefer_nothing_are_named(host: TrainingHost, monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"prompt": "x", "chosen": "yes", "rejected": "yes"}
    with pytest.raises(ValueError, match=r"examples.1\n.*chosen and rejected are the same text"):
        DpoJob.model_validate({"adapter": "a", "examples": [PAIRS[0], same]})
    # Qwen's tokenizer composes accents, the one of this test does not.
    plain = host.codec.encode_completion
    monkeypatch.setattr(host.codec, "encode_completion", lambda text: plain(unicodedata.normalize("NFC", text)))
    composed = {"prompt": "x", "chosen": "\u00e9", "rejected": "e\u0301"}
    with pytest.raises(InvalidRequest, match=r"examples\[1\]: chosen and rejected are the same tokens"):
        prepared(host, "dpo", examples=[PAIRS[0], composed])


def test_limits(host: TrainingHost) -> None:
    long = {"prompt": "x", "chosen": "y" * 300, "rejected": "z"}
    host.max_train_tokens = 128
    with pytest.raises(InvalidRequest, match=r"examples\[6\] has \d+ tokens, over .* set overlong to drop"):
        prepared(host, "dpo", examples=[*PAIRS, long])
    run = prepared(host, "dpo", examples=[*PAIRS, long], overlong="drop")
    assert run.notes == ("1 examples over 128 tokens dropped: examples 6",)
    assert (run.total_steps, run.settings["epochs"]) == (20, 10)  # 6 pairs are 2 steps an epoch
    rated = [{"prompt": "x", "completion": "y" * 300, "label": False}, *(row for row in RATED if row["label"])]
    with pytest.raises(InvalidRequest, match=r"that are left to train on all have label true: KTO needs both"):
        prepared(host, "kto", examples=rated, overlong="drop")
    with pytest.raises(ValidationError, match="holds one example out, and evaluations need at least 2"):
        prepared(host, "kto", eval_fraction=0.1)
    with pytest.raises(ValidationError, match="leaves one example to train on"):
        prepared(host, "kto", eval_fraction=0.9)
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    with pytest.raises(InvalidRequest, match=r"examples\[0\]: .*never closes it"):
        prepared(host, "dpo", **thinking)


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        ("dpo", {"beta": 0}, "beta"),
        ("dpo", {"beta": 1e9}, "beta"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing"),
        ("dpo", {"learning_rate": 2}, "learning_rate"),
        ("dpo", {"reference": "teacher"}, "reference"),
        ("dpo", {"overlong": "truncate"}, "overlong"),
        ("dpo", {"examples": [{"prompt": "x", "messages": [], "chosen": "a", "rejected": "b"}]}, "one of prompt"),
        ("dpo", {"examples": [{"messages": [], "chosen": "a", "rejected": "b"}]}, "must end with the turn"),
        ("kto", {"examples": RATED[1:3]}, "every label is true.*sft"),
        ("kto", {"examples": [RATED[0], RATED[3]]}, "every label is false"),
        ("kto", {"batch_size": 1}, "batch_size"),
        ("kto", {"desirable_weight": 0}, "desirable_weight"),
        ("kto", {"eval_examples": RATED[:1]}, "at least 2 examples"),
    ],
)
def test_bad_jobs_straight_from_the_queue(kind: str, fields: dict[str, Any], says: str) -> None:
    examples = {"dpo": PAIRS, "kto": RATED}[kind]
    assert SPEC.validate_python(SHARED | {"kind": kind, "examples": examples}).kind == kind
    with pytest.raises(ValueError, match=f"(?s){says}"):
        SPEC.validate_python(SHARED | {"kind": kind, "examples": examples} | fields)


def test_mismatched_pairs() -> None:
    documents = [completion_document([1, 2], [3], 0), completion_document([4], [5, 6], 1)]
    assert [list(document.token_ids) for document in mismatched(documents, 10)] == [[4, 3], [1, 2, 5, 6]]
    assert [document.num_trained for document in mismatched(documents, 10)] == [1, 2]
    # A prompt that is too long for this completion keeps its end.
    assert [list(document.token_ids) for document in mismatched(documents, 3)] == [[4, 3], [2, 5, 6]]


def test_pairs_are_packed_together_where_they_fit() -> None:
    def pair(first: int, *lengths: int) -> list[Any]:
        return [completion_document([1] * (length - 1), [2], first + at) for at, length in enumerate(lengths)]

    pairs = [pair(0, 9, 5), pair(2, 30, 5), pair(4, 4, 3)]
    packed = pack_together(pairs, 16, CPU)
    sources = sorted(sorted(document.source for document in batch.documents) for batch in packed)
    assert sorted(source for batch in sources for source in batch) == list(range(6))
    assert any({0, 1} <= set(batch) for batch in sources)
    assert any({4, 5} <= set(batch) for batch in sources)
    assert [2] in sources
    assert all(batch.num_tokens <= 16 or len(batch.documents) == 1 for batch in packed)
