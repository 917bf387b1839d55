"""Answers of the engine, read: the text that a user would see, and the calls of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.jobs.scorers.sample import ToolCall
from services.common.text.output_parser import ChatParser, TextDelta
from services.common.text.stops import Stops
from services.common.text.tokenizer import TextCodec
from services.common.text.tool_calls.parser import ToolDelta
from services.trainer.host.rollouts import Completion


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """An answer in its parts."""

    text: str
    """Text without reasoning and calls."""
    whole: str
    """All of it, special tokens left out."""
    calls: tuple[ToolCall, ...]
    broken: bool
    """The answer ended inside of the last call."""
    stopped: bool
    """A stop ended it."""


def read_answer(
    codec: TextCodec,
    prompt: Sequence[int],
    completion: Completion,
    tools: Sequence[Mapping[str, Any]],
    stops: Stops | None = None,
) -> ReadAnswer:
    """The answer to a chat. Without ``tools``, markup of calls is text."""
    tokens = completion.token_ids
    body = tokens if completion.truncated or tokens[-1] not in codec.special_ids else tokens[:-1]
    parser = ChatParser(thinking=_thinks(codec, prompt), tools=tools, stops=stops)
    parts = _Parts()
    parts.take(parser.feed(codec.decode(body, skip_special=False)))
    parts.take(parser.finish(complete=not completion.truncated))
    return ReadAnswer(parts.text, codec.decode(body), parts.calls, parser.broken, parser.stopped)


@dataclass(slots=True)
class _Parts:
    """Text and calls of an answer, out of its deltas."""

    _texts: list[str] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _arguments: list[str] = field(default_factory=list)

    def take(self, deltas: Sequence[TextDelta | ToolDelta]) -> None:
        for delta in deltas:
            if isinstance(delta, TextDelta):
                if not delta.reasoning:
                    self._texts.append(delta.text)
                continue
            if delta.name is not None:
                self._names.append(delta.name)
                self._arguments.append("")
            self._arguments[delta.index] += delta.arguments

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(name, parsed_arguments(text)) for name, text in zip(self._names, self._arguments, strict=True)
        )


def parsed_arguments(text: str) -> Any:
    """Arguments of a call as JSON; a text that is no JSON, or nested too deep, as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _thinks(codec: TextCodec, prompt: Sequence[int]) -> bool:
    """Whether the prompt ends inside an open `<think>`."""
    opened, closed = codec.token_id("<think>"), codec.token_id("</think>")
    if opened is None or closed is None:
        return False
    for token in reversed(prompt):
        if token == opened:
            return True
        if token == closed or token in codec.special_ids:
            return False
    return False
