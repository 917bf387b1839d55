"""Losses against loops over tokens, written from the formulas."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from services.trainer.losses import (
    group_advantages,
    negative_log_likelihood,
    policy_loss,
    policy_loss_type,
    sampled_reverse_kl,
)
from services.trainer.losses.logprobs import MOST_NATS, importance_ratio


def test_negative_log_likelihood_is_a_mean_over_the_whole_step() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5])
    whole = negative_log_likelihood(logprobs, 3)
    parts = negative_log_likelihood(logprobs[:1], 3) + negative_log_likelihood(logprobs[1:], 3)
    assert float(whole) == pytest.approx(3.5 / 3)
    assert float(parts) == pytest.approx(float(whole))


def test_advantages() -> None:
    rewards = [1.0, 0.0, 0.25, 0.5]
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    assert group_advantages(rewards, scale=True) == pytest.approx([(r - mean) / (std + 1e-4) for r in rewards])
    assert group_advantages(rewards, scale=False) == pytest.approx([r - mean for r in rewards])
    assert group_advantages([0.3, 0.3, 0.3], scale=True) is None
    assert group_advantages([0.3], scale=False) is None
    assert group_advantages([0.1] * 10, scale=True) is None  # whose float mean is not exactly 0.1


def reference_loss(
    logprobs: list[float], behaviour: list[float], advantages: list[float], base: list[float] | None, beta: float
) -> float:
    total = 0.0
    for index, (logp, old, advantage) in enumerate(zip(logprobs, behaviour, advantages, strict=True)):
        ratio = math.exp(logp - old)
        clipped = min(max(ratio, 1 - 0.2), 1 + 0.28)
        total -= min(ratio * advantage, clipped * advantage)
        if base is not None:
            total += beta * (math.exp(base[index] - logp) - (base[index] - logp) - 1)
    return total / 100


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_policy_loss_and_gradient(beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = (-torch.rand(64, generator=generator) * 3).double().requires_grad_()
    behaviour = logprobs.detach() + 0.5 * torch.randn(64, generator=generator).double()
    advantages = torch.randn(64, generator=generator).double()
    base = logprobs.detach() + 0.5 * torch.randn(64, generator=generator).double() if beta else None

    def brute(values: list[float]) -> float:
        return reference_loss(
            values, behaviour.tolist(), advantages.tolist(), base.tolist() if base is not None else None, beta
        )

    result = policy_loss(
        logprobs, behaviour, advantages, clip_low=0.2, clip_high=0.28, total_tokens=100, reference=base, beta=beta
    )
    values = logprobs.tolist()
    assert float(result.loss.detach()) == pytest.approx(brute(values), rel=1e-9)
    result.loss.backward()
    assert logprobs.grad is not None
    for index in range(0, 64, 7):
        up, down = list(values), list(values)
        up[index] += 1e-6
        down[index] -= 1e-6
        assert float(logprobs.grad[index]) == pytest.approx((brute(up) - brute(down)) / 2e-6, abs=1e-7)
    ratios = (logprobs.detach() - behaviour).exp()
    assert float(result.ratio) == pytest.approx(float(ratios.sum()))
    assert float(result.clipped_low) == sum((a < 0) and (r < 0.8) for a, r in zip(advantages, ratios, strict=True))
    assert float(result.clipped_high) == sum((a > 0) and (r > 1.28) for a, r in zip(advantages, ratios, strict=True))
    assert float(result.drift) == pytest.approx(float((ratios - 1 - ratios.log()).sum()))
    assert (float(result.kl) > 0) == (beta > 0)


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    result = policy_loss(
        logprobs, logprobs.detach(), torch.tensor([1.0, -0.5]), clip_low=0.2, clip_high=0.28, total_tokens=2
    )
    result.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 0.25]


FORMS: list[dict[str, Any]] = [
    {"loss_type": "dapo"},
    {"loss_type": "gspo", "lengths": [2, 2]},
    {"loss_type": "cispo"},
    {"loss_type": "dapo", "reference": "far", "beta": 0.1},
    {"loss_type": "dapo", "reference": "far", "beta": 0.1, "unbiased_kl": True},
]


@pytest.mark.parametrize("far", [30.0, 89.0, 1000.0, math.inf])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_a_token_that_one_policy_finds_impossible_leaves_numbers(form: dict[str, Any], far: float) -> None:
    """An advantage of 0 times a ratio without bound is no number, and would end the job."""
    logprobs = torch.tensor([-0.5, -0.1, -0.7, -0.2], requires_grad=True)
    behaviour = torch.tensor([-0.5, -0.1 - far, -0.6, -0.2 - far])
    given = {**form}
    kind = policy_loss_type(given.pop("loss_type"))
    if "reference" in given:
        given["reference"] = torch.tensor([-0.5, far, -0.7, -0.2])
    advantages = torch.tensor([1.0, 0.0, -1.0, -2.0])
    result = policy_loss(
        logprobs, behaviour, advantages, clip_low=0.2, clip_high=0.28, total_tokens=4, surrogate=kind.surrogate, **given
    )
    result.loss.backward()
    assert logprobs.grad is not None
    for value in (result.loss, result.ratio, result.drift, result.kl, logprobs.grad):
        assert torch.isfinite(value).all()


def test_so_does_the_loss_of_distillation() -> None:
    logprobs = torch.tensor([-0.5, -0.1], requires_grad=True)
    behaviour = torch.tensor([-0.5, -200.0])
    loss = sampled_reverse_kl(logprobs, behaviour, behaviour, 2)
    loss.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()


def test_the_bound_changes_nothing_of_ordinary_ratios() -> None:
    difference = torch.linspace(-60.0, MOST_NATS, 97, requires_grad=True)
    ratio = importance_ratio(difference)
    assert torch.equal(ratio, difference.exp())
    (gradient,) = torch.autograd.grad(ratio.sum(), difference)
    assert torch.equal(gradient, difference.exp())
    assert importance_ratio(torch.tensor(500.0)) == torch.tensor(MOST_NATS).exp()
