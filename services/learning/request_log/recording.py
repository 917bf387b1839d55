"""Recordings: what a running request asks and is answered, taken along for the request log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

from services.common.text.output_parser import Delta, TextDelta

_OF_A_REQUEST = frozenset(("model", "messages", "tools", "prompt", "user", "metadata", "session_id", "stream_options"))
_SHARES = 2**32


@dataclass(slots=True)
class RecordedChoice:
    """One choice so far."""

    completion_id: str
    version: str | None = None
    text: list[str] = field(default_factory=list)
    """Of a text completion."""
    deltas: list[Delta] = field(default_factory=list)
    """Of a chat."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def message(self) -> dict[str, Any]:
        """The assistant's message as the client has it."""
        if not self.deltas:
            return {"role": "assistant", "content": "".join(self.text)}
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[tuple[dict[str, Any], list[str]]] = []
        for delta in self.deltas:
            if isinstance(delta, TextDelta):
                (reasoning if delta.reasoning else content).append(delta.text)
            elif delta.name is not None:
                calls.append(({"id": delta.call_id, "name": delta.name}, [delta.arguments]))
            else:
                calls[-1][1].append(delta.arguments)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
        if reasoning:
            message["reasoning_content"] = "".join(reasoning)
        if calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(arguments)},
                }
                for call, arguments in calls
            ]
        return message


@dataclass(slots=True)
class Recording:
    """One request. Its methods run on the event loop for every token, and only keep what they are given."""

    id: str
    owner: str
    kind: Literal["chat", "text"]
    body: Any
    """The request's model, read when the record is written."""
    session: str | None
    prompts: Sequence[Sequence[int]]
    choices: Sequence[RecordedChoice]
    hand_over: Callable[[Recording], None]
    began: float = field(default_factory=time.time)
    first: float | None = None
    ended: float = 0.0
    also: list[str] = field(default_factory=list)

    def add(
        self,
        index: int,
        deltas: Sequence[Delta],
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
    ) -> RecordedChoice:
        """Takes one step of a choice, and returns the choice."""
        choice = self.choices[index]
        if self.first is None:
            self.first = time.time()
        if self.kind == "chat":
            choice.deltas += deltas
        else:
            choice.text.append(text)
        choice.token_ids += token_ids
        choice.logprobs += logprobs
        return choice

    def end(self) -> None:
        """Hands the recording over, unless nothing was answered."""
        if self.first is not None and not self.ended:
            self.ended = time.time()
            self.hand_over(self)

    @property
    def tokens(self) -> int:
        """Tokens of prompts and answers, and one for the rest."""
        return 1 + sum(map(len, self.prompts)) + sum(len(choice.token_ids) for choice in self.choices)

    def record(self) -> dict[str, Any]:
        """The request as it is written, before redaction."""
        asked: Mapping[str, Any] = self.body.model_dump(mode="json", exclude_unset=True)
        return {
            "id": self.id,
            "also": self.also,
            "at": round(self.ended, 3),
            "owner": self.owner,
            "kind": self.kind,
            "model": self.body.model,
            "user": asked.get("user"),
            "session": self.session,
            "metadata": asked.get("metadata"),
            "messages": asked.get("messages"),
            "tools": asked.get("tools"),
            "prompt": asked.get("prompt"),
            "sampling": {name: value for name, value in asked.items() if name not in _OF_A_REQUEST},
            "prompt_tokens": sum(map(len, self.prompts)),
            "prompt_token_ids": [list(prompt) for prompt in self.prompts],
            "choices": [
                {
                    "completion_id": choice.completion_id,
                    "version": choice.version,
                    "message": choice.message(),
                    "finish_reason": choice.finish_reason,
                    "tokens": len(choice.token_ids),
                    "token_ids": choice.token_ids,
                    "logprobs": [round(value, 6) for value in choice.logprobs],
                }
                for choice in self.choices
            ],
            "first_token_seconds": None if self.first is None else round(self.first - self.began, 4),
            "seconds": round(self.ended - self.began, 4),
        }


def chosen(name: str, share: float) -> bool:
    """True for a share of all names, always for the same ones."""
    return share >= 1 or crc32(name.encode()) < share * _SHARES
