"""Translation of Anthropic's messages into OpenAI's chat, the form that everything behind it works with.

Rules for what has no counterpart there:

- Blocks of text of one turn are joined by a newline; those of an assistant by nothing, as the answers they come from.
- The results of tools become turns of their own, in the order of the calls, by which the model tells them apart.
- An error of a tool is its text with "Error: " before it.
- Thinking that another provider encrypted is left out.
- Edits of `context_management` are applied to the chat: what they leave out is left out of the prompt alone.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from pydantic_core import to_json

from services.common.errors import InvalidRequest, TemperError
from services.gateway.inference.chat import parse_chat
from services.gateway.protocol.chat_request import AssistantMessage, ChatRequest, Message, ToolCall, ToolMessage
from services.gateway.protocol.fields.tools import HostedTool
from services.gateway.protocol.messages.context_edits import (
    ClearThinking,
    ClearToolUses,
    ContextManagement,
    InputTokens,
)
from services.gateway.protocol.messages.request import (
    AssistantTurn,
    ConversationFields,
    MessagesRequest,
    SystemTurn,
    TextBlock,
    ThinkingAdaptive,
    ThinkingBlock,
    ThinkingOn,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from services.gateway.protocol.messages.tools import (
    AnyChoice,
    AutoChoice,
    ClientTool,
    NamedChoice,
    NoChoice,
    ToolChoice,
)

_NAMES = (
    (re.compile(r"\bresponse_format\b(\.json_schema(\.schema)?)?"), "output_config.format"),
    (re.compile(r"\btools\[(\d+)\]\.function\.parameters\b"), r"tools[\1].input_schema"),
    (re.compile(r"\btools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"\bthinking_budget\b"), "thinking.budget_tokens"),
    (re.compile(r"\breasoning_effort\b"), "output_config.effort"),
    (re.compile(r"\bchat_template_kwargs\.enable_thinking\b"), "thinking"),
    (re.compile(r"\bcontinue_final_message\b"), "messages"),
)
"""Fields of the chat, as errors name them, and their names in a message."""
_SAME = ("max_tokens", "stream", "temperature", "top_p", "top_k")
"""Fields that both APIs have, with one meaning."""
_EFFORTS = {"max": "xhigh"}
"""Anthropic's names of efforts that have another name in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Content block with its place in the request."""

    value: Any
    param: str


def as_chat(body: ConversationFields) -> ChatRequest:
    """Chat request of the same meaning.

    Raises:
        InvalidRequest: calls and results of tools do not match.
        RequestValidationError: it is more than a chat may be.
    """
    return parse_chat(chat_form(body))


@contextmanager
def named_as_sent() -> Iterator[None]:
    """Context in which errors of the chat name the fields of the message that it was made of."""
    try:
        yield
    except TemperError as error:
        rename(error)
        raise


def rename(error: Exception) -> None:
    """Makes an error name the fields of the message."""
    if isinstance(error, TemperError):
        error.message = _renamed(error.message)
        error.param = error.param and _renamed(error.param)


def _renamed(text: str) -> str:
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text


