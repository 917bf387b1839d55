"""Guard rails: what each of them says, and from where on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.jobs import LoraSettings
from services.common.jobs.dry_runs.guard_rails import TrainingFacts, check_scale, scale_of, warnings

FINE = TrainingFacts(
    rate=2e-3,
    usual_rate=2e-3,
    alpha=32,
    scale=2,
    parameters=1000,
    data_bits=2000,
    examples=8,
    epochs=30,
    usual_epochs=30,
    group_size=4,
    groups=4,
    groups_skipped=1,
    saturation=0.9,
)


def test_nothing_is_said_of_what_is_usual() -> None:
    assert warnings(FINE) == []
    assert warnings(TrainingFacts(1e-4, 1e-4)) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"alpha": 64, "scale": 4}, "lora.alpha 64 multiplies the adapter by 4"),
        ({"rate": 2.1e-2}, "10.5 times the default here"),
        ({"rate": 1.9e-4}, "a 10.5th of the default here"),
        ({"group_size": 3}, "a group has 3 completions"),
        ({"groups_skipped": 2}, "2 of 4 groups have equal rewards"),
        ({"data_bits": 2001}, "the adapter holds about 2e+03 (2 a number)"),
        ({"epochs": 61}, "61 epochs over 8 examples"),
        ({"saturation": 0.96}, "right in 96% already"),
    ],
)
def test_one_thing_that_is_off_is_told_alone(changed: dict[str, Any], said: str) -> None:
    found = warnings(replace(FINE, **changed))
    assert len(found) == 1
    assert said in found[0]


def test_limits_themselves_are_fine() -> None:
    assert warnings(replace(FINE, rate=2e-2)) == warnings(replace(FINE, rate=2e-4)) == []
    assert warnings(replace(FINE, epochs=60)) == warnings(replace(FINE, epochs=61, examples=33)) == []
    # The same best rate at every rank, with alpha at 32.
    assert warnings(replace(FINE, scale=32)) == []


def test_a_factor_that_cannot_work_is_refused_by_name() -> None:
    check_scale(LoraSettings(rank=1))
    check_scale(LoraSettings(rank=4, alpha=512))
    with pytest.raises(InvalidRequest, match=r"lora\.alpha 516 over rank of 4 .* by 129, and at most 128") as refused:
        check_scale(LoraSettings(rank=4, alpha=516))
    assert refused.value.param == "lora.alpha"
    assert scale_of(LoraSettings(rank=4, alpha=516, use_rslora=True)) == 258


def test_rates_are_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        TrainingFacts(0.0, 1e-4)
