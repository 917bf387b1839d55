"""Base of jobs that learn from examples: the examples, the passes over them, and those that are held out."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, get_args

from pydantic import Field, model_validator

from services.common.errors import InvalidRequest
from services.common.jobs.base import DataRows, JobBase
from services.common.jobs.fields.acceptance import Better
from services.common.jobs.fields.dataset import OfDataset
from services.common.validation.errors import contradiction
from services.common.validation.json_rules import (
    NONE,
    SOME,
    Rule,
    Rules,
    both,
    either,
    given,
    has,
    if_any,
    left_out,
    only_with,
)
from services.common.validation.strict_models import SentModel, absent

E = TypeVar("E", bound=SentModel)
Numbered: TypeAlias = list[tuple[int, E]]
"""Examples with their index in the field of the job that they come from."""
OF_DATASET: Rule = given("dataset")
EVALUATES: Rule = either(OF_DATASET, has(eval_examples=SOME), has(eval_fraction={"exclusiveMinimum": 0}))
"""Holds of an ExampleJob that computes evaluations."""
HOLDS_NOTHING_OUT: Rule = either(has(eval_examples=SOME), if_any(eval_fraction=0))
MOST_EPOCH_VERSIONS = 16
_STATE_WORDS = 624
"""Words of a Mersenne twister's state."""


def held_out(count: int, fraction: float) -> int:
    """Number of held-out examples among ``count``, by their share."""
    return 0 if fraction == 0 else min(max(1, count - 1), max(1, math.floor(count * fraction + 0.5)))


def permutation(count: int, seed: int) -> list[int]:
    """Permutation of the numbers below ``count``, drawn alike by every process, with torch or without.

    It is that of `torch.randperm` on the CPU (a Fisher-Yates shuffle on a Mersenne twister, seeded by init_genrand of
    Matsumoto and Nishimura): a gateway has no torch, and what jobs of earlier releases held out stays what they hold
    out.
    """
    draw = _twister(seed)
    order = list(range(count))
    for at in range(count - 1):
        other = at + draw.getrandbits(32) % (count - at)
        order[at], order[other] = order[other], order[at]
    return order


def _twister(seed: int) -> random.Random:
    word = seed & 0xFFFFFFFF
    words = [word]
    for index in range(1, _STATE_WORDS):
        word = (1812433253 * (word ^ (word >> 30)) + index) & 0xFFFFFFFF
        words.append(word)
    twister = random.Random()
    twister.setstate((3, (*words, _STATE_WORDS), None))
    return twister


def split_evaluation(count: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices to train on and to hold out: at least one of each, of two examples or more, when ``fraction`` is above
    0."""
    held = held_out(count, fraction)
    if not held:
        return list(range(count)), []
    order = permutation(count, seed * 1_000_003 - 1)
    return sorted(order[held:]), sorted(order[:held])


class ExampleJob(OfDataset, JobBase, Generic[E]):
    """A job whose optimizer steps each take ``batch_size`` examples."""

    examples: list[E] = Field(default_factory=list)
    """Examples to learn from, unless a `dataset` has them."""
    eval_examples: list[E] = Field(default_factory=list)
    """Examples to evaluate on. Of a `dataset` they are those of its validation split, unless they are given here."""
    eval_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the examples held out for evaluation, when eval_examples is not given."""
    eval_every: int | None = Field(None, ge=1)
    """Optimizer steps between evaluations; None: at the end of each epoch."""
    epochs: int | None = Field(None, ge=1, le=1000, exclude_if=absent)
    """Passes over the examples. None: by the method and how many there are (`Pace`)."""
    batch_size: int = Field(8, ge=1)
    """Examples an optimizer step. It is cut into microbatches of max_tokens_per_microbatch whose gradients add up."""
    shuffle: bool = True
    epoch_versions: int | None = Field(None, ge=1, le=MOST_EPOCH_VERSIONS, exclude_if=absent)
    """Newest epochs before the last whose ends are published, too, as versions that only who names them gets."""

    kind: str
    evaluated: ClassVar[Mapping[str, Better]]
    """Metrics of an evaluation, and which way is better; each kind has its own."""
    least_loss_fall: ClassVar[float]
    """Share of its value at the start that the loss on the job's own examples falls by where something is learnt."""
    loss_in_nats: ClassVar[bool] = False
    """The loss is in nats a token, so that its value alone tells how well the examples are known."""
    own_data: ClassVar[str] = "examples"
    json_rules: ClassVar[Rules] = (
        either(both(OF_DATASET, if_any(examples=NONE)), both(left_out("dataset"), has(examples=SOME))),
        either(OF_DATASET, HOLDS_NOTHING_OUT, has(examples={"minItems": 2})),
        only_with("eval_every", EVALUATES),
    )

    @model_validator(mode="after")
    def _one_source(self) -> ExampleJob[E]:
        if not self.examples and not self.unread:
            raise contradiction("there is nothing to learn from: give examples, or a dataset", "examples")
        if self.examples and self.unread:
            raise contradiction("the examples come from the dataset: leave one of them out", "dataset")
        return self

    @model_validator(mode="after")
    def _enough_to_split(self) -> ExampleJob[E]:
        if self.held_out and len(self.examples) < 2:
            raise contradiction(
                "eval_fraction holds one of the examples out, and there is only one: give more, or eval_examples",
                "eval_fraction",
            )
        return self

    def check_used(self) -> None:
        """See JobBase."""
        if self.eval_every is not None and not self.eval_metrics:
            raise InvalidRequest(
                f"eval_every would do nothing: there is nothing to evaluate on: {self.evaluation_way_out}, or leave it "
                "out",
                param="eval_every",
            )

    @property
    def held_out(self) -> int:
        """Number of examples that are held out. If any are to be, at least one is, and at least one is left."""
        return 0 if self.eval_examples or self.unread else held_out(len(self.examples), self.eval_fraction)

    @property
    def split(self) -> tuple[Numbered[E], Numbered[E], str]:
        """Examples to train on, examples to hold out, and the field that the latter come from."""
        if self.eval_examples:
            return list(enumerate(self.examples)), list(enumerate(self.eval_examples)), "eval_examples"
        train, held = split_evaluation(len(self.examples), self.eval_fraction, self.seed)
        return (
            [(index, self.examples[index]) for index in train],
            [(index, self.examples[index]) for index in held],
            "examples",
        )

    @property
    def eval_metrics(self) -> Mapping[str, Better]:
        """See JobBase."""
        return self.evaluated if self.eval_examples or self.eval_fraction > 0 or self.unread else {}

    @property
    def evaluation_way_out(self) -> str:
        """See JobBase."""
        return "give eval_examples, or hold some examples out with eval_fraction"

    @classmethod
    def data_rows(cls, rows: Sequence[Mapping[str, Any]]) -> DataRows:
        """See JobBase."""
        del rows
        return DataRows("examples", get_args(cls.model_fields["examples"].annotation)[0])

    def numbered_examples(self) -> Iterator[tuple[str, E]]:
        """Every example with its place in the job, "examples[3]"."""
        for field, examples in (("examples", self.examples), ("eval_examples", self.eval_examples)):
            for index, example in enumerate(examples):
                yield f"{field}[{index}]", example