def chat_form(body: ConversationFields) -> dict[str, Any]:
    """JSON object of a chat request of the same meaning.

    Raises:
        InvalidRequest: calls and results of tools do not match, or there is nothing in it.
    """
    messages = _messages(body)
    if all(message["role"] == "system" for message in messages):
        raise InvalidRequest("messages say nothing: send a turn of the user", param="messages")
    form: dict[str, Any] = {"model": body.model, "messages": messages}
    if body.adapters is not None:
        form["adapters"] = [one.model_dump() for one in body.adapters]
    if messages[-1]["role"] == "assistant":
        form |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        form["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        form |= _choice(body.tool_choice)
    form |= _thinking(body)
    if body.format is not None:
        schema = {"name": "output", "schema": body.format.schema_, "strict": True}
        form["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        form |= _sampling(body)
    return form


def _given(**fields: Any) -> dict[str, Any]:
    """Fields that are set."""
    return {field: value for field, value in fields.items() if value is not None}


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    user = None if body.metadata is None else body.metadata.user_id
    return _given(stop=body.stop_sequences, user=user, **{field: getattr(body, field) for field in _SAME})


def _thinking(body: ConversationFields) -> dict[str, Any]:
    on = isinstance(body.thinking, ThinkingOn | ThinkingAdaptive)
    form: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": on}}
    if isinstance(body.thinking, ThinkingOn):
        form["thinking_budget"] = body.thinking.budget_tokens
    effort = None if body.output_config is None else body.output_config.effort
    if isinstance(body.thinking, ThinkingAdaptive) and effort is not None:
        form["reasoning_effort"] = _EFFORTS.get(effort, effort)
    return form


def _tool(tool: ClientTool | HostedTool) -> dict[str, Any]:
    if isinstance(tool, HostedTool):
        return {"type": tool.type}
    told = _described(tool)
    given = _given(name=tool.name, description=told, parameters=tool.input_schema, strict=tool.strict)
    return {"type": "function", "function": given}


def _described(tool: ClientTool) -> str | None:
    if not tool.input_examples:
        return tool.description
    examples = "\n".join(to_json(example).decode() for example in tool.input_examples)
    return "\n\n".join(filter(None, (tool.description, f"Examples of its input:\n{examples}")))


def _choice(choice: ToolChoice) -> dict[str, Any]:
    match choice:
        case AutoChoice():
            form: dict[str, Any] = {"tool_choice": "auto"}
        case AnyChoice():
            form = {"tool_choice": "required"}
        case NamedChoice():
            form = {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
        case NoChoice():
            return {"tool_choice": "none"}
    if choice.disable_parallel_tool_use:
        form["parallel_tool_calls"] = False
    return form


# -- messages


def _messages(body: ConversationFields) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append(_system(_texts(body.system)))
    calls: list[_Block] = []
    for spoken, group in groupby(enumerate(body.messages), key=lambda entry: entry[1].role == "assistant"):
        turns = [
            (role, [block for index, turn in same for block in _blocks(turn, f"messages[{index}].content")])
            for role, same in groupby(group, key=lambda entry: entry[1].role)
        ]
        if spoken:
            _check_answered(calls, [])
            blocks = turns[0][1]
            calls = [block for block in blocks if isinstance(block.value, ToolUseBlock)]
            messages.append(_assistant(blocks, calls))
        else:
            messages += _asked(turns, calls)
            calls = []
    _check_answered(calls, [])
    return messages


def _system(texts: Sequence[str]) -> dict[str, Any]:
    return {"role": "system", "content": "\n".join(texts)}


def _blocks(turn: UserTurn | AssistantTurn | SystemTurn, param: str) -> Iterable[_Block]:
    if isinstance(turn.content, str):
        return [_Block(TextBlock(type="text", text=turn.content), param)]
    return [_Block(block, f"{param}[{position}]") for position, block in enumerate(turn.content)]


def _texts(content: str | Sequence[TextBlock]) -> list[str]:
    return [content] if isinstance(content, str) else [block.text for block in content]


def _assistant(blocks: Sequence[_Block], calls: Sequence[_Block]) -> dict[str, Any]:
    seen: set[str] = set()
    for call in calls:
        if call.value.id in seen:
            raise InvalidRequest(
                f"{call.param}.id: two calls of one turn have the id {call.value.id!r}", param=f"{call.param}.id"
            )
        seen.add(call.value.id)
    thoughts = [block.value.thinking for block in blocks if isinstance(block.value, ThinkingBlock)]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(block.value.text for block in blocks if isinstance(block.value, TextBlock)),
    }
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = [_call(call.value) for call in calls]
    return message


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = to_json(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _asked(turns: Sequence[tuple[str, Sequence[_Block]]], calls: Sequence[_Block]) -> list[dict[str, Any]]:
    """Messages between two turns of the assistant: those of the user, and those of the system among them."""
    said = [block for role, blocks in turns if role == "user" for block in blocks]
    results = [block for block in said if isinstance(block.value, ToolResultBlock)]
    for block in said[: len(results)]:
        if not isinstance(block.value, ToolResultBlock):
            raise InvalidRequest(
                f"{block.param}: text of a turn comes after its tool_result blocks: move it behind them",
                param=block.param,
            )
    _check_answered(calls, results)
    order = {call.value.id: position for position, call in enumerate(calls)}
    ordered = iter(sorted(results, key=lambda result: order[result.value.tool_use_id]))
    messages: list[dict[str, Any]] = []
    for role, blocks in turns:
        texts = [block.value.text for block in blocks if isinstance(block.value, TextBlock)]
        if role == "system":
            messages.append(_system(texts))
            continue
        for result in islice(ordered, len(blocks) - len(texts)):
            tool = {"role": "tool", "tool_call_id": result.value.tool_use_id, "content": _result(result.value)}
            messages.append(tool)
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
    return messages


def _result(block: ToolResultBlock) -> str:
    text = "\n".join(_texts(block.content or ""))
    return f"Error: {text}" if block.is_error else text


def _check_answered(calls: Sequence[_Block], results: Sequence[_Block]) -> None:
    """Checks that each call has one result in the turn after it.

    Raises:
        InvalidRequest: a call has no result, or several, or a result has no call.
    """
    open_calls = {call.value.id: call for call in calls}
    for result in results:
        if open_calls.pop(result.value.tool_use_id, None) is None:
            raise InvalidRequest(
                f"{result.param}.tool_use_id: {result.value.tool_use_id!r} is no call of the turn before, or one that "
                "has a result already",
                param=f"{result.param}.tool_use_id",
            )
    for call in open_calls.values():
        raise InvalidRequest(
            f"{call.param}: the call {call.value.id!r} has no tool_result in the turn after it: send one, with "
            "is_error if the tool did not run",
            param=call.param,
        )


CLEARED = "[This result was left out of the conversation to make room.]"
"""Text that the model reads in the place of a result that was cleared."""
_TRIGGER = InputTokens(type="input_tokens", value=100_000)
_KEEP_USES = 3

Applied = dict[str, Any]
Count = Callable[[ChatRequest], Awaitable[int]]


async def edited(chat: ChatRequest, wanted: ContextManagement, count: Count) -> tuple[ChatRequest, list[Applied]]:
    """Conversation that the model is shown, and the edits that made it, as the answer tells them.

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
    """Call without its arguments, if those are cleared as well."""
    if call.id not in cleared or not (edit.clear_tool_inputs is True or call.function.name in _named(edit)):
        return call
    return call.model_copy(update={"function": call.function.model_copy(update={"arguments": "{}"})})


def _named(edit: ClearToolUses) -> Sequence[str]:
    return edit.clear_tool_inputs if isinstance(edit.clear_tool_inputs, list) else ()


def _calls(message: AssistantMessage) -> Sequence[ToolCall]:
    return message.tool_calls or ()


def _with(chat: ChatRequest, messages: Sequence[Message]) -> ChatRequest:
    return chat.model_copy(update={"messages": list(messages)})
