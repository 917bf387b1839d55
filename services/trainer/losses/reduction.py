"""What the sum over the tokens of an optimizer step is divided by, for each of GRPO's loss types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from services.common.jobs.kinds.grpo import LossType


@dataclass(frozen=True, slots=True)
class GroupSize:
    """One group of a step."""

    completions: int
    """All of them, those that nothing is learnt from included."""
    lengths: Sequence[int]
    """Trained tokens of each completion that is learnt from."""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or len(self.lengths) > self.completions:
            raise ValueError(f"a group of {self.completions} completions cannot train {list(self.lengths)[:8]} tokens")


def completion_weights(loss_type: LossType, groups: Sequence[GroupSize], *, max_length: int) -> list[float]:
    """The weight of each trained completion's tokens in the mean over all T trained tokens of the step, in order.

    A token of loss l adds weight · l / T to the step's loss. With S completions in the step's G groups:

    - dapo, cispo: 1/T, a mean over tokens (arXiv 2503.14476, eq. 8; arXiv 2506.13585, eq. 4).
    - grpo, gspo: 1/(S · its length), a mean over completions of means over tokens (arXiv 2402.03300, eq. 3;
      arXiv 2507.18071, eq. 5).
    - dr_grpo: 1/(S · max_length), a constant (arXiv 2503.20783, §3.2).
    - bnpo: 1/(G · tokens of its group), a mean over groups of means over their tokens. TRL normalises by the tokens of
      the microbatch, and so depends on how a step is cut; this is the same with one group a microbatch.
    """
    total = sum(sum(group.lengths) for group in groups)
    completions = sum(group.completions for group in groups)
    weights: list[float] = []
    for group in groups:
        match loss_type:
            case "dapo" | "cispo":
                weights += [1.0] * len(group.lengths)
            case "grpo" | "gspo":
                weights += [total / (completions * length) for length in group.lengths]
            case "dr_grpo":
                weights += [total / (completions * max_length)] * len(group.lengths)
            case "bnpo":
                weights += [total / (len(groups) * sum(group.lengths))] * len(group.lengths)
            case _:
                assert_never(loss_type)
    return weights
