"""Distillation jobs on the engine that serves the tiny trained model: they learn, resume bitwise, and refuse what
cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.tiny.recipe.skills import dates
from services.common.adapters.names import AdapterVersion
from services.common.errors import (
    AdapterRejected,
    CheckpointRejected,
    DoesNotFit,
    InvalidRequest,
    TemperError,
    Unavailable,
)
from services.common.jobs import OpdJob, SftJob
from services.common.text.tokenizer import TOKENIZER_FILES
from services.trainer.jobs import prepare_run
from services.trainer.jobs.base import RunState
from services.trainer.jobs.opd import OpdRun
from tests.rollout_support import TINY, MemoryRegistry, Pod, running_pod
from tests.tokenizer_support import qwen_like_tokenizer
from tests.training_support import Stepped, stepped, through_a_checkpoint, without_times, write_checkpoint

LEFT = 0.5
"""Share of the held-out divergence to the teacher that may be left; 0.21 and 0.40 with seeds 0 and 1, with the sampled
loss 0.22 and 0.33."""
TAUGHT = AdapterVersion("taught", 1)
SETTINGS: dict[str, Any] = {"max_lora_rank": 16, "max_num_seqs": 32, "token_budget": 512, "num_blocks": 1025}


def tiny_files() -> dict[str, bytes]:
    return {name: (TINY / name).read_bytes() for name in TOKENIZER_FILES if (TINY / name).exists()}


def taught_files(pod: Pod) -> dict[str, bytes]:
    """An adapter that supervised fine-tuning taught to add days to dates, which the tiny model gets wrong."""
    examples = [
        {"messages": [*item.messages, {"role": "assistant", "content": item.answer}]}
        for item in dates.items(0, 64, held_out=False)
    ]
    spec = SftJob.model_validate(
        {
            "adapter": "taught",
            "examples": examples,
            "epochs": 4,
            "batch_size": 8,
            "learning_rate": 1e-3,
            "lora": {"rank": 8, "alpha": 16},
        }
    )
    run = prepare_run(spec, pod.host, None)
    for index in range(run.total_steps):
        run.step(index)
    return run.lora.to_files("")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    second = write_checkpoint(
        tmp_path_factory.mktemp("second"), tiny_files(), vocab_size=2056, hidden_size=64, max_position_embeddings=1024
    )
    with running_pod(teacher_model=second, **SETTINGS) as pod:
        pod.registry.versions[TAUGHT] = taught_files(pod)
        yield pod


def asked(count: int, *, held_out: bool = False, answers: bool = False) -> list[dict[str, Any]]:
    return [
        {"messages": list(item.messages)} | ({"completion": item.answer} if answers else {})
        for item in dates.items(0, count, held_out=held_out)
    ]


def job(**fields: Any) -> OpdJob:
    defaults: dict[str, Any] = {
        "adapter": "student",
        "prompts": asked(4),
        "teacher": "taught@1",
        "rounds": 2,
        "prompts_per_round": 3,
        "max_tokens": 10,
        "learning_rate": 0.01,
        "lora": {"rank": 4},
        "seed": 3,
    }
    return OpdJob.model_validate(defaults | fields)


def prepared(pod: Pod, **fields: Any) -> OpdRun:
    run = prepare_run(job(**fields), pod.host, None)
    assert isinstance(run, OpdRun)
    return run


LEARNING: dict[str, Any] = {
    "prompts": asked(64),
    "eval_prompts": asked(16, held_out=True),
    "rounds": 5,
    "prompts_per_round": 12,
    "max_tokens": 14,
    "learning_rate": 3e-3,
}


@pytest.mark.thorough
def test_a_job_comes_near_its_teacher_on_what_it_has_not_seen(pod: Pod) -> None:
    """`python -m benchmarks.training.learning` has three seeds."""
    run = prepared(pod, **LEARNING, lora={"rank": 8, "alpha": 16, "seed": 0}, seed=0)
    history = [run.step(index) for index in range(run.total_steps)]
    before, after = history[0]["eval_divergence_before"], history[-1]["eval_divergence"]
    assert before > 0.05
    assert after <= LEFT * before, (before, after)
    assert history[-1]["divergence"] < history[0]["divergence"]
    assert history[-1]["eval_teacher_agreement"] > 0.95


@pytest.mark.thorough
def test_the_sampled_loss_learns_too(pod: Pod) -> None:
    run = prepared(pod, **LEARNING, lora={"rank": 8, "alpha": 16}, loss="sampled_reverse_kl")
    history = [run.step(index) for index in range(run.total_steps)]
    before, after = history[0]["eval_divergence_before"], history[-1]["eval_divergence"]
    assert after <= LEFT * before, (before, after)
    # The sampler and the trainer compute one policy.
    assert all(step["sampler_trainer_logprob_difference"] < 1e-4 for step in history)
    assert all(step["ratio_mean"] == pytest.approx(1, abs=1e-4) for step in history)


@pytest.mark.thorough
def test_a_second_checkpoint_teaches(pod: Pod) -> None:
    """Another hidden size, and a vocabulary padded to another width."""
    assert pod.host.teacher is not None
    assert pod.host.teacher.config.hidden_size == 64
    assert pod.host.teacher.config.vocab_size == 2056
    run = prepared(pod, teacher="checkpoint", prompts=asked(8), rounds=8, prompts_per_round=8, beta=0.0)
    history = [run.step(index) for index in range(run.total_steps)]
    assert history[-1]["divergence"] < 0.7 * history[0]["divergence"]
    parts = ("swap", "rollout", "teacher", "forward", "backward", "optimizer")
    assert all(step[f"{part}_seconds"] > 0 for step in history for part in parts)


def test_what_a_step_reports(pod: Pod) -> None:
    run = prepared(
        pod,
        prompts=[{**prompt, "completion": "no"} for prompt in asked(4)],
        lmbda=0.5,
        eval_prompts=["What is 1 + 1?"],
        eval_every=2,
        rounds=3,
        epochs=2,
        prompts_per_step=2,
    )
    assert run.total_steps == 12
    history = [run.step(index) for index in range(run.total_steps)]
    assert [step["round"] for step in history] == [1] * 4 + [2] * 4 + [3] * 4
    assert [index for index, step in enumerate(history) if "rollout_seconds" in step] == [0, 4, 8]
    assert [index for index, step in enumerate(history) if "eval_divergence" in step] == [7, 11]
    assert "eval_divergence_before" in history[0]
    assert {step["on_policy_fraction"] for step in history} >= {0.0, 1.0}
    for step in history:
        assert step["loss"] == step["divergence"] >= 0
        assert 0 <= step["teacher_agreement"] <= 1
        assert 1 <= step["completion_length_mean"] <= 10
        assert 0 <= step["truncated_fraction"] <= 1
        parts = [step[f"{part}_seconds"] for part in ("teacher", "forward", "backward", "optimizer")]
        assert min(parts) > 0
        assert sum(parts) <= step["train_seconds"]


@pytest.mark.parametrize(("lmbda", "sampled"), [(0.0, 0), (0.4, 200), (1.0, 500)])
def test_lmbda_is_the_share_that_is_sampled(pod: Pod, lmbda: float, sampled: int) -> None:
    from services.trainer.sampling.distillation_samples import drawn

    spec = job(lmbda=lmbda, prompts=asked(4, answers=lmbda < 1))
    draws = [drawn(spec, number, place) for number in range(50) for place in range(10)]
    assert sum(draws) == pytest.approx(sampled, abs=0 if lmbda in (0, 1) else 30)
    assert draws == [drawn(spec, number, place) for number in range(50) for place in range(10)]


def test_without_sampling_the_engine_is_not_asked(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the engine was asked for rollouts")

    monkeypatch.setattr(type(pod.host.rollouts), "policy", never)
    run = prepared(pod, prompts=asked(4, answers=True), lmbda=0)
    metrics = run.step(0)
    assert metrics["on_policy_fraction"] == 0
    assert metrics["rollout_seconds"] == pytest.approx(0, abs=0.01)


RESUMED: dict[str, Any] = {
    "prompts": asked(4, answers=True),
    "lmbda": 0.6,
    "epochs": 2,
    "prompts_per_step": 2,
    "eval_prompts": [*asked(2, held_out=True), *asked(1, held_out=True, answers=True)],
    "eval_every": 1,
}


@pytest.fixture(scope="module")
def straight(shared: Pod) -> Stepped:
    """An undisturbed run, once."""
    return stepped(prepared(shared, **RESUMED))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop", [2, 4, 7])  # within the first round, between the two, at the last step
def test_resume_is_bitwise(pod: Pod, straight: Stepped, stop: int) -> None:
    curve, parameters, saved = straight
    assert len(saved) == 8
    state = saved[stop - 1]
    assert ("round" in state.data) == (stop % 4 != 0)
    second = prepared(pod, **RESUMED)
    assert second.load_state(state) == stop
    for index in range(stop, 8):
        assert without_times(second.step(index)) == curve[index]
    for left, right in zip(parameters, second.lora.parameters(), strict=True):
        assert torch.equal(left, right)


class Interrupted(Exception):
    """Somebody wants the job to end."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("call", range(1, 6))  # three held-out documents, two of the step; more while it samples
