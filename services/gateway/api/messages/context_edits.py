"""Applies Anthropic's `context_management` to a conversation: what is left out is left out of the prompt alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from services.gateway.protocol.chat.request import AssistantMessage, ChatRequest, Message, ToolCall, ToolMessage
from services.gateway.protocol.messages.context_edits import (
    ClearThinking,
    ClearToolUses,
    ContextManagement,
    InputTokens,
)

CLEARED = "[This result was left out of the conversation to make room.]"
"""What the model reads in the place of a result."""
_TRIGGER = InputTokens(type="input_tokens", value=100_000)
_KEEP_USES = 3

Applied = dict[str, Any]
Count = Callable[[ChatRequest], Awaitable[int]]


async def edited(chat: ChatRequest, wanted: ContextManagement, count: Count) -> tuple[ChatRequest, list[Applied]]:
    """The conversation that the model is shown, and what was left out of it, as the answer tells it.

    Args:
        chat: the whole conversation.
        wanted: the edits, applied one after the other.
        count: tokens of a conversation's prompt.
    """
    applied: list[Applied] = []
    for edit in wanted.edits or ():
        if isinstance(edit, ClearThinking):
            shorter, cleared = _without_thinking(chat, edit)
        else:
            shorter, cleared = await _without_results(chat, edit, count)
        if not cleared:
            continue
        saved = await count(chat) - await count(shorter)
        if isinstance(edit, ClearThinking):
            told = {"cleared_thinking_turns": cleared}
        elif edit.clear_at_least is not None and saved < edit.clear_at_least.value:
            continue
        else:
            told = {"cleared_tool_uses": cleared}
        chat = shorter
        applied.append({"type": edit.type, **told, "cleared_input_tokens": saved})
    return chat, applied


def _without_thinking(chat: ChatRequest, edit: ClearThinking) -> tuple[ChatRequest, int]:
    """The conversation with the thinking of its last turns only, and how many turns lost theirs."""
    thought = [index for index, message in enumerate(chat.messages) if _thinks(message)]
    cleared = frozenset(() if edit.kept is None else thought[: -edit.kept])
    messages = [
        message.model_copy(update={"reasoning_content": None, "reasoning": None}) if index in cleared else message
        for index, message in enumerate(chat.messages)
    ]
    return _with(chat, messages), len(cleared)


def _thinks(message: Message) -> bool:
    return isinstance(message, AssistantMessage) and bool(message.reasoning_content or message.reasoning)


async def _without_results(chat: ChatRequest, edit: ClearToolUses, count: Count) -> tuple[ChatRequest, int]:
    """The conversation with the results of its last calls only, and how many calls lost theirs."""
    calls = [call for message in chat.messages if isinstance(message, AssistantMessage) for call in _calls(message)]
    kept = _KEEP_USES if edit.keep is None else edit.keep.value
    spared = frozenset(edit.exclude_tools or ())
    cleared = {call.id for call in calls[: max(0, len(calls) - kept)] if call.function.name not in spared}
    if not cleared or not await _triggered(chat, edit, len(calls), count):
        return chat, 0
    messages = [_without(message, cleared, edit) for message in chat.messages]
    return _with(chat, messages), len(cleared)


async def _triggered(chat: ChatRequest, edit: ClearToolUses, uses: int, count: Count) -> bool:
    trigger = edit.trigger or _TRIGGER
    return (await count(chat) if isinstance(trigger, InputTokens) else uses) > trigger.value


def _without(message: Message, cleared: Collection[str], edit: ClearToolUses) -> Message:
    if isinstance(message, ToolMessage) and message.tool_call_id in cleared:
        return message.model_copy(update={"content": CLEARED})
    if isinstance(message, AssistantMessage) and edit.clear_tool_inputs and message.tool_calls:
        return message.model_copy(
            update={"tool_calls": [_silenced(call, cleared, edit) for call in message.tool_calls]}
        )
    return message


def _silenced(call: ToolCall, cleared: Collection[str], edit: ClearToolUses) -> ToolCall:
    """A call without what it said, where that is cleared as well."""
    if call.id not in cleared or not (edit.clear_tool_inputs is True or call.function.name in _named(edit)):
        return call
    return call.model_copy(update={"function": call.function.model_copy(update={"arguments": "{}"})})


def _named(edit: ClearToolUses) -> Sequence[str]:
    return edit.clear_tool_inputs if isinstance(edit.clear_tool_inputs, list) else ()


def _calls(message: AssistantMessage) -> Sequence[ToolCall]:
    return message.tool_calls or ()


def _with(chat: ChatRequest, messages: Sequence[Message]) -> ChatRequest:
    return chat.model_copy(update={"messages": list(messages)})
