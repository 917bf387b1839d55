"""Rounds of a job that samples for itself: the first step of each samples, and all of its steps train on that.

A round is a fixed number of optimizer steps, so the job's length is known and a step number says what comes next. What
a round sampled is part of the state until its last step, so a resumed round goes on with the same completions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from services.trainer.host.rollouts import Completion, RolloutRequest
from services.trainer.jobs.adapter_run import AdapterRun
from services.trainer.sampling.rounds.round_sampler import RoundSampler
from services.trainer.timers import StepTimer

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


class PromptTokens(Protocol):
    """A prompt as tokens, with whatever else a kind of job knows of it."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...


P = TypeVar("P", bound=PromptTokens)


class RoundRun(AdapterRun, Generic[P]):
    """Run of a job that samples: it evaluates before the first step, samples where a round begins, and evaluates again
    behind rounds."""

    measure: ClassVar[str]
    """The metric of `evaluate` that is also measured before the first step."""

    def _plan_rounds(self, rounds: Rounds, sampler: RoundSampler[P], temperature: float, held_out: Sequence[P]) -> None:
        """Sets what the rounds need. A subclass calls it before ``AdapterRun.__init__``.

        Args:
            temperature: of the rounds' completions; held-out prompts are answered greedily.
            held_out: prompts of the evaluation.
        """
        self._rounds = rounds
        self._sampler = sampler
        self._sampling_temperature = temperature
        self._held_out = held_out
        self._number = -1
        """Number of the round that was sampled last; -1: none yet."""

    def examine(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """See JobRun.examine: the job's examples are those that it samples."""
        del interrupt
        return {}

    def _evaluates_behind(self, index: int) -> bool:
        return bool(self._held_out) and self._rounds.evaluates_behind(index)

    def _before(self, index: int, interrupt: Callable[[], None]) -> None:
        number, before = self._rounds.number(index), f"{self.measure}_before"
        if index == 0 and self._held_out and before not in self._found:
            self._found[before] = self.evaluate(interrupt)[self.measure]
        self._found["round"] = float(number + 1)
        if self._number != number:
            self._found |= self._begin(number, interrupt)
            self._number = number
        super()._before(index, interrupt)

    @abstractmethod
    def _begin(self, number: int, interrupt: Callable[[], None]) -> dict[str, float]:
        """Makes a round the one that is trained on; returns metrics of how it was sampled."""

    @property
    def _under_way(self) -> bool:
        """Whether the round that was sampled last has steps left."""
        return self._number >= 0 and self._rounds.under_way(self._number, self._finished)

    def _sample_greedily(self, prompts: Sequence[P], interrupt: Callable[[], None]) -> list[Completion]:
        """Greedy completions of held-out prompts. Their time is no part of the step that they happen to fall on."""
        requests = [RolloutRequest(prompt.token_ids, 0) for prompt in prompts]
        return self._sampler.sample(self._lora, requests, 0.0, StepTimer(self._host.model.device), interrupt)
