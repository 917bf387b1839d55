"""Who decides whether a tool is called: nobody, somebody who is asked, or the mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class Effect(IntEnum):
    """How far a call of a tool reaches."""

    READS = 0
    """Files of the workspace."""
    WORKSPACE = 1
    """Changes in the workspace, and commands in the sandbox."""
    OUTSIDE = 2
    """Anything: programs without a sandbox and other people's servers."""


class Approval(StrEnum):
    """What is called without a question."""

    ASK = "ask"
    """What reads the workspace."""
    WORKSPACE = "workspace"
    """What stays in the workspace."""
    ALL = "all"
    """Everything."""

    @property
    def reach(self) -> Effect:
        return {Approval.ASK: Effect.READS, Approval.WORKSPACE: Effect.WORKSPACE, Approval.ALL: Effect.OUTSIDE}[self]


class Decision(StrEnum):
    """Answer of who is asked."""

    YES = "yes"
    ALWAYS = "always"
    """This tool, for as long as the program runs."""
    NO = "no"


def nobody(tool: str, arguments: str) -> Decision:
    """Of a program that nobody sits in front of."""
    del tool, arguments
    return Decision.NO


@dataclass(slots=True)
class Approver:
    """Decides calls by the mode, and asks about others."""

    mode: Approval
    ask: Callable[[str, str], Decision] = nobody
    """Called with the tool's name and its arguments as text."""
    always: set[str] = field(default_factory=set)

    def allows(self, tool: str, effect: Effect, arguments: str) -> bool:
        if effect <= self.mode.reach or tool in self.always:
            return True
        decision = self.ask(tool, arguments)
        if decision == Decision.ALWAYS:
            self.always.add(tool)
        return decision != Decision.NO
