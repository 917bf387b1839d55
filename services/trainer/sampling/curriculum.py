"""Curriculum of a job that samples: its rounds draw prompts by how often they have been answered well.

Which prompts a round has follows from the job's seed, the number of the round, and the rounds that were trained on
before it was drawn. The draw is weighted and without repeats: the prompts with the largest u^(1/weight), with u uniform
for each (Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from services.common.jobs.fields.curriculum import Curriculum
from services.trainer.sampling.prompts import sample_seed
from services.trainer.sampling.rounds.round_sampler import RoundSampler

P = TypeVar("P")
_SEEDS = 2**63


class CurriculumSampler(RoundSampler[P]):
    """Sampler of rounds whose prompts are drawn.

    Args:
        curriculum: weights of the draw.
        rest: see RoundSampler.
    """

    def __init__(self, curriculum: Curriculum, prompts: Sequence[P], **rest: Any) -> None:
        super().__init__(prompts=prompts, **rest)
        self._curriculum = curriculum
        self._success: dict[int, float] = {}
        """Share of successes of each prompt that was in a round, by its index."""
        self._drawn: dict[int, list[int]] = {}
        """Prompts of the rounds that were drawn and not left behind."""

    def chosen(self, number: int) -> list[P]:
        """The prompts of a round. They are drawn when they are first asked for, and stay."""
        if number not in self._drawn:
            keys = {index: self._key(number, index) for index in range(len(self._prompts))}
            self._drawn[number] = sorted(keys, key=keys.__getitem__, reverse=True)[: self._size]
        return [self._prompts[index] for index in self._drawn[number]]

    def _key(self, number: int, index: int) -> float:
        uniform = (sample_seed(self._seed, "curriculum", number, index) + 0.5) / _SEEDS
        return math.log(uniform) / self._weight(index)

    def _weight(self, index: int) -> float:
        success = self._success.get(index)
        inside = success is None or self._curriculum.low <= success <= self._curriculum.high
        return 1.0 if inside else self._curriculum.outside

    def learn(self, earned: Iterable[tuple[int, int, Sequence[float]]], keep: int) -> None:
        """Takes in what a round has shown.

        Args:
            earned: rewards of the completions of each prompt, none where all were dropped, by the round that it was
                drawn for and its place there.
            keep: the earliest round of which prompts may still come.
        """
        newest = self._curriculum.newest
        for number, place, those in earned:
            if those:
                index = self._drawn[number][place]
                rate = sum(reward >= self._curriculum.success_at for reward in those) / len(those)
                self._success[index] = (1 - newest) * self._success.get(index, rate) + newest * rate
        self._drawn = {other: drawn for other, drawn in self._drawn.items() if other >= keep}

    def metrics(self) -> dict[str, float]:
        """Shares of all prompts: whose success is known, below, inside of and above the band."""
        low, high = self._curriculum.low, self._curriculum.high
        known, count = self._success.values(), len(self._prompts)
        return {
            "curriculum_known": len(known) / count,
            "curriculum_below": sum(one < low for one in known) / count,
            "curriculum_inside": sum(low <= one <= high for one in known) / count,
            "curriculum_above": sum(one > high for one in known) / count,
        }

    def state(self) -> dict[str, Any]:
        """JSON of a checkpoint."""
        return {"success": sorted(self._success.items()), "drawn": sorted(self._drawn.items())}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state()."""
        self._success = {int(index): float(rate) for index, rate in state["success"]}
        self._drawn = {int(number): [int(index) for index in drawn] for number, drawn in state["drawn"]}
