"""Checker of linearizability: Wing and Gong's search with Lowe's memo, for one object at a time.

A history is linearizable if every operation can be given one moment between its call and its answer so that, one after
the other, they do what the model of the object says. An operation whose answer was lost may have happened at any moment
after its call, or never.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

State = TypeVar("State", bound=Hashable)
State_co = TypeVar("State_co", bound=Hashable, covariant=True)

LOST = math.inf
"""Time of an answer that never came."""
MOST_STEPS = 200_000
"""Steps of one search, after which it says that it has found nothing out."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a client.

    Args:
        name: of what was asked.
        argument: with what.
        result: of the answer; None if it was lost.
        called, answered: seconds of one clock; LOST: no answer.
    """

    name: str
    argument: Any
    result: Any
    called: float
    answered: float

    def __post_init__(self) -> None:
        if not self.called <= self.answered:
            raise ValueError(f"answered before it was called: {self}")

    @property
    def lost(self) -> bool:
        """Its outcome is unknown."""
        return self.answered == LOST

    def __str__(self) -> str:
        answer = "?" if self.lost else repr(self.result)
        return f"{self.name}({self.argument!r}) -> {answer}"


class Model(Protocol[State_co]):
    """Sequential specification of an object."""

    def initial(self, operations: Sequence[Operation]) -> State_co:
        """State before the first operation of a history."""

    def after(self, state: Any, operation: Operation) -> Iterable[State_co]:
        """States in which the object may be once it has done this and answered so; none: it cannot have answered so.
        There may be several, because the object also changes by itself, or because the answer was lost."""


class Undecided(Exception):
    """The search took too many steps."""


@dataclass(frozen=True, slots=True)
class Verdict(Generic[State]):
    """Result of a search."""

    linearizable: bool
    longest: tuple[Operation, ...] = ()
    """Order of the most operations that makes sense; all whose answers came, if the history is linearizable."""
    stuck: tuple[Operation, ...] = ()
    """Operations of which none can come next."""


def check(model: Model[State], history: Iterable[Operation], most_steps: int = MOST_STEPS) -> Verdict[State]:
    """Looks for an order of one object's operations.

    Raises:
        Undecided: there were more than ``most_steps`` of them to try.
    """
    operations = sorted(history, key=lambda operation: operation.called)
    needed = sum(1 << number for number, operation in enumerate(operations) if not operation.lost)
    start = model.initial(operations)
    seen: set[tuple[int, State]] = {(0, start)}
    waiting: list[tuple[int, State, tuple[int, ...]]] = [(0, start, ())]
    best: tuple[int, ...] = ()
    steps = 0
    while waiting:
        done, state, order = waiting.pop()
        if needed & ~done == 0:
            return Verdict(True, tuple(operations[number] for number in order))
        if len(order) > len(best):
            best = order
        for number in reversed(_next(operations, done)):
            for following in model.after(state, operations[number]):
                steps += 1
                if steps > most_steps:
                    raise Undecided(f"no order of {len(operations)} operations found in {most_steps} steps")
                if operations[number].lost and following == state:
                    continue  # as if it had never happened, which it may
                here = done | 1 << number, following
                if here not in seen:
                    seen.add(here)
                    waiting.append((*here, (*order, number)))
    done = sum(1 << number for number in best)
    stuck = tuple(operations[number] for number in _next(operations, done))
    return Verdict(False, tuple(operations[number] for number in best), stuck)


def _next(operations: Sequence[Operation], done: int) -> list[int]:
    """Operations that were called before any other of those left was answered: each may be the next. Those whose
    answers came are first, so that a lost one is only tried where it is needed."""
    left = [number for number in range(len(operations)) if not done >> number & 1]
    until = min((operations[number].answered for number in left), default=LOST)
    may = []
    alike = set()
    for number in left:
        operation = operations[number]
        if operation.called > until:
            continue
        if operation.lost:
            # Of lost ones that asked for the same, the one that was called first can stand for any.
            if (what := (operation.name, operation.argument)) in alike:
                continue
            alike.add(what)
        may.append(number)
    return sorted(may, key=lambda number: (operations[number].lost, operations[number].answered))
