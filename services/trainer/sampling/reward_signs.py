"""Signs that a policy earns its reward in another way than was meant: it rises, and what is not rewarded drifts.

None of them proves anything: a task may ask for longer answers. They say when to read some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from services.common.jobs import GrpoGroup
from services.common.jobs.scorers.of_rewards.penalties import repeated

UP = 0.25
"""Standard deviations of the first round's rewards that the mean has risen by before any sign counts."""
LENGTH_FACTOR = 1.5
MORE_REPEATED = 0.1
MORE_TRUNCATED = 0.2
FOLLOWS_LENGTH = 0.7
FAR_FROM_BASE = 0.5
"""Nats a token, where the KL to the base model is measured (`beta`)."""
_KEPT = ("reward_mean", "reward_std", "completion_length_mean", "repetition_mean", "truncated_fraction")


class RewardSigns:
    """Signs of a job that samples, against its first round."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        """Metrics of the first round; empty before it. Part of checkpoints."""

    def of(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """``hacking_signs`` of a step: how many there are, 0 while the reward has not risen.

        Args:
            metrics: of the step, with those of its round.
        """
        if not metrics.keys() >= {*_KEPT, "reward_length_correlation"}:
            return {}  # every episode of the round was dropped
        if not self.first:
            self.first = {name: metrics[name] for name in _KEPT}
        first = self.first
        rise = metrics["reward_mean"] - first["reward_mean"]
        if rise <= UP * first["reward_std"] or rise <= 0:
            return {"hacking_signs": 0.0}
        length = metrics["completion_length_mean"] / first["completion_length_mean"]
        signs = (
            not 1 / LENGTH_FACTOR < length < LENGTH_FACTOR,
            metrics["repetition_mean"] > first["repetition_mean"] + MORE_REPEATED,
            metrics["truncated_fraction"] > first["truncated_fraction"] + MORE_TRUNCATED,
            abs(metrics["reward_length_correlation"]) > FOLLOWS_LENGTH,
            metrics.get("kl", 0.0) > FAR_FROM_BASE,
        )
        return {"hacking_signs": float(sum(signs))}


def drift(groups: Sequence[GrpoGroup]) -> dict[str, float]:
    """What the signs are counted from, of all members of the groups of a round; {} without any.

    Of a trajectory those are the tokens that were sampled.
    """
    sampled = [
        [token for action in trajectory.actions for token in action.token_ids]
        for group in groups
        for trajectory in group.played
    ]
    sampled += [one.token_ids or [] for group in groups for one in group.completions]
    rewards = [reward for group in groups if group.trajectories is not None for reward in group.rewards]
    rewards += [reward for group in groups if group.trajectories is None for reward in group.rewards]
    if not sampled:
        return {}
    lengths = list(map(len, sampled))
    count = len(sampled)
    return {
        "completion_length_mean": sum(lengths) / count,
        "truncated_fraction": sum(flag for group in groups for flag in group.truncated) / count,
        "repetition_mean": math.fsum(map(repeated, sampled)) / count,
        "reward_length_correlation": correlation(rewards, lengths),
    }


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Pearson's correlation; 0 where one of them does not vary."""
    centre, middle = math.fsum(one) / len(one), math.fsum(other) / len(other)
    pairs = [(a - centre, b - middle) for a, b in zip(one, other, strict=True)]
    spread = math.sqrt(math.fsum(a * a for a, _ in pairs) * math.fsum(b * b for _, b in pairs))
    return math.fsum(a * b for a, b in pairs) / spread if spread > 0 else 0.0
