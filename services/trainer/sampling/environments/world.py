"""A world that one episode acts in: what it shows first, and what comes of an answer; and how it fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.jobs.kinds.environment import FailureKind
from services.common.jobs.scorers.json_schema import check_json, compiled
from services.common.jobs.scorers.sample import ToolCall
from services.trainer.sampling.answers import ReadAnswer

MOST_BYTES = 2**20
"""Largest message of an environment, or answer of a tool."""
LARGEST_REWARD = 1e9
_TOLD = 300
"""Characters of a reason that others gave."""


class EnvironmentFailed(Exception):
    """An environment that cannot be gone on with; what was sampled in it is worth nothing."""

    def __init__(self, kind: FailureKind, reason: str) -> None:
        super().__init__(reason[:_TOLD])
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an answer."""

    messages: Sequence[Mapping[str, Any]] = ()
    """Turns that the policy reads next, none if it is ``done``."""
    reward: float = 0.0
    done: bool = False


class World(Protocol):
    """The world of one episode. Every method raises EnvironmentFailed; then the world is of no use any more."""

    async def begin(self, params: Mapping[str, Any]) -> str:
        """Begins the episode; returns what is shown, which may be nothing."""
        ...

    async def state(self) -> str:
        """Digest of the state that the episode is in, whatever names the episode left out: equal of equal ones. Empty:
        the world does not tell."""
        ...

    async def act(self, answer: ReadAnswer) -> Outcome:
        """What comes of an answer of the policy."""
        ...


class Worlds(Protocol):
    """Worlds of one environment."""

    def open(self, tools: Sequence[Mapping[str, Any]]) -> AbstractAsyncContextManager[World]:
        """A fresh world for one episode, for as long as the block runs. Raises EnvironmentFailed.

        Args:
            tools: function definitions that the policy was shown.
        """
        ...


class CallCheck:
    """Check of calls against the definitions that the policy was shown.

    Raises:
        SchemaRefused: the parameters of one are no JSON Schema.
    """

    def __init__(self, definitions: Sequence[Mapping[str, Any]]) -> None:
        functions = [one.get("function", one) for one in definitions]
        self._valid: dict[str, Callable[[Any], bool]] = {
            str(one["name"]): compiled(one.get("parameters") or {}) for one in functions
        }

    def wrong(self, call: ToolCall) -> str | None:
        """Reason why a call is not made; None: it can be. What JSON has not, a policy may write all the same."""
        valid = self._valid.get(call.name)
        if valid is None:
            return f"there is no tool {call.name[:64]!r}"
        try:
            check_json(call.arguments)
            fits = isinstance(call.arguments, dict) and valid(call.arguments)
        except ValueError:
            fits = False
        return None if fits else f"the arguments are not those of {call.name}"


def tool_message(text: str) -> dict[str, Any]:
    """A turn with the result of a call."""
    return {"role": "tool", "content": text}


def user_message(text: str) -> dict[str, Any]:
    """A turn with what an environment says."""
    return {"role": "user", "content": text}


def error_text(reason: str) -> str:
    """What the policy reads of an action that was not taken."""
    return f"error: {reason[:_TOLD]}"


def parse_json(text: str | bytes) -> Any:
    """JSON as the standard has it, of texts that are Unicode.

    Raises:
        EnvironmentFailed: it is none.
    """
    try:
        found = json.loads(text)
        check_json(found)
    except (ValueError, RecursionError) as error:
        raise EnvironmentFailed(FailureKind.PROTOCOL, f"it said something that is no JSON: {error}") from error
    return found


def reward_of(value: Any) -> float:
    """Reward of a step; none is 0, and true is 1, as OpenEnv has it.

    Raises:
        EnvironmentFailed: it is no number, or none that could be learnt from.
    """
    if value is None:
        return 0.0
    check_reward(value)
    return float(value)


def check_reward(value: Any) -> None:
    """Raises EnvironmentFailed: it is no number within ±LARGEST_REWARD."""
    if not isinstance(value, int | float) or not -LARGEST_REWARD <= value <= LARGEST_REWARD:  # nor NaN
        raise EnvironmentFailed(
            FailureKind.PROTOCOL, f"the reward is {str(value)[:40]}, not a number between ±{LARGEST_REWARD:g}"
        )
