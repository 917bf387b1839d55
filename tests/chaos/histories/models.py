"""Models: what the queue, the registry, pointers, sessions and stored documents do when nothing is concurrent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.chaos.histories.checker import Operation

ABSENT = "absent"
"""What reading an object answers that is not there (404)."""
UNTOLD = "?"
"""Answer of a move that does not say what was before."""
ENDS = ("succeeded", "failed", "cancelled")


class Register:
    """One value: "write" it, "read" it, "remove" it. Of stored documents and feedback."""

    def initial(self, operations: Sequence[Operation]) -> Any:
        return ABSENT

    def after(self, state: Any, operation: Operation) -> Iterator[Any]:
        match operation.name:
            case "write":
                yield operation.argument
            case "remove":
                yield ABSENT
            case "read":
                if operation.lost or operation.result == state:
                    yield state
            case other:
                raise ValueError(f"a register has no {other}")


class Forgetful(Register):
    """Register that may lose its value: of what engines keep of a session. What was removed stays so."""

    def after(self, state: Any, operation: Operation) -> Iterator[Any]:
        if operation.name == "read" and operation.result == ABSENT and not operation.lost:
            yield state  # an engine that is away has it, or nobody
        else:
            yield from super().after(state, operation)


class Pointer:
    """Which version is current: "move" answers the one before, "read" the one now, "leave" whether it was of that
    adapter, or none. Of an adapter's pointer and of what is attached; "begin" says what is known from before."""

    def initial(self, operations: Sequence[Operation]) -> str:
        return ""

    def after(self, state: str, operation: Operation) -> Iterator[str]:
        known = not operation.lost
        match operation.name:
            case "begin":
                yield operation.argument
            case "move":
                if not known or operation.result in (UNTOLD, state):
                    yield operation.argument
            case "leave":
                # Only from a version of that name; the answer says whether it was one.
                mine = state.partition("@")[0] == operation.argument
                if not known or operation.result == (mine or not state):
                    yield "" if mine else state
            case "read":
                if not known or operation.result == state:
                    yield state
            case other:
                raise ValueError(f"a pointer has no {other}")


class Versions:
    """Versions of a name: "publish" answers the new one's number, "list" all of them, lowest first."""

    def initial(self, operations: Sequence[Operation]) -> tuple[int, ...]:
        return ()

    def after(self, state: tuple[int, ...], operation: Operation) -> Iterator[tuple[int, ...]]:
        newest = max(state, default=0)
        match operation.name:
            case "publish":
                # One whose answer was lost took the next number: nobody else makes versions of the name.
                number = newest + 1 if operation.lost else operation.result
                if number > newest:
                    yield (*state, number)
            case "list":
                if operation.lost or tuple(operation.result) == state:
                    yield state
            case other:
                raise ValueError(f"versions have no {other}")


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the queue has it."""

    id: str = ""
    """Empty: nobody has submitted it."""
    end: str = ""
    """One of ENDS."""
    cancelling: bool = False
    pausing: bool = False
    aside: bool = False
    """It was asked to pause while it waited, and nobody runs it."""


class Queue:
    """One job of a queue: "submit" under its key answers its id, "look" its state, "cancel", "pause" and "resume" the
    state behind them, or "late" and "ended" when it was too late. In between trainers run it and end it."""

    def initial(self, operations: Sequence[Operation]) -> Job:
        return Job()

    def after(self, state: Job, operation: Operation) -> Iterator[Job]:
        for now in self._meanwhile(state):
            if operation.lost:
                yield from self._lost(now, operation.name)
            else:
                yield from self._told(now, operation.name, operation.result)

    def _meanwhile(self, state: Job) -> Iterator[Job]:
        """What trainers may have made of it since."""
        yield state
        if not state.id or state.end:
            return
        yield replace(state, end="cancelled") if state.cancelling else replace(state, end="failed")
        if state.cancelling:
            yield replace(state, end="failed")
        elif not state.aside:
            yield replace(state, end="succeeded")

    def _lost(self, state: Job, name: str) -> Iterator[Job]:
        yield state
        if not state.id or state.end:
            if name == "submit" and not state.id:
                yield replace(state, id="?")
            return
        match name:
            case "cancel":
                yield replace(state, cancelling=True)
                yield replace(state, end="cancelled")
            case "pause":
                yield replace(state, pausing=True)
                yield replace(state, pausing=True, aside=True)
            case "resume":
                yield replace(state, pausing=False, aside=False)

    def _told(self, state: Job, name: str, result: str) -> Iterator[Job]:
        if name == "submit":
            if state.id in ("", "?", result):
                yield replace(state, id=result)
            return
        if not state.id:
            if result == ABSENT:
                yield state
            return
        if result == "ended":
            if state.end:
                yield state
            return
        if result == "late":  # its result is being published, or it is being cancelled
            if not state.end and (name == "pause" or not state.cancelling):
                yield state
            return
        if state.end:
            if result == state.end:
                yield state
            return
        match name:
            case "cancel" if result in ("queued", "running"):
                yield replace(state, cancelling=True)
            case "cancel" if result == "cancelled":
                yield replace(state, end="cancelled")
            case "pause" if result == "running":
                yield replace(state, pausing=True)
            case "pause" if result == "queued":
                yield replace(state, pausing=True, aside=True)
            case "resume" if result in ("queued", "running"):
                yield replace(state, pausing=False, aside=False)
            case "look" if result == "queued":
                yield replace(state, aside=True) if state.pausing else state
            case "look" if result == "running" and not state.aside:
                yield state
