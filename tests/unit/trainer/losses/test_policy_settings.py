"""GRPO's settings: what the loss is divided by, mismatch weights, masks, scales, and what is refused."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from services.common.errors import InvalidRequest
from services.common.queue.records import SPEC
from services.trainer.losses import (
    GroupSize,
    MismatchStats,
    group_advantages,
    mismatch_weights,
    policy_loss,
    policy_loss_type,
)
from services.trainer.losses.policy import BNPO, GSPO
from services.trainer.sampling.scored_rollouts import scored_rollouts
from tests.training_support import CPU, TrainingHost, gradients, random_adapter, without_times
from tests.unit.trainer.jobs.test_grpo_run import job, prepared, token_groups

TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "gspo")


def unscored(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            **group,
            "completions": [
                {key: value for key, value in completion.items() if key != "logprobs"}
                for completion in group["completions"]
            ],
        }
        for group in groups
    ]


def test_reductions() -> None:
    groups = [GroupSize(3, [4, 2]), GroupSize(2, [1, 5])]  # one completion of the first is masked
    share = {
        "dapo": [1 / 12] * 4,
        "cispo": [1 / 12] * 4,
        "grpo": [1 / (5 * length) for length in (4, 2, 1, 5)],
        "gspo": [1 / (5 * length) for length in (4, 2, 1, 5)],
        "dr_grpo": [1 / (5 * 20)] * 4,
        "bnpo": [1 / (2 * 6)] * 4,
    }
    for name, wanted in share.items():
        weights = policy_loss_type(name).completion_weights(groups, 20)
        assert [weight / 12 for weight in weights] == pytest.approx(wanted), name
    uneven = BNPO.completion_weights([GroupSize(1, [2]), GroupSize(1, [6])], 9)
    assert [weight / 8 for weight in uneven] == pytest.approx([1 / 4, 1 / 12])
    for wrong in ([], [0], [1, 1]):
        with pytest.raises(ValueError, match="cannot train"):
            GroupSize(1, wrong)


def test_mismatch_weights() -> None:
    old, behaviour = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -3.0])
    token = [math.exp(0.5), math.exp(-1.0), 1.0]
    sequence = [math.exp(-0.5)] * 2 + [1.0]
    for correction, cap, wanted, over in (
        ("none", 0.5, [1.0] * 3, [False] * 3),
        ("token_truncate", 1.2, [1.2, token[1], 1.0], [True, False, False]),
        ("token_mask", 1.2, [0.0, token[1], 1.0], [True, False, False]),
        ("sequence_truncate", 0.9, [sequence[0], sequence[1], 0.9], [False, False, True]),
        ("sequence_mask", 0.9, [sequence[0], sequence[1], 0.0], [False, False, True]),
        ("sequence_mask", 0.5, [0.0] * 3, [True] * 3),
    ):
        weights, outside = mismatch_weights(old, behaviour, [2, 1], correction=correction, cap=cap)  # type: ignore[arg-type]
        assert weights.tolist() == pytest.approx(wanted), correction
        assert outside.tolist() == over, correction
    far, _ = mismatch_weights(old + 1000, behaviour, [2, 1], correction="token_truncate", cap=3.0)
    assert far.tolist() == [3.0] * 3


def test_mismatch_metrics_are_of_the_sampler_only() -> None:
    stats = MismatchStats(CPU, "token_mask")
    old, behaviour = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -3.0])
    weights, outside = mismatch_weights(old, behaviour, [2, 1], correction="token_mask", cap=1.2)
    stats.add(old, behaviour, weights, outside, torch.tensor([True, True, False]))
    stats.add(old, old, weights, outside, torch.tensor([False] * 3))
    found = stats.metrics()
    assert found["sampler_trainer_logprob_difference"] == pytest.approx(0.75)
    k3 = [math.exp(value) - 1 - value for value in (0.5, -1.0)]
    assert found["sampler_trainer_kl"] == pytest.approx(statistics.mean(k3))
    assert found["mismatch_weight_mean"] == pytest.approx(math.exp(-1) / 2)
    assert found["mismatch_weight_min"] == 0
    assert found["mismatch_weight_max"] == pytest.approx(math.exp(-1))
    assert found["mismatch_fraction_outside"] == 0.5
    assert MismatchStats(CPU, "token_mask").metrics() == {}


def test_cispo_learns_from_tokens_that_clipping_drops() -> None:
    behaviour = torch.tensor([-3.0, -3.0])
    gradient = {}
    for name in ("dapo", "cispo"):
        logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
        policy_loss(
            logprobs, behaviour, torch.ones(2), clip_low=0.2, clip_high=0.28, total_tokens=2,
            surrogate=policy_loss_type(name).surrogate, cispo_max_ratio=4.0,
        ).loss.backward()  # fmt: skip
        assert logprobs.grad is not None
        gradient[name] = logprobs.grad.tolist()
    assert gradient["dapo"] == pytest.approx([0.0, -0.5])
    assert gradient["cispo"] == pytest.approx([-2.0, -0.5])
    with pytest.raises(ValueError, match="lengths"):
        policy_loss(
            behaviour, behaviour, torch.ones(2), clip_low=0.2, clip_high=0.28, total_tokens=2, surrogate=GSPO.surrogate
        )


def test_reward_scales(host: TrainingHost) -> None:
    groups = token_groups(host, None, 3)
    for completion in groups[2]["completions"]:
        completion["reward"] = 0.25
    rewards = [[completion["reward"] for completion in group["completions"]] for group in groups]
    std = statistics.stdev([reward for group in rewards for reward in group])
    for given, divisor in ((True, None), ("group", None), ("batch", std + 1e-4), (False, 1.0), ("none", 1.0)):
        found = [
            rollout.turns[0].advantage
            for rollout in scored_rollouts(host, job(groups=groups, scale_rewards=given)).rollouts
        ]
        wanted = [
            (reward - statistics.mean(group)) / (divisor or statistics.stdev(group) + 1e-4)
            for group in rewards[:2]
            for reward in group
        ]
        assert found == pytest.approx(wanted), given
    assert group_advantages([1.0, 1.0], scale=True, std=3.0) is None
    assert SPEC.validate_json(job(groups=groups, scale_rewards=False).model_dump_json()).scale_rewards == "none"


def test_truncated_completions_are_masked(host: TrainingHost) -> None:
    groups = token_groups(host, None, 3)
    for number, group in enumerate(groups):
        for at, completion in enumerate(group["completions"]):
            completion["truncated"] = number == 1 or at == 0
    plain = prepared(host, groups=groups).step(0)
    run = prepared(host, groups=groups, mask_truncated=True)
    metrics = run.step(0)
    assert (plain["tokens"], metrics["tokens"]) == (72, 36)
    assert (plain["truncated_fraction"], metrics["truncated_fraction"]) == (0.5, 0.25)
    assert metrics["completion_length_mean"] == 6
    assert run.notes == (
        "1 of 3 groups skipped: every completion in them is truncated",
        "2 of 8 rollouts are truncated: they count in their group's baseline only",
    )
    with pytest.raises(InvalidRequest, match="mask_truncated leaves out every completion of the 1 groups"):
        prepared(host, groups=groups[1:2], mask_truncated=True)


@pytest.mark.parametrize("name", TYPES)
def test_gradients_do_not_depend_on_the_microbatches(host: TrainingHost, name: str) -> None:
    parent = random_adapter(host)
    groups = token_groups(host, None, 3)
    groups[0]["completions"][0]["token_ids"] = groups[0]["completions"][0]["token_ids"][:2]
    groups[0]["completions"][0]["logprobs"] = groups[0]["completions"][0]["logprobs"][:2]
    results = []
    for limit in (16, 32, 512):
        run = prepared(
            host, parent, groups=groups, loss_type=name, lora={}, max_tokens_per_microbatch=limit,
            mismatch_correction="sequence_truncate",
        )  # fmt: skip
        metrics, _ = run._accumulate(0, lambda: None)
        results.append((metrics, gradients(run.lora)))
    for metrics, found in results[:2]:
        assert metrics == pytest.approx(results[2][0], rel=1e-4, abs=1e-6)
        for key, wanted in results[2][1].items():
            assert float((found[key] - wanted).norm()) <= 1e-4 * float(wanted.norm()) + 1e-9, key


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stop", range(1, 4))
@pytest.mark.parametrize("name", TYPES)
def test_resume_at_every_step_is_bitwise(host: TrainingHost, name: str, stop: int) -> None:
    fields: dict[str, Any] = {
        "groups": token_groups(host, None, 2), "groups_per_step": 1, "epochs": 2, "loss_type": name, "beta": 0.1,
        "mismatch_correction": "token_truncate", "unbiased_kl": True,
    }  # fmt: skip
    straight = prepared(host, **fields)
    curve = [straight.step(index) for index in range(straight.total_steps)]
    first = prepared(host, **fields)
    for index in range(stop):
        first.step(index)
    second = prepared(host, **fields)
    assert second.load_state(first.state()) == stop
    for index in range(stop, 4):
        found = second.step(index)
        assert without_times(found) == without_times(curve[index])
    for left, right in zip(straight.lora.parameters(), second.lora.parameters(), strict=True):
        assert torch.equal(left, right)


def test_the_starting_policy_is_scored_before_it_changes(host: TrainingHost) -> None:
    groups = token_groups(host, None, 2)
    run = prepared(host, groups=groups, epochs=3, groups_per_step=1, mismatch_correction="token_truncate")
    history = [run.step(index) for index in range(6)]
    # The sampler here is the trainer, so the weights stay 1 whatever the policy has become since.
    for metrics in history:
        assert metrics["mismatch_weight_mean"] == pytest.approx(1.0, abs=1e-4)
        assert metrics["sampler_trainer_logprob_difference"] < 1e-4
        assert metrics["mismatch_fraction_outside"] == 0
    assert history[0]["behaviour_kl"] == pytest.approx(0, abs=1e-6)
    assert history[5]["behaviour_kl"] > 1e-6
    # Without correction the two are compared where they mean the same policy: in the first step.
    plain = prepared(host, groups=groups, epochs=2)
    assert plain.step(0)["sampler_trainer_logprob_difference"] < 1e-4
    assert "sampler_trainer_logprob_difference" not in plain.step(1)
    # Rollouts whose sampler said nothing have nothing to compare.
    assert "sampler_trainer_kl" not in prepared(host, groups=unscored(groups), mismatch_correction="token_mask").step(0)


def test_what_a_sampler_that_is_off_costs(host: TrainingHost) -> None:
    groups = token_groups(host, None, 2)
    for completion in groups[0]["completions"]:
        completion["logprobs"] = [value - 2.0 for value in completion["logprobs"]]
    metrics = prepared(host, groups=groups, mismatch_correction="token_mask").step(0)
    assert metrics["mismatch_fraction_outside"] == pytest.approx(0.5)
    assert metrics["sampler_trainer_logprob_difference"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["mismatch_weight_min"] == 0
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)


def test_an_interrupted_first_step_scores_again(host: TrainingHost) -> None:
    class Cancelled(Exception):
        pass

    def interrupt() -> None:
        raise Cancelled

    fields: dict[str, Any] = {"groups": unscored(token_groups(host, None, 2)), "epochs": 2}
    run = prepared(host, **fields)
    with pytest.raises(Cancelled):
        run.step(0, interrupt)
    assert not [name for name in run.state().tensors if name.startswith("start.")]
    straight = prepared(host, **fields)
    for index in range(2):
        assert without_times(run.step(index)) == without_times(straight.step(index))


def test_the_longest_completion_bounds_dr_grpo(host: TrainingHost) -> None:
    groups = token_groups(host, None, 2)
    by_longest = prepared(host, groups=groups, loss_type="dr_grpo").step(0)["loss"]
    given = prepared(host, groups=groups, loss_type="dr_grpo", max_completion_length=12).step(0)["loss"]
    assert given == pytest.approx(by_longest / 2, rel=1e-5)
    with pytest.raises(InvalidRequest, match="max_completion_length is 5, and a completion has 6 tokens"):
        prepared(host, groups=groups, loss_type="dr_grpo", max_completion_length=5)


def test_groups_of_one_are_skipped_and_counted(host: TrainingHost) -> None:
    groups = token_groups(host, None, 2)
    groups[0]["completions"] = groups[0]["completions"][:1]
    run = prepared(host, groups=groups)
    assert run.notes == ("1 of 2 groups skipped: all rewards in them are equal",)
    metrics = run.step(0)
    assert (metrics["groups_skipped"], metrics["frac_reward_zero_std"]) == (1, 0.5)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rewards": [1.0]}, "completions has 2 entries and rewards 1"),
        ({"rewards": [1.0, float("nan")]}, r"rewards.1\n"),
        ({"rewards": [1.0, float("inf")]}, r"rewards.1\n"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": 1.5}, "learning_rate"),
        ({"beta": -0.1}, "beta"),
        ({"beta": 1e3}, "beta"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"loss_type": "ppo"}, "loss_type"),
        ({"scale_rewards": "all"}, "scale_rewards"),
        ({"mismatch_correction": "token_mask", "mismatch_cap": 0}, "mismatch_cap"),
        ({"mismatch_cap": 2.0}, "mismatch_cap would do nothing here"),
        ({"cispo_max_ratio": 2.0}, "cispo_max_ratio would do nothing here"),
        ({"loss_type": "cispo", "clip_high": 0.5}, "clip_high would do nothing here"),
        ({"max_completion_length": 9}, "max_completion_length would do nothing here"),
        ({"unbiased_kl": True}, "unbiased_kl would do nothing here"),
    ],
)
def test_bad_jobs_straight_from_the_queue(fields: dict[str, Any], says: str) -> None:
    good = {"kind": "grpo", "adapter": "a", "prompt": "2+2=", "completions": ["4", "5"], "rewards": [1.0, 0.0]}
    assert SPEC.validate_python(good).kind == "grpo"
    with pytest.raises(ValueError, match=f"(?s){says}"):
        SPEC.validate_python(good | fields)


def test_every_job_survives_the_queue() -> None:
    for name in TYPES:
        spec = job(prompt="x", completions=["a", "b"], rewards=[1, 0], loss_type=name)
        assert SPEC.validate_json(spec.model_dump_json()) == spec
        assert spec.clip_low == (3e-4 if name == "gspo" else 0.2)
