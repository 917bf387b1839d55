"""The steps of a job that samples for itself: so many rounds, in each so many epochs over what it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Rounds:
    """A fixed number of steps a round, so that a step number says what comes next.

    Raises:
        ValueError: a number below 1.
    """

    count: int
    epochs: int
    """Epochs of each round."""
    steps_per_epoch: int
    eval_every: int | None
    """Rounds between evaluations; the last round is always evaluated."""

    def __post_init__(self) -> None:
        every = 1 if self.eval_every is None else self.eval_every
        if min(self.count, self.epochs, self.steps_per_epoch, every) < 1:
            raise ValueError(f"rounds have at least one of everything: {self}")

    @property
    def steps(self) -> int:
        """Steps of each round."""
        return self.epochs * self.steps_per_epoch

    @property
    def total_steps(self) -> int:
        return self.count * self.steps

    def number(self, step: int) -> int:
        """The round of a step, from 0."""
        return step // self.steps

    def in_first_epoch(self, step: int) -> bool:
        """Whether its round has not trained on the step's part before."""
        return step % self.steps < self.steps_per_epoch

    def part(self, items: Sequence[_T], step: int) -> Sequence[_T]:
        """An even part of what the round has, for each step of an epoch another: how many there are is not known
        before, and there may be fewer than steps."""
        place = step % self.steps % self.steps_per_epoch
        start, end = (len(items) * edge // self.steps_per_epoch for edge in (place, place + 1))
        return items[start:end]

    def evaluates_behind(self, step: int) -> bool:
        """Whether the step ends a round behind which held-out prompts are asked."""
        number, place = divmod(step + 1, self.steps)
        return place == 0 and (number == self.count or (self.eval_every is not None and number % self.eval_every == 0))

    def under_way(self, number: int, finished: int) -> bool:
        """Whether a round has steps left after so many finished ones of the job."""
        return finished < (number + 1) * self.steps
