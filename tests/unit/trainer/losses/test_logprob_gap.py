"""Sampler against trainer: the three numbers, by hand, and when GRPO jobs report them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from services.trainer.losses.logprob_gap import SamplerGap
from tests.training_support import TrainingHost
from tests.unit.trainer.jobs.test_grpo_run import TEXTS, prepared, token_groups

CPU = torch.device("cpu")


def test_the_numbers_by_hand() -> None:
    agreement = SamplerGap(CPU)
    agreement.add(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.8]))
    agreement.add(torch.tensor([-3.0, -0.5]), torch.tensor([-3.2, -9.0]), torch.tensor([True, False]))
    ratios = [1.0, math.exp(0.2), math.exp(-0.2)]
    found = agreement.metrics()
    assert found["sampler_trainer_logprob_difference"] == pytest.approx(0.4 / 3, rel=1e-6)
    assert found["sampler_trainer_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 3, rel=1e-6)
    assert found["sampler_trainer_ratio_outside"] == pytest.approx(2 / 3)


def test_nothing_is_said_of_nothing() -> None:
    agreement = SamplerGap(CPU)
    assert agreement.metrics() == {}
    agreement.add(torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([False]))
    assert agreement.metrics() == {}


def test_a_job_on_given_rollouts_reports_it_before_its_first_update(host: TrainingHost) -> None:
    run = prepared(host, groups=token_groups(host, None, 2), epochs=2)
    first, second = run.step(0), run.step(1)
    assert first["sampler_trainer_logprob_difference"] < 1e-5
    assert first["sampler_trainer_kl"] < 1e-6
    assert first["sampler_trainer_ratio_outside"] == 0
    assert not [name for name in second if name.startswith("sampler_trainer")]


def test_rollouts_of_another_policy_show(host: TrainingHost) -> None:
    groups: list[dict[str, Any]] = token_groups(host, None, 2)
    for group in groups:
        for completion in group["completions"]:
            completion["logprobs"] = [value - 0.3 for value in completion["logprobs"]]
    metrics = prepared(host, groups=groups).step(0)
    assert metrics["sampler_trainer_logprob_difference"] == pytest.approx(0.3, abs=1e-4)
    assert metrics["sampler_trainer_kl"] == pytest.approx(math.exp(0.3) - 1.3, abs=1e-4)
    assert metrics["sampler_trainer_ratio_outside"] == 1


def test_recomputed_rollouts_are_not_compared_with_themselves(host: TrainingHost) -> None:
    texts = prepared(host, prompt="q", completions=TEXTS, rewards=[1.0, 0.8, 0.0, 0.1, 0.0]).step(0)
    assert not [name for name in texts if name.startswith("sampler_trainer")]
    groups = token_groups(host, None, 2)
    for group in groups:
        group["completions"][0]["logprobs"] = [value - 0.3 for value in group["completions"][0]["logprobs"]]
        for completion in group["completions"][1:]:
            del completion["logprobs"]
    mixed = prepared(host, groups=groups).step(0)
    assert mixed["sampler_trainer_logprob_difference"] == pytest.approx(0.3, abs=1e-4)
