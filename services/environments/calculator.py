"""A calculator with a memory that nobody sees: each task is solved by calling it and saying what it answers.

The memory begins with a hidden number and keeps every sum, so no answer can be told without the call of its task, and a
call that was not asked for changes all that follow.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from services.environments.base import (
    ActionRefused,
    Call,
    Environment,
    Observation,
    Params,
    message_of,
    object_schema,
)

_NUMBER = re.compile(r"-?\d+")
_LARGEST = 10**9


class CalculatorParams(Params):
    """Parameters of an episode."""

    tasks: int = Field(2, ge=1, le=20)


class Calculator(Environment):
    """See the module. Each task that is answered right gives its share of a reward of 1; a wrong answer ends the
    episode."""

    name: ClassVar[str] = "calculator"
    description: ClassVar[str] = "A calculator with a hidden memory is called, and its answers are to be told."
    params: ClassVar[type[Params]] = CalculatorParams
    action_schema: ClassVar[Mapping[str, Any]] = {
        "anyOf": [
            object_schema(
                {
                    "type": {"const": "call_tool"},
                    "tool_name": {"const": "get_sum"},
                    "arguments": object_schema({"number": {"type": "integer"}}),
                }
            ),
            object_schema({"message": {"type": "string"}}),
        ]
    }
    observation_schema: ClassVar[Mapping[str, Any]] = object_schema(
        {"text": {"type": "string"}, "tool_name": {"type": "string"}, "result": {}}, required=()
    )
    tools: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {
            "type": "function",
            "function": {
                "name": "get_sum",
                "description": "Handle the number.",
                "parameters": {
                    "type": "object",
                    "properties": {"number": {"type": "integer"}},
                    "required": ["number"],
                },
            },
        },
    )

    def _begin(self, params: Params) -> Observation:
        if not isinstance(params, CalculatorParams):
            raise TypeError(f"not parameters of this environment: {params!r}")
        self._tasks, self._solved = params.tasks, 0
        self._drawn = random.Random(params.seed)
        self._memory = self._drawn.randint(10, 99)
        return Observation({"text": self._task()})

    def _task(self) -> str:
        self._asked, self._called = self._drawn.randint(1, 99), False
        self._right = self._memory + self._asked
        return f"Call get_sum with number {self._asked}."

    def _take(self, action: Mapping[str, Any]) -> Observation:
        call = Call.of(action)
        return self._answered(message_of(action)) if call is None else self._call(call)

    def _call(self, call: Call) -> Observation:
        number = call.arguments.get("number")
        if call.tool != "get_sum" or set(call.arguments) != {"number"}:
            raise ActionRefused("the only tool is get_sum, with a number")
        if not isinstance(number, int) or isinstance(number, bool) or abs(number) > _LARGEST:
            raise ActionRefused(f"number is a whole one, up to {_LARGEST}")
        self._memory += number
        self._called = True
        return Observation({"tool_name": "get_sum", "result": {"result": self._memory}}, 0.0)

    def _answered(self, message: str) -> Observation:
        found = _NUMBER.findall(message)
        if not self._called or not found or found[-1] != str(self._right):
            return Observation({"text": "Wrong."}, 0.0, done=True)
        self._solved += 1
        share = 1.0 / self._tasks
        if self._solved == self._tasks:
            return Observation({"text": "Right."}, share, done=True)
        return Observation({"text": self._task()}, share)

    def _secrets(self) -> dict[str, Any]:
        return {"memory": self._memory} if hasattr(self, "_memory") else {}
