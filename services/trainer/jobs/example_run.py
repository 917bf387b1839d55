"""Base of jobs that go through examples: their order, epochs, and evaluation between steps."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from services.common.adapters.drafter_form import MOST_BLOCK
from services.common.jobs import ExampleJob
from services.common.jobs.documents import Document
from services.common.jobs.examples import Numbered
from services.common.validation.strict_models import SentModel
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.adapter_run import TrainingRun, microbatch_tokens
from services.trainer.jobs.base import RunData
from services.trainer.packing import largest_microbatch, shuffled

E = TypeVar("E", bound=SentModel)
D = TypeVar("D")
_EXAMINED = (
    *("loss", "token_accuracy", "accuracy", "margin", "acceptance"),
    *(f"acceptance_{place}" for place in range(2, MOST_BLOCK + 1)),
)
"""Metrics of an evaluation that tell how well a job's own examples are known."""

_RIGHT = {"token_accuracy": "trained tokens that are the likeliest", "acceptance": "tokens that would be accepted"}
"""Those among them that are shares of right tokens."""


def both_parts(
    split: tuple[Numbered[E], Numbered[E], str], made: Callable[[Numbered[E], str], tuple[list[D], list[str]]]
) -> tuple[list[D], list[D], list[str]]:
    """What is made of a job's examples and of those that it holds out, and the notes on both.

    Args:
        split: of the job.
        made: what is made of examples, the field of which is named, and notes.
    """
    chosen, held, field = split
    examples, notes = made(chosen, "examples")
    held_out, more = made(held, field) if held else ([], [])
    return examples, held_out, [*notes, *(f"evaluation: {note}" for note in more)]


class ExampleRun(TrainingRun):
    """``batch_size`` examples an optimizer step, shuffled anew each epoch as a function of the seed.

    Args:
        examples: the documents of each.
        held_out: the same of what is evaluated.
        smallest_step: a last step of an epoch with fewer examples becomes part of the one before.
    """

    def __init__(
        self,
        spec: ExampleJob[Any],
        host: PolicyHost,
        parent: Mapping[str, bytes] | None,
        *,
        examples: Sequence[Sequence[Document]],
        held_out: Sequence[Sequence[Document]],
        notes: Sequence[str],
        smallest_step: int = 1,
    ) -> None:
        self._examples = examples
        self._held_out = held_out
        self._order = spec
        self._smallest_step = smallest_step
        count, size = len(examples), spec.batch_size
        full, rest = divmod(count, size)
        self._steps_per_epoch = max(1, full + (rest >= smallest_step))
        lengths = sorted((document.length for example in examples for document in example), reverse=True)
        documents_a_step = (size + smallest_step - 1) * max(len(example) for example in examples)
        usual = spec.pace.passes(count, self._steps_per_epoch)
        passes = usual if spec.epochs is None else spec.epochs
        super().__init__(
            spec,
            host,
            parent,
            total_steps=passes * self._steps_per_epoch,
            largest=largest_microbatch(lengths[:documents_a_step], microbatch_tokens(spec, host)),
            notes=notes,
        )

        inputs = sorted((sum(document.length - 1 for document in example) for example in examples), reverse=True)
        self.step_tokens = sum(inputs[: size + smallest_step - 1])
        """Tokens that an optimizer step reads, at most."""
        self._settings |= {"epochs": passes, "batch_size": size}
        self._defaults = {"epochs": usual, **self._defaults}

    def data(self) -> RunData:
        """See TrainingRun."""
        return RunData("example", self._examples, len(self._held_out))

    def right_already(self, interrupt: Callable[[], None] = lambda: None) -> tuple[float, str, int] | None:
        """See TrainingRun: by the metric that counts tokens which the adapter would have chosen."""
        examined = self.examine(interrupt)
        tokens = sum(document.num_trained for example in self._to_examine() for document in example)
        for name, what in _RIGHT.items():
            if name in examined:
                return examined[name], what, tokens
        return None

    def chosen(self, index: int) -> list[Sequence[Document]]:
        """The examples of step ``index``."""
        epoch, position = divmod(index, self._steps_per_epoch)
        count, size = len(self._examples), self._order.batch_size
        order = shuffled(count, seed=self._order.seed, epoch=epoch) if self._order.shuffle else range(count)
        start = position * size
        end = count if position + 1 == self._steps_per_epoch else start + size
        return [self._examples[example] for example in order[start:end]]

    def _evaluates_behind(self, index: int) -> bool:
        every = self._order.eval_every or self._steps_per_epoch
        return bool(self._held_out) and ((index + 1) % every == 0 or index + 1 == self.total_steps)

    def evaluate(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Metrics on the held-out examples, with the prefix ``eval_``; {} without any."""
        if not self._held_out:
            return {}
        started = time.perf_counter()
        with self._within_plan("the evaluation"):
            return as_evaluated(self._evaluate(self._held_out, interrupt), started)

    def examine(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """See JobRun.examine."""
        with self._within_plan("looking at the examples"):
            return as_examined(self._evaluate(self._to_examine(), interrupt))

    def _to_examine(self) -> list[Sequence[Document]]:
        """The examples that `examine` looks at."""
        lengths = [sum(document.length for document in example) for example in self._examples]
        return [self._examples[index] for index in self._examined(lengths, least=self._smallest_step)]

    @abstractmethod
    def _evaluate(self, examples: Sequence[Sequence[Document]], interrupt: Callable[[], None]) -> dict[str, float]:
        """Metrics on these examples; computes without gradients."""


def as_evaluated(found: Mapping[str, float], started: float) -> dict[str, float]:
    """Metrics of an evaluation that began at ``started`` of time.perf_counter(), as `evaluate` names them."""
    return {f"eval_{name}": value for name, value in found.items()} | {"eval_seconds": time.perf_counter() - started}


def as_examined(found: Mapping[str, float]) -> dict[str, float]:
    """Those metrics of an evaluation that `examine` tells."""
    return {name: value for name, value in found.items() if name in _EXAMINED}
