"""Penalties: scorers from −1 to 0, which take away from what other rewards give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from services.common.jobs.scorers.base import ScorerSpec
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.sample import Sample, Scorer
from services.common.validation.json_rules import Rules, at_least_one, either, has

PIECE = 4
"""Words of the pieces that repetition is counted in."""


class LengthPenalty(ScorerSpec):
    """0 up to `free` tokens, −1 from `most` on, falling evenly between them (DAPO's soft punishment of long answers,
    arXiv 2503.14476, eq. 13)."""

    type: Literal["length"] = "length"
    free: int = Field(ge=0)
    """Tokens of a completion that cost nothing, thoughts and the end token included."""
    most: int = Field(ge=1)
    """Tokens from which on the whole penalty is due."""

    @model_validator(mode="after")
    def _ordered(self) -> LengthPenalty:
        if self.most <= self.free:
            raise ValueError(f"most is {self.most} and free {self.free}: the penalty grows from free to most")
        return self

    def scorer(self, where: str, grants: Grants) -> Scorer:
        """See SampleScorerSpec."""
        del where, grants
        return _Each(self.penalty)

    def penalty(self, sample: Sample) -> float:
        """Penalty of one completion."""
        return -min(1.0, max(0.0, (sample.tokens - self.free) / (self.most - self.free)))


class FormatPenalty(ScorerSpec):
    """Minus the share of the rules given here that a completion breaks."""

    type: Literal["format"] = "format"
    tags: Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(max_length=32)] = Field(
        default_factory=list
    )
    """Marks that the completion, its thoughts included, has once each and in this order, such as "<answer>" and
    "</answer>"."""
    ends: bool = False
    """It ends by itself: it does not hit max_tokens."""
    most_repeated: float | None = Field(None, ge=0, lt=1)
    """Largest share of pieces of four words that repeat an earlier one."""

    json_rules: ClassVar[Rules] = (either(has(tags={"minItems": 1}), has(ends=True), at_least_one("most_repeated")),)

    @model_validator(mode="after")
    def _asks_something(self) -> FormatPenalty:
        if not self.tags and not self.ends and self.most_repeated is None:
            raise ValueError("give tags, ends or most_repeated: without, no completion breaks a rule")
        return self

    def scorer(self, where: str, grants: Grants) -> Scorer:
        """See SampleScorerSpec."""
        del where, grants
        return _Each(self.penalty)

    def penalty(self, sample: Sample) -> float:
        """Penalty of one completion."""
        broken = []
        if self.tags:
            broken.append(not _in_order(sample.completion, self.tags))
        if self.ends:
            broken.append(sample.truncated)
        if self.most_repeated is not None:
            broken.append(repetition(sample.completion) > self.most_repeated)
        return -sum(broken) / len(broken)


class _Each:
    """Scorer of completions one by one."""

    def __init__(self, penalty: Callable[[Sample], float]) -> None:
        self._penalty = penalty

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer."""
        found = []
        for sample in samples:
            interrupt()
            found.append(self._penalty(sample))
        return found


def _in_order(text: str, tags: Sequence[str]) -> bool:
    places = [text.find(tag) for tag in tags]
    once = all(text.count(tag) == 1 for tag in tags)
    return once and places == sorted(places)


def repetition(text: str) -> float:
    """Share of a text's pieces of PIECE words that stand in it before; 0 of a text of fewer words."""
    return repeated(text.split())


def repeated(words: Sequence[object]) -> float:
    """The same of words, or of tokens."""
    pieces = [tuple(words[at : at + PIECE]) for at in range(len(words) - PIECE + 1)]
    return 1 - len(set(pieces)) / len(pieces) if pieces else 0.0
