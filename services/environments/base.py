"""Base of environments: an episode between reset and done, told by observations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class Params(BaseModel):
    """Parameters of a reset."""

    model_config = ConfigDict(extra="forbid", strict=True)

    seed: int | None = None
    """What is hidden is a function of it; None: drawn anew."""
    episode_id: str | None = None
    """Name that the client gives the episode; `state` repeats it."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Observation behind a reset or a step."""

    fields: Mapping[str, Any]
    reward: float | None = None
    """None behind a reset."""
    done: bool = False


class ActionRefused(ValueError):
    """An action that the environment cannot take; the episode stays as it is."""


class Environment(ABC):
    """One episode after another. Each connection has an environment of its own.

    Actions are JSON objects; what they may hold is ``action_schema``.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    params: ClassVar[type[Params]] = Params
    """What a reset takes."""
    action_schema: ClassVar[Mapping[str, Any]]
    observation_schema: ClassVar[Mapping[str, Any]]
    tools: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Function definitions for the prompt, where actions are calls."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps of the episode."""
        self.done = True
        self.episode_id: str | None = None

    def reset(self, params: Params) -> Observation:
        """Begins an episode."""
        self.steps, self.done, self.episode_id = 0, False, params.episode_id
        return self._begin(params)

    def step(self, action: Mapping[str, Any]) -> Observation:
        """Takes an action.

        Raises:
            ActionRefused: there is no episode, or the action is none of this environment.
        """
        if self.done:
            raise ActionRefused("the episode is over, or has not begun: reset first")
        observation = self._take(action)
        self.steps += 1
        self.done = observation.done
        return observation

    @property
    def state(self) -> dict[str, Any]:
        """State that a client may read. What is hidden is not in it until the episode is over."""
        return {"episode_id": self.episode_id, "step_count": self.steps} | (self._secrets() if self.done else {})

    @abstractmethod
    def _begin(self, params: Params) -> Observation: ...

    @abstractmethod
    def _take(self, action: Mapping[str, Any]) -> Observation: ...

    @abstractmethod
    def _secrets(self) -> dict[str, Any]: ...


def object_schema(properties: Mapping[str, Any], required: Sequence[str] | None = None) -> dict[str, Any]:
    """JSON Schema of an object with these members; None: all of them are required."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a tool, as OpenEnv's CallToolAction writes it."""

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, action: Mapping[str, Any]) -> Call | None:
        """The call that an action is; None: it is none. Raises ActionRefused: it is half of one."""
        if action.get("type") != "call_tool":
            return None
        name, arguments = action.get("tool_name"), action.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ActionRefused("a call has a tool_name and an object of arguments")
        return cls(name, arguments)


def message_of(action: Mapping[str, Any]) -> str:
    """Text of an action that is a message. Raises ActionRefused: it is none."""
    message = action.get("message")
    if not isinstance(message, str):
        raise ActionRefused('an action is {"message": TEXT}')
    return message