def test_interrupted_anywhere_in_a_step_nothing_is_applied(pod: Pod, straight: Stepped, call: int) -> None:
    calls = 0

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Interrupted

    run = prepared(pod, **RESUMED, max_tokens_per_microbatch=1)
    with pytest.raises(Interrupted):
        run.step(0, interrupt)
    assert run.state().data["step"] == 0
    assert not run.lora.flat_b.any()
    again = prepared(pod, **RESUMED)
    assert again.load_state(through_a_checkpoint(_of_this(again, run.state()))) == 0
    assert without_times(again.step(0)) == straight.curve[0]


def _of_this(run: OpdRun, state: RunState) -> RunState:
    """The same state under the identity of a run whose microbatches are cut otherwise."""
    return RunState(state.tensors, {**state.data, "spec": run.state().data["spec"]})


def test_it_continues_an_adapter(pod: Pod) -> None:
    """What the job starts from is what samples in its first round."""
    run = prepare_run(job(teacher="base", lora={}, loss="sampled_reverse_kl"), pod.host, pod.registry.versions[TAUGHT])
    metrics = run.step(0)
    assert metrics["sampler_trainer_kl"] < 1e-6
    assert metrics["kl_student_teacher"] > 0.05


def test_adapters_together_teach_as_their_sum_does(pod: Pod) -> None:
    pod.registry.versions[AdapterVersion("twin", 1)] = pod.registry.versions[TAUGHT]
    alone, together = (prepared(pod, teacher=teacher).step(0) for teacher in ("taught@1", "taught@1*0.75+twin@1*0.25"))
    assert together["divergence"] == pytest.approx(alone["divergence"], rel=1e-4)
    weaker = prepared(pod, teacher="taught@1*0.25").step(0)
    assert weaker["divergence"] < 0.9 * alone["divergence"]


