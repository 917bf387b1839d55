"""GRPO jobs whose rounds are sampled ahead, on the engine that serves the tiny trained model."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.host.rollouts import RolloutRequest, RolloutSampling
from services.trainer.jobs.base import RunState
from services.trainer.jobs.rollouts.completion_run import RolloutRun
from services.trainer.sampling.prompts import sample_seed
from services.trainer.sampling.rounds.round import Round
from tests.parity.test_rollout_job import prepared, raising_after
from tests.rollout_support import TINY, Pod, wait_for
from tests.training_support import (
    Stepped,
    assert_same_gradients,
    gradients,
    peft_reference,
    reference_logprobs,
    stepped,
    through_a_checkpoint,
    without_times,
)


def ahead(pod: Pod, staleness: int = 1, **fields: Any) -> RolloutRun:
    generate = {"rounds": 4, "max_tokens": 8, "staleness": staleness, **fields.pop("generate", {})}
    return prepared(pod, generate=generate, **fields)


def saved_while_sampling(run: RolloutRun) -> RunState:
    """A checkpoint as it is while no round ahead has been sampled."""
    run.close()
    for planned in run._ahead.planned:
        planned.found = None
    return through_a_checkpoint(run.state())


@pytest.fixture(scope="module")
def straight(shared: Pod) -> Stepped:
    """An undisturbed run, once."""
    return stepped(ahead(shared, epochs=2))


@pytest.mark.parametrize("staleness", [1, 2])
def test_each_round_is_of_the_policy_that_it_says(pod: Pod, staleness: int) -> None:
    """Tokens and log-probabilities are those that the policy so many rounds ago samples, to the bit."""
    run = ahead(pod, staleness)
    policies, rounds, metrics = [], [], []
    for number in range(4):
        policies.append(run.lora.copied("cpu"))
        metrics.append(run.step(number))
        assert isinstance(run.round, Round)
        rounds.append(run.round)
    behind = [float(min(number, staleness)) for number in range(4)]
    assert [step["staleness_max"] for step in metrics] == [step["staleness_mean"] for step in metrics] == behind
    # What sampler and trainer differ by is told only where they mean the same policy.
    assert ["sampler_trainer_kl" in step for step in metrics] == [at == 0 for at in behind]
    assert all(0 <= step["overlap_share"] <= 1 < 1 + step["sampling_seconds"] for step in metrics)
    for number, made in enumerate(rounds):
        requests = [
            RolloutRequest(group.prompt.token_ids, sample_seed(3, number, group.place, member))
            for group in made.sampled
            for member in range(len(group.members))
        ]
        version = max(0, number - staleness)
        with pod.host.rollouts.policy(policies[version]) as policy:
            found = pod.host.rollouts.generate(requests, RolloutSampling(2.0, 8), policy)
        assert made.completions == [one.by(version) for one in found]


def test_gradients_are_those_of_the_stated_behaviour(pod: Pod, tmp_path: Path) -> None:
    """The ratio of each token is the policy in training over the one that sampled, by transformers and PEFT."""
    run = ahead(pod, learning_rate=0.1)
    run.step(0)
    assert_learns_as_stated(run, 1, tmp_path)
    assert run.round is not None
    assert run.round.metrics()["staleness_max"] == 1
    run.close()


def assert_learns_as_stated(run: RolloutRun, index: int, tmp_path: Path) -> None:
    """Step ``index`` has the loss and the gradients that transformers and PEFT compute from the round as it is stated,
    by the log-probabilities that its tokens came with."""
    run._before(index, lambda: None)
    assert run.round is not None
    run.zero_grad()
    metrics, _ = run._accumulate(index, lambda: None)
    model = peft_reference(TINY, run.lora.to_files(""), tmp_path)
    groups = [group for group in run.round.groups() if len(set(group.rewards)) > 1]
    total = sum(len(one.token_ids or ()) for group in groups for one in group.completions)
    loss, ratios = torch.zeros(()), []
    for group in groups:
        prompt = list(group.prompt_token_ids or ())
        for one in group.completions:
            advantage = (one.reward - statistics.mean(group.rewards)) / (statistics.stdev(group.rewards) + 1e-4)
            logprobs = reference_logprobs(model, prompt + list(one.token_ids or ()), len(prompt), one.temperature or 1)
            ratio = (logprobs - torch.tensor(one.logprobs)).exp()
            ratios += ratio.tolist()
            loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum() / total
    loss.backward()
    assert max(abs(ratio - 1) for ratio in ratios) > 0.05  # the policy has moved since
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(statistics.fmean(ratios), rel=1e-5)
    assert_same_gradients(gradients(run.lora), model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stop", [1, 2, 3, 7])
@pytest.mark.parametrize("sampled", [True, False])
def test_resume_after_every_step_is_bitwise(pod: Pod, straight: Stepped, stop: int, sampled: bool) -> None:
    """Also from a checkpoint of a job that was killed before a round ahead was sampled: its policy is in there."""
    curve, parameters, saved = straight
    state = saved[stop - 1]
    if not sampled:
        first = ahead(pod, epochs=2)
        for index in range(stop):
            first.step(index)
        state = saved_while_sampling(first)
        assert [one["round"] for one in state.data.get("ahead", ())] == [None] * (stop < 7)
    second = ahead(pod, epochs=2)
    assert second.load_state(state) == stop
    for index in range(stop, 8):
        assert without_times(second.step(index)) == curve[index]
    for left, right in zip(parameters, second.lora.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_step_that_is_interrupted_has_not_happened(pod: Pod, straight: Stepped, at: int) -> None:
    """Nor goes on what it had sampled beside it; repeated, it gives what it would have given."""
    run = ahead(pod, epochs=2)
    for index in range(at):
        run.step(index)
    with raising_after(0) as interrupt:
        run.step(at, interrupt)
    wait_for(lambda: pod.slots_taken() == 0)
    wait_for(lambda: pod.engine.loop.status().background == 0)
    for index in range(at, 4):
        assert without_times(run.step(index)) == straight.curve[index]
    run.close()


@pytest.mark.parametrize(
    "settings", [{"exact_forward": True}, {"mismatch_correction": "token_truncate"}, {"loss_type": "gspo", "beta": 0.1}]
)
def test_every_correction_learns_from_stale_rounds(pod: Pod, settings: dict[str, Any]) -> None:
    run = ahead(pod, generate={"rounds": 2}, **settings)
    first, second = (run.step(index) for index in range(2))
    assert second["staleness_max"] == 1
    if "exact_forward" in settings:
        assert first["ratio_mean"] == 1.0
        assert "replay_seconds" in second  # what was sampled is not what the policy says now
    if "mismatch_correction" in settings:
        # The weight is of the step's policy over the one that sampled: it holds what the policy has moved.
        assert abs(second["mismatch_weight_mean"] - 1) > abs(first["mismatch_weight_mean"] - 1)


def test_what_fails_ahead_fails_the_step_that_needs_it(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ahead(pod)
    run.step(0)
    state = saved_while_sampling(run)
    run = ahead(pod)
    run.load_state(state)
    real = run._score

    def broken(*given: Any) -> list[float]:
        raise RuntimeError("no score")

    monkeypatch.setattr(run, "_score", broken)
    before = run.files("")
    with pytest.raises(RuntimeError, match="no score"):
        run.step(1)
    assert run.files("") == before
    monkeypatch.setattr(run, "_score", real)
    assert run.step(1)["staleness_max"] == 1
    run.close()
