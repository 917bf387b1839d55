"""GRPO jobs that sample their own rollouts, on the engine that serves the tiny trained model."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from models.tiny.recipe.item import Item
from models.tiny.recipe.skills import dates
from services.common.errors import InvalidRequest, Unavailable
from services.common.jobs import GrpoJob
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.common.jobs.scorers.judge import JudgeSpec
from services.common.jobs.scorers.registry import Rewards
from services.common.jobs.scorers.sample import Sample
from services.trainer.jobs import prepare_run
from services.trainer.jobs.rollouts.completion_run import RolloutRun
from tests.rollout_support import TIMEOUT, Pod, running_pod, wait_for
from tests.training_support import Stepped, stepped, through_a_checkpoint, without_times
from tests.unit.common.jobs.scorers.test_webhook import SECRET, Seen, ok, serving

GAIN = 0.25
"""Least rise of the held-out reward; 0.38, 0.38 and 0.44 with seeds 0, 1 and 2."""


def prompts(items: list[Item]) -> list[dict[str, Any]]:
    return [{"messages": list(item.messages), "answer": item.answer} for item in items]


def job(**fields: Any) -> GrpoJob:
    generate = {
        "prompts": prompts(dates.items(0, 4, held_out=False)),
        "rounds": 3,
        "prompts_per_round": 2,
        "completions": 4,
        "max_tokens": 12,
        "temperature": 2.0,
        # Shares of right digits: rewards have spread whatever the model says.
        "reward": [{"type": "regex", "pattern": p} for p in ("1", "2", "3", "-0", "5$", "7", "^202")],
        **fields.pop("generate", {}),
    }
    defaults = {"adapter": "dates", "learning_rate": 0.01, "lora": {"rank": 4}, "seed": 3}
    return GrpoJob.model_validate(defaults | fields | {"generate": generate})


def prepared(pod: Pod, **fields: Any) -> RolloutRun:
    run = prepare_run(job(**fields), pod.host, None)
    assert isinstance(run, RolloutRun)
    return run


def test_a_job_raises_the_reward_on_what_it_has_not_seen() -> None:
    rounds, size = 2, 8
    fields = {
        "learning_rate": 4e-3,
        "optimizer": {"schedule": "cosine"},
        "groups_per_step": 4,
        "lora": {"rank": 8, "alpha": 16},
        "generate": {
            "prompts": prompts(dates.items(0, rounds * size, held_out=False)),
            "eval_prompts": prompts(dates.items(0, 32, held_out=True)),
            "rounds": rounds,
            "prompts_per_round": size,
            "completions": 8,
            "max_tokens": 16,
            "temperature": 1.0,
            "reward": {"type": "exact"},
        },
    }
    with running_pod(max_num_seqs=64, token_budget=1024, num_blocks=2049) as pod:
        run = prepared(pod, **fields, seed=0)
        assert run.total_steps == rounds * 2
        history = [run.step(index) for index in range(run.total_steps)]
        pod.settle()
    before, after = history[0]["eval_reward_before"], history[-1]["eval_reward"]
    assert after >= before + GAIN, (before, after)
    assert history[-1]["reward_mean"] > history[0]["reward_mean"]
    # The sampler and the trainer compute one policy.
    first_uses = history[::2]
    assert all(step["sampler_trainer_logprob_difference"] < 1e-4 for step in first_uses)
    assert all(step["sampler_trainer_kl"] < 1e-6 for step in first_uses)
    assert all(step["sampler_trainer_ratio_outside"] == 0 for step in first_uses)
    assert all("sampler_trainer_kl" not in step for step in history[1::2])
    assert any(abs(step["behaviour_kl"]) > 1e-6 for step in history[1::2])


def test_what_a_round_reports(pod: Pod) -> None:
    run = prepared(pod, generate={"eval_prompts": ["What is 1 + 1?"], "eval_every": 2, "rounds": 3}, epochs=2)
    assert run.total_steps == 6
    history = [run.step(index) for index in range(run.total_steps)]
    assert [step["round"] for step in history] == [1, 1, 2, 2, 3, 3]
    assert [sorted(k for k in step if k.startswith("eval_reward")) for step in history] == [
        ["eval_reward_before"],
        [],
        [],
        ["eval_reward"],
        [],
        ["eval_reward"],
    ]
    for index, step in enumerate(history):
        begins = index % 2 == 0
        assert ("rollout_seconds" in step) == begins
        assert ("swap_seconds" in step) == begins
        assert ("score_seconds" in step) == begins
        parts = [step[f"{part}_seconds"] for part in ("forward", "backward", "optimizer")]
        assert min(parts) > 0
        assert sum(parts) <= step["train_seconds"]
        assert 1 <= step["completion_length_mean"] <= 12
        assert 0 <= step["truncated_fraction"] <= 1
        assert step["frac_reward_zero_std"] == step["groups_skipped"] / 2
        assert math.isfinite(step["reward_mean"])


def test_the_model_judges_what_a_job_samples(pod: Pod) -> None:
    """Its verdicts are what it answers by itself: a judge that is asked for the successor knows a right sum."""
    judge = {"type": "judge", "prompt": "What is {answer} + 1?", "verdicts": {"6": 1.0, "7": 0.25}}
    generate = {"prompts": ["What is 2 + 3?"], "eval_prompts": ["What is 2 + 3?"], "prompts_per_round": 1}
    run = prepared(pod, generate=generate | {"rounds": 1, "temperature": 1.0, "reward": [{**judge, "weight": 2}]})
    assert run.step(0)["eval_reward_before"] == pytest.approx(2, abs=1e-3)
    rewards = Rewards([JudgeSpec.model_validate(judge)], pod.host.grants)
    found = rewards.score([Sample("not read", said, 1) for said in ("5", "6", "a fruit", "word " * 400)])
    assert found == [pytest.approx(1, abs=1e-3), pytest.approx(0.25, abs=1e-3), 0.0, 0.0]


def test_the_first_round_is_of_the_starting_policy(pod: Pod) -> None:
    """A job that continues an adapter samples from it."""
    first = prepared(pod)
    first.step(0)
    parent = first.lora.to_files("")
    run = prepare_run(job(lora={}), pod.host, parent)
    metrics = run.step(0)
    assert metrics["sampler_trainer_kl"] < 1e-6
    assert run.step(1)["sampler_trainer_kl"] < 1e-6


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6, 7])
def test_resume_after_every_step_is_bitwise(pod: Pod, straight: Stepped, stop: int) -> None:
    fields: dict[str, Any] = {"epochs": 2, "groups_per_step": 1, "generate": {"rounds": 2}}
    curve, parameters, saved = straight
    state = saved[stop - 1]
    assert ("round" in state.data) == (stop % 4 != 0)
    second = prepared(pod, **fields)
    assert second.load_state(state) == stop
    for index in range(stop, 8):
        assert without_times(second.step(index)) == curve[index]
    for left, right in zip(parameters, second.lora.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"mismatch_correction": "token_truncate"},
        {"loss_type": "dr_grpo", "mask_truncated": True},
        {"loss_type": "gspo", "beta": 0.1},
    ],
)
def test_every_loss_learns_from_rounds_and_resumes(pod: Pod, settings: dict[str, Any]) -> None:
    """Also what the starting policy of a round said is part of the state."""
    fields = {"epochs": 2, "generate": {"rounds": 2}, **settings}
    straight = prepared(pod, **fields)
    before = [parameter.detach().clone() for parameter in straight.lora.parameters()]
    curve, _, saved = stepped(straight)
    assert len(saved) == 4
    assert any(not torch.equal(old, new) for old, new in zip(before, straight.lora.parameters(), strict=True))
    if "mismatch_correction" in settings:
        assert all(step["mismatch_weight_mean"] == pytest.approx(1.0, abs=1e-3) for step in curve)
    for stop in (1, 2, 3):
        second = prepared(pod, **fields)
        second.load_state(saved[stop - 1])
        for index in range(stop, 4):
            assert without_times(second.step(index)) == curve[index], stop


def test_dr_grpo_divides_by_what_may_be_sampled() -> None:
    with pytest.raises(ValueError, match=r"max_completion_length is 5 and generate\.max_tokens 12"):
        job(loss_type="dr_grpo", max_completion_length=5)


@pytest.fixture(scope="module")
def straight(shared: Pod) -> Stepped:
    """An undisturbed run, once."""
    return stepped(prepared(shared, epochs=2, groups_per_step=1, generate={"rounds": 2}))


def test_a_round_in_which_nothing_is_better_changes_nothing(pod: Pod) -> None:
    run = prepared(pod, generate={"reward": {"type": "regex", "pattern": "(?s).*"}})
    before = [parameter.detach().clone() for parameter in run.lora.parameters()]
    history = [run.step(index) for index in range(run.total_steps)]
    assert all(step["groups_skipped"] == 2 for step in history)
    assert all(step["frac_reward_zero_std"] == 1 for step in history)
    assert all(step["reward_mean"] == 1 for step in history)
    assert all("loss" not in step for step in history)
    for left, right in zip(before, run.lora.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_later_round_in_which_nothing_is_better_changes_nothing(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do moments of the rounds before."""
    run = prepared(pod, generate={"rounds": 2})
    run.step(0)
    before = [parameter.detach().clone() for parameter in run.lora.parameters()]
    monkeypatch.setattr(run, "_score", lambda prompts, found, interrupt: [1.0] * len(found))
    metrics = run.step(1)
    assert metrics["groups_skipped"] == 2
    assert metrics["learning_rate"] > 0
    assert all(torch.equal(one, other) for one, other in zip(before, run.lora.parameters(), strict=True))