# -- bad input


@pytest.mark.parametrize("teacher", ["taught@2", "nobody@1"])
def test_an_unknown_version_does_not_teach(pod: Pod, teacher: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{teacher}.*name a version that exists") as found:
        prepared(pod, teacher=teacher)
    assert found.value.param == "teacher"


def test_a_version_deleted_meanwhile_is_missed_at_resume(pod: Pod) -> None:
    gone = AdapterVersion("gone", 1)
    pod.registry.versions[gone] = pod.registry.versions[TAUGHT]
    prepared(pod, teacher="gone@1").step(0)
    del pod.registry.versions[gone]
    with pytest.raises(InvalidRequest, match="gone@1"):
        prepared(pod, teacher="gone@1")


def test_a_version_that_does_not_bind_does_not_teach(pod: Pod) -> None:
    pod.registry.versions[AdapterVersion("broken", 1)] = {**pod.registry.versions[TAUGHT], "adapter_config.json": b"{}"}
    with pytest.raises(AdapterRejected, match=r"^teacher: "):
        prepared(pod, teacher="broken@1")


def test_a_store_that_is_away_is_not_the_job_s_fault(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any) -> Any:
        raise Unavailable("the object store is away")

    monkeypatch.setattr(MemoryRegistry, "files", away)
    with pytest.raises(Unavailable):
        prepared(pod)


def test_there_is_nothing_to_learn_from_oneself(pod: Pod) -> None:
    with pytest.raises(InvalidRequest, match=r"nothing to learn.*its teacher") as found:
        prepared(pod, teacher="base")
    assert found.value.param == "teacher"
    with pytest.raises(InvalidRequest, match="nothing to learn"):
        prepare_run(job(lora={}), pod.host, pod.registry.versions[TAUGHT])


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"prompts": [{"prompt_token_ids": [5, 4000]}], "prompts_per_round": 1}, r"prompts\[0\].*vocabulary of 2048"),
        ({"eval_prompts": [{"prompt_token_ids": [2048]}]}, r"eval_prompts\[0\].*vocabulary of 2048"),
        ({"stop_token_ids": [2048]}, "stop_token_ids: 2048 is over"),
        (
            {"eval_prompts": [{"prompt": "x", "completion_token_ids": [7, 2048]}]},
            r"eval_prompts\[0\].*vocabulary of 2048",
        ),
        ({"prompts": ["word " * 300], "prompts_per_round": 1}, r"prompts\[0\].*max_train_tokens"),
        ({"eval_prompts": [{"prompt": "x", "completion": "word " * 300}]}, r"eval_prompts\[0\].*max_train_tokens"),
        ({"max_tokens": 300}, r"prompts\[0\].*lower max_tokens"),
    ],
)
def test_prompts_that_cannot_be(pod: Pod, fields: dict[str, Any], match: str) -> None:
    with pytest.raises(TemperError, match=match):
        prepared(pod, **fields)


