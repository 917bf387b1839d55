"""Signs that a reward is gamed, against the first round."""

from __future__ import annotations

import pytest

from services.common.jobs.scorers.of_rewards.penalties import repeated
from services.common.jobs.trajectories.credit import Credit
from services.trainer.losses import turn_advantages
from services.trainer.sampling.reward_signs import RewardSigns, correlation

FIRST = {
    "reward_mean": 0.4,
    "reward_std": 0.4,
    "completion_length_mean": 40.0,
    "repetition_mean": 0.1,
    "truncated_fraction": 0.0,
    "reward_length_correlation": 0.0,
}


@pytest.mark.parametrize(
    ("later", "count"),
    [
        ({"reward_mean": 0.9}, 0),
        ({"reward_mean": 0.9, "completion_length_mean": 80.0}, 1),
        ({"reward_mean": 0.9, "completion_length_mean": 10.0, "repetition_mean": 0.5}, 2),
        ({"reward_mean": 0.9, "truncated_fraction": 0.5, "reward_length_correlation": 0.9, "kl": 2.0}, 3),
        ({"reward_mean": 0.45, "completion_length_mean": 80.0}, 0),
        ({"reward_mean": 0.1, "completion_length_mean": 80.0}, 0),
    ],
)
def test_signs_count_once_the_reward_has_risen(later: dict[str, float], count: int) -> None:
    signs = RewardSigns()
    assert signs.of(FIRST) == {"hacking_signs": 0.0}
    assert signs.of({**FIRST, **later}) == {"hacking_signs": float(count)}


def test_numbers_that_they_are_counted_from() -> None:
    assert correlation([1.0, 2.0, 3.0], [10, 20, 30]) == pytest.approx(1.0)
    assert correlation([1.0, 1.0], [1, 2]) == 0.0
    assert repeated([1, 2, 3]) == 0.0
    assert repeated([7] * 8) == pytest.approx(0.8)


def test_groups_that_hardly_differ_teach_nothing() -> None:
    group = [[0.5], [0.5], [0.51]]
    assert turn_advantages(Credit(), group, scale=True) is not None
    assert turn_advantages(Credit(least_std=0.05), group, scale=True) is None
    assert not Credit(least_std=0.05).spread(group)
