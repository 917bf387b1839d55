"""The loop: the model answers, its calls are made, and it goes on until it calls nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cli.agent.approval import Approver
from cli.agent.compaction import Compaction
from cli.agent.conversation import Conversation
from cli.agent.tools import Tool, ToolFailed, bounded
from cli.agent.trace import Trace
from cli.http.chat_stream import Answer, stream_answer
from cli.http.client import Client
from cli.output import CliError

MOST_STEPS = 50
_TOO_LONG = "context_length_exceeded"
_REFUSED = "refused: the user did not allow this call"
_INTERRUPTED = "interrupted: the user stopped this turn"


class Finish(StrEnum):
    """Why a turn ended."""

    ANSWERED = "answered"
    STEPS = "steps"
    """The limit on answers in one turn."""
    LENGTH = "length"
    """The answer hit max_tokens."""
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class CallMade:
    """One call of a tool, with what the model was told."""

    name: str
    arguments: str
    result: str
    failed: bool


@dataclass(slots=True)
class Turn:
    """What came of one question."""

    finish: Finish = Finish.INTERRUPTED
    text: str = ""
    adapter: str | None = None
    steps: int = 0
    calls: list[CallMade] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def count(self, answer: Answer) -> None:
        """Takes the usage of an answer."""
        usage = answer.usage or {}
        self.steps += 1
        self.adapter = answer.adapter
        self.prompt_tokens += int(usage.get("prompt_tokens") or 0)
        self.completion_tokens += int(usage.get("completion_tokens") or 0)
        self.cached_tokens += int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def silent(kind: str, piece: str) -> None:
    """Of a program that shows nothing on the way."""
    del kind, piece


@dataclass(slots=True)
class Agent:
    """A conversation whose answers may call tools."""

    client: Client
    conversation: Conversation
    tools: Sequence[Tool]
    approver: Approver
    context: int | None = None
    """Tokens of the model's context; None: not known, and nothing is compacted before the server refuses."""
    most_steps: int = MOST_STEPS
    first_choice: Any = None
    """tool_choice of a turn's first request; None: the model decides."""
    show: Callable[[str, str], None] = silent
    """Called with "text", "reasoning", "call", "result" or "note", and a piece of it."""
    trace: Trace | None = None
    before_change: Callable[[], None] = lambda: None
    """Called before each call of a tool that changes something."""
    tokens: int = 0
    """Of the last request and its answer; 0: not known."""

    def turn(self, question: str) -> Turn:
        """Answers a question. Ctrl-C ends the turn; the conversation can be continued.

        Raises:
            CliError: the server refused, or is not there; the conversation is as it was before.
        """
        before, tokens = list(self.conversation.turns), self.tokens
        self.conversation.turns.append({"role": "user", "content": question})
        turn = Turn()
        try:
            self._run(turn)
        except KeyboardInterrupt:
            self._close()
        except CliError:
            self.conversation.turns[:], self.tokens = before, tokens
            raise
        return turn

    def _run(self, turn: Turn) -> None:
        while turn.steps < self.most_steps:
            if self.context is not None and self._compaction.needed(self.tokens):
                self._compact()
            answer = self._answer(first=turn.steps == 0)
            turn.count(answer)
            self.tokens = int((answer.usage or {}).get("total_tokens") or 0)
            if self.trace is not None:
                self.trace.add(answer, float(self.conversation.options.get("temperature", 1.0)))
            self.conversation.turns.append(answer.message)
            turn.text = answer.text
            if not answer.tool_calls:
                turn.finish = Finish.LENGTH if answer.finish_reason == "length" else Finish.ANSWERED
                return
            for call in answer.tool_calls:
                made = self._made(call)
                turn.calls.append(made)
                self.conversation.turns.append({"role": "tool", "tool_call_id": call["id"], "content": made.result})
        turn.finish = Finish.STEPS

    def _answer(self, *, first: bool) -> Answer:
        """One answer; a conversation that the server finds too long is compacted once."""
        try:
            return self._asked(first=first)
        except CliError as error:
            if not _is_too_long(error):
                raise
            self.tokens = max(self.tokens, self.context or 0)
            self._compact()
            return self._asked(first=first)

    def _asked(self, *, first: bool) -> Answer:
        body = self.conversation.request([tool.definition for tool in self.tools])
        if first and self.first_choice is not None and self.tools:
            body["tool_choice"] = self.first_choice
        if self.trace is not None:
            body["return_token_ids"] = True
        answer = Answer()
        for kind, piece in stream_answer(self.client, body, self.conversation.messages, answer):
            self.show(kind, piece)
        return answer

    def _made(self, call: dict[str, Any]) -> CallMade:
        """Makes a call, or says why not."""
        name, text = call["name"], call["arguments"]
        self.show("call", f"{name} {text}")
        result, failed = "", True
        tool = next((tool for tool in self.tools if tool.name == name), None)
        try:
            arguments = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:
            arguments, result = None, f"the arguments are not JSON: {error}"
        if tool is None:
            result = f"there is no tool {name!r}: there are {', '.join(tool.name for tool in self.tools) or 'none'}"
        elif not isinstance(arguments, dict):
            result = result or "the arguments are not an object"
        elif not self.approver.allows(name, tool.effect, text):
            result = _REFUSED
        else:
            try:
                if tool.effect:
                    self.before_change()
                result, failed = tool.call(arguments), False
            except ToolFailed as error:
                result = f"error: {error}"
            except Exception as error:  # what a model asks for has no end: it is told, and the conversation goes on
                result = f"error: {type(error).__name__}: {error}"
        result = bounded(result).encode(errors="replace").decode()  # names of files need not be text
        self.show("result", result)
        return CallMade(name, text, result, failed)

    def _close(self) -> None:
        """Gives every call a result, so that the conversation can go on."""
        turns = self.conversation.turns
        place = max(place for place, turn in enumerate(turns) if turn["role"] in ("user", "assistant"))
        answered = {turn["tool_call_id"] for turn in turns[place:] if turn["role"] == "tool"}
        for call in turns[place].get("tool_calls") or ():
            if call["id"] not in answered:
                turns.append({"role": "tool", "tool_call_id": call["id"], "content": _INTERRUPTED})
        if turns[-1]["role"] != "assistant":
            turns.append({"role": "assistant", "content": "(stopped by the user)"})

    @property
    def _compaction(self) -> Compaction:
        return Compaction(self.context or max(1, self.tokens), self._summary)

    def _compact(self) -> None:
        before = len(json.dumps(self.conversation.turns))
        self.tokens = self.tokens or before // 3
        self.conversation.turns[:] = self._compaction.compacted(self.conversation.turns, self.tokens)
        after = len(json.dumps(self.conversation.turns))
        self.tokens = int(self.tokens * after / max(1, before))
        if after == before:
            return
        self.show("note", f"compacted near the context's limit: {before} characters became {after}")

    def _summary(self, prompt: str, most: int) -> str:
        """Summary by the model; empty: it wrote none, or the prompt was too long after all."""
        body = {**self.conversation.request(()), "max_tokens": most}
        answer = Answer()
        try:
            for _ in stream_answer(self.client, body, [{"role": "user", "content": prompt}], answer):
                pass
        except CliError as error:
            if not _is_too_long(error):
                raise
        return answer.text.strip()


def _is_too_long(error: CliError) -> bool:
    return (error.error or {}).get("code") == _TOO_LONG