def test_an_impossible_job_is_refused_with_the_bytes(pod: Pod) -> None:
    import dataclasses

    host = dataclasses.replace(pod.host, train_memory_bytes=20 * 2**20)
    with pytest.raises(DoesNotFit, match=r"the teacher's forward [\d.]+ MiB"):
        prepare_run(job(teacher="checkpoint"), host, None)


def test_without_a_second_checkpoint_none_teaches() -> None:
    with running_pod() as pod:
        with pytest.raises(InvalidRequest, match="TEMPER_TEACHER_MODEL") as found:
            prepared(pod, teacher="checkpoint")
        assert found.value.param == "teacher"
        pod.settle()


def test_a_teacher_with_another_vocabulary_does_not_start(tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, qwen_like_tokenizer())
    with (
        pytest.raises(CheckpointRejected, match=r"teacher has another vocabulary.*differ"),
        running_pod(teacher_model=other),
    ):
        pass


def test_a_smaller_padding_than_the_student_s_cuts_what_it_does_not_know(tmp_path: Path) -> None:
    """The student says an id that its own padded vocabulary has and the teacher's has not."""
    student = write_checkpoint(tmp_path / "student", qwen_like_tokenizer(), vocab_size=420, tie_word_embeddings=False)
    # Its head makes an id of the padding likely.
    shard = student / "model.safetensors"
    tensors = load_file(shard)
    tensors["lm_head.weight"][417] = (
        3
        * tensors["lm_head.weight"][:400].abs().mean()
        * torch.sign(tensors["model.embed_tokens.weight"][:400].mean(0))
    )
    save_file(tensors, shard, metadata={"format": "pt"})
    teacher = write_checkpoint(tmp_path / "teacher", qwen_like_tokenizer(), seed=1, vocab_size=416)
    with running_pod(model=student, teacher_model=teacher) as pod:
        run = prepared(
            pod,
            teacher="checkpoint",
            prompts=[{"prompt_token_ids": [token, token + 1]} for token in range(20)],
            prompts_per_round=20,
            sampling_temperature=2.0,
            eval_prompts=[{"prompt_token_ids": [3]}, {"prompt_token_ids": [5], "completion_token_ids": [6, 7]}],
            rounds=2,
        )
        history = [run.step(index) for index in range(run.total_steps)]
        assert history[0]["cut_completions"] > 0
        assert all(max(sample.document.token_ids) < 416 for sample in run._round.given)
        assert history[1]["divergence"] < history[0]["divergence"]
        with pytest.raises(InvalidRequest, match=r"teacher's vocabulary of 416"):
            prepared(pod, teacher="checkpoint", prompts=[{"prompt_token_ids": [418]}], prompts_per_round=1)
        pod.settle()