@pytest.mark.parametrize("exact", [False, True])
def test_the_first_step_that_learns_is_of_the_starting_policy(
    pod: Pod, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a step without anything to learn from came before it in the round."""
    settings = {"exact_forward": True} if exact else {"mismatch_correction": "token_truncate"}
    run = prepared(pod, epochs=2, groups_per_step=1, generate={"rounds": 1}, **settings)
    # Of the two groups only the second has spread; the round's first step has no group, and its third has none again.
    monkeypatch.setattr(run, "_score", lambda prompts, found, interrupt: [0.0] * 5 + [1.0] * (len(found) - 5))
    assert "loss" not in run.step(0)
    first = run.step(1)
    assert first["sampler_trainer_logprob_difference"] == (0.0 if exact else pytest.approx(0, abs=1e-4))
    if exact:
        assert first["ratio_mean"] == 1.0
        assert "replay_seconds" not in first
    else:
        assert run._start.keys() == {document.source for document in run.batch(1)}
    assert "loss" not in run.step(2)
    last = run.step(3)
    assert abs(last["behaviour_kl"]) > 1e-7
    if not exact:
        assert last["mismatch_weight_mean"] == pytest.approx(first["mismatch_weight_mean"], abs=1e-6)


def test_prompts_come_each_once_before_one_comes_again(pod: Pod) -> None:
    run = prepared(pod, generate={"rounds": 6})
    chosen = [prompt.token_ids for number in range(6) for prompt in run._sampler.chosen(number)]
    for start in range(0, 12, 4):
        assert len(set(chosen[start : start + 4])) == 4
    assert chosen[:4] != chosen[4:8] or chosen[4:8] != chosen[8:]


@pytest.mark.thorough
def test_a_curriculum_learns_what_cannot_be_answered_and_resumes_bitwise(pod: Pod) -> None:
    asked = prompts(dates.items(0, 6, held_out=False))
    for index, prompt in enumerate(asked):
        prompt["answer"] = "2" if index < 3 else "no such words"
    digits = [{"type": "regex", "pattern": p} for p in ("1", "3", "-0", "5$", "7")]
    fields: dict[str, Any] = {
        "epochs": 2,
        "generate": {
            "prompts": asked,
            "rounds": 4,
            "reward": [{"type": "contains", "weight": 10}, *digits],
            "curriculum": {"outside": 0.01, "high": 1.0, "newest": 1.0, "success_at": 10.0},
        },
    }
    run = prepared(pod, **fields)
    curve, states = [], []
    for index in range(run.total_steps):
        curve.append(without_times(run.step(index)))
        state = run.state()
        states.append(type(state)(dict(state.tensors), json.loads(json.dumps(state.data))))
    rates = dict(run.state().data["curriculum"]["success"])
    assert all(rates[index] == 0 for index in rates if index >= 3), rates
    assert any(rates[index] > 0 for index in rates if index < 3), rates
    last = curve[-1]
    assert last["curriculum_known"] == len(rates) / 6 > 1 / 3
    assert last["curriculum_below"] + last["curriculum_inside"] == pytest.approx(last["curriculum_known"])
    for stop in (3, 4):  # in a round, and between two
        again = prepared(pod, **fields)
        assert again.load_state(states[stop - 1]) == stop
        assert [without_times(again.step(index)) for index in range(stop, run.total_steps)] == curve[stop:]
        assert again.state().data["curriculum"] == run.state().data["curriculum"]


@contextmanager
def raising_after(looks: int) -> Iterator[Callable[[], None]]:
    class Cancelled(Exception):
        pass

    left = looks

    def interrupt() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Cancelled

    with pytest.raises(Cancelled):
        yield interrupt


@pytest.mark.sampled(2)
@pytest.mark.parametrize("looks", [0, 1, 2, 4])
def test_a_step_that_is_interrupted_has_not_happened(pod: Pod, straight: Stepped, looks: int) -> None:
    """In the middle of sampling, of scoring and of training: repeated, it gives what it would have given."""
    run = prepared(pod, epochs=2, groups_per_step=1, generate={"rounds": 2})
    with raising_after(looks) as interrupt:
        run.step(0, interrupt)
    wait_for(lambda: pod.slots_taken() == 0)
    wait_for(lambda: pod.engine.loop.status().background == 0)
    assert without_times(run.step(0)) == straight.curve[0]


def test_a_step_that_goes_on_with_its_evaluation_tells_all_of_it(pod: Pod) -> None:
    """Also behind a checkpoint: what was measured before an interruption is not lost."""

    class Paused(Exception):
        pass

    def interrupt() -> None:
        if run._evaluation_left:
            raise Paused

    fields: dict[str, Any] = {"generate": {"eval_prompts": ["What is 1 + 1?"], "rounds": 1}}
    straight = prepared(pod, **fields)
    wanted = without_times(straight.step(0))
    assert {"eval_reward_before", "eval_reward", "reward_mean", "loss", "round"} <= wanted.keys()
    run = prepared(pod, **fields)
    with pytest.raises(Paused):
        run.step(0, interrupt)
    state = run.state()
    assert (state.data["step"], state.data["evaluation_left"]) == (1, True)
    again = prepared(pod, **fields)
    assert again.load_state(through_a_checkpoint(state)) == 0
    for one in (run, again):
        assert without_times(one.step(0)) == wanted
        assert all(torch.equal(*both) for both in zip(straight.lora.parameters(), one.lora.parameters(), strict=True))


@pytest.mark.parametrize("staleness", [0, 1])
def test_completions_whose_rewards_are_away_are_not_sampled_again(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """Behind a checkpoint neither: sampling may have taken minutes, and a scorer be away for long."""
    fields: dict[str, Any] = {"generate": {"rounds": 2, "staleness": staleness}}
    straight = prepared(pod, **fields)
    wanted = without_times(straight.step(0))
    straight.close()

    def away(*_: Any) -> Any:
        raise Unavailable("the scorer is away")

    run = prepared(pod, **fields)
    with monkeypatch.context() as patched:
        patched.setattr(run._reward, "score", away)
        with pytest.raises(Unavailable):
            run.step(0)
    state = run.state()
    assert state.under_way
    again = prepared(pod, **fields)
    assert again.load_state(through_a_checkpoint(state)) == 0
    for one in (run, again):
        sample, sampled = one._sampler.sample, list[int]()

        def counted(lora: Any, requests: Any, *rest: Any, sample: Any = sample, sampled: Any = sampled) -> Any:
            sampled.append(len(requests))
            return sample(lora, requests, *rest)

        monkeypatch.setattr(one._sampler, "sample", counted)
        found = without_times(one.step(0))
        one.close()
        assert sampled[0] == 0, "of the first round"
        assert found == wanted
        assert all(torch.equal(*both) for both in zip(straight.lora.parameters(), one.lora.parameters(), strict=True))


@pytest.mark.thorough
def test_users_are_served_while_a_job_samples_and_trains(pod: Pod) -> None:
    user = pod.user()
    prompt = tuple(pod.engine.codec.encode_chat([{"role": "user", "content": "What is 12 + 30?"}]))
    alone = user.answer(user.submit(prompt))
    run = prepared(pod, generate={"rounds": 2, "completions": 8, "max_tokens": 24, "temperature": 20.0})
    failed: list[BaseException] = []

    def learn() -> None:
        try:
            for index in range(run.total_steps):
                run.step(index)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=learn)
    thread.start()
    answers = []
    while thread.is_alive():
        answers.append(user.answer(user.submit(prompt)))
    thread.join(TIMEOUT)
    assert not failed
    assert len(answers) > 5
    assert answers == [alone] * len(answers)


def test_rewards_from_a_webhook() -> None:
    def answer(seen: Seen) -> Any:
        return ok([sample["tokens"] for sample in json.loads(seen.body)["samples"]])

    with serving(answer) as server, running_pod(webhooks=Webhooks(allowed=(server.url,), secret=SECRET)) as pod:
        reward = {"type": "webhook", "url": server.url + "/score", "weight": 0.5}
        run = prepared(pod, generate={"reward": reward, "rounds": 1, "temperature": 20.0})
        metrics = run.step(0)
        assert metrics["reward_mean"] == pytest.approx(0.5 * metrics["completion_length_mean"])
        pod.settle()
    first = json.loads(server.seen[0].body)["samples"][0]
    assert first["answer"] in {item.answer for item in dates.items(0, 4, held_out=False)}
    assert "<|im_start|>user" in first["prompt"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompts": [{"prompt_token_ids": [10**6]}]}, r"generate.prompts\[0\]: a token id is over the model's vocab"),
        ({"max_tokens": 255}, r"generate.prompts\[0\]: .* over this engine's limit of 256 for training"),
        ({"stop_token_ids": [10**6]}, "generate.stop_token_ids: 1000000 is over"),
        ({"reward": {"type": "regex", "pattern": "("}}, r"generate.reward\[0\].pattern"),
        ({"reward": {"type": "webhook", "url": "https://a.example"}}, "not covered by TEMPER_REWARD_WEBHOOKS"),
    ],
)
def test_bad_jobs_from_the_queue_are_refused_here(pod: Pod, fields: dict[str, Any], says: str) -> None:
    prompts_per_round = 1 if "prompts" in fields else 2
    reward = {"type": "regex", "pattern": "x"}
    with pytest.raises(InvalidRequest, match=says):
        prepared(pod, generate={"reward": reward, **fields, "prompts_per_round": prompts_per_round})


def test_a_job_too_large_for_the_memory_is_refused_before_it_samples(pod: Pod) -> None:
    host = dataclasses.replace(pod.host, train_memory_bytes=1000)
    with pytest.raises(InvalidRequest, match="the memory plan leaves"):
        prepare_run(job(), host, None)
