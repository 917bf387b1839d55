"""Credit: which part of what a trajectory earned each of its turns is compared by."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

AdvantageLevel: TypeAlias = Literal["trajectory", "turn"]


@dataclass(frozen=True, slots=True)
class Credit:
    """Returns of turns, and what is compared with what in a group."""

    level: AdvantageLevel = "trajectory"
    discount: float = 1.0
    """Factor a turn for rewards that come later; 0 to 1."""
    least_std: float = 0.0
    """Standard deviation below which values are as good as equal."""

    def returns(self, rewards: Sequence[float]) -> list[float]:
        """G_t = r_t + discount · G_{t+1} of each turn, from the rewards of the turns."""
        found: list[float] = []
        after = 0.0
        for reward in reversed(rewards):
            after = reward + self.discount * after
            found.append(after)
        return found[::-1]

    def compared(self, group: Sequence[Sequence[float]]) -> list[list[float]]:
        """Values that members of a group are compared by, a list a comparison, with one value a member.

        By trajectory: the return of the first turn, which counts for all turns. By turn: a list a turn number, of the
        returns from there on; a member that ended before counts with the return of its last turn. With a reward at the
        end only and no discount both are the same.

        Args:
            group: rewards of the turns of each member.
        """
        returns = [self.returns(rewards) for rewards in group]
        turns = 1 if self.level == "trajectory" else max(map(len, returns))
        return [[found[min(turn, len(found) - 1)] for found in returns] for turn in range(turns)]

    def spread(self, group: Sequence[Sequence[float]]) -> bool:
        """Some member of a group is better than another somewhere."""
        return any(self.differs(values) for values in self.compared(group))

    def differs(self, values: Sequence[float]) -> bool:
        """A comparison tells something."""
        return len(values) > 1 and max(values) > min(values) and statistics.stdev(values) >= self.least_std
