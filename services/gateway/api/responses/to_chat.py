"""Translation of a Responses request into the chat request that answers it, and of errors back to its fields.

A tool of a namespace is a function whose name has the namespace before it; a custom tool is one with a single text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import from_json, to_json

from services.common.errors import InvalidRequest, TemperError
from services.gateway.protocol.chat_request import ChatRequest
from services.gateway.protocol.fields.tools import HostedTool
from services.gateway.protocol.responses.items import (
    CustomCallItem,
    CustomCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
)
from services.gateway.protocol.responses.request import ResponseRequest, SchemaFormat
from services.gateway.protocol.responses.tools import (
    CustomTool,
    FunctionTool,
    GrammarText,
    NamespaceName,
    NamespaceTool,
    ResponseAllowedTools,
    ToolName,
)

Location = tuple[int | str, ...]


def dotted(location: Location) -> str:
    """Name of a place in a body, as errors have it."""
    text = ""
    for segment in location:
        text += f"[{segment}]" if isinstance(segment, int) else f".{segment}" if text else segment
    return text


INPUT = "input"
"""The one parameter of a custom tool."""
_BETWEEN = "__"


def qualified(name: str, namespace: str | None) -> str:
    """Name by which the model knows a tool. Namespaces of MCP servers end with the separator themselves."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith(_BETWEEN) else f"{namespace}{_BETWEEN}{name}"


@dataclass(frozen=True, slots=True)
class Offer:
    """One tool of a response, as a tool of the chat.

    Args:
        tool: in the chat's form.
        source: where it is in the request.
        name: the client's name of it; empty for a hosted one.
        namespace: of the name.
        custom: its input is a text.
    """

    tool: dict[str, Any]
    source: Location
    name: str = ""
    namespace: str | None = None
    custom: bool = False


class Offers:
    """All tools of a response.

    Args:
        tools: of the request.
    """

    def __init__(self, tools: Sequence[FunctionTool | CustomTool | NamespaceTool | HostedTool] | None) -> None:
        self.all = [offer for index, tool in enumerate(tools or ()) for offer in _offers(tool, ("tools", index))]
        self._by_name = {offer.tool["function"]["name"]: offer for offer in self.all if offer.name}

    def called(self, function: str) -> Offer | None:
        """Tool that the model calls by a name; None: there is none."""
        return self._by_name.get(function)

    def function_of(self, name: str, namespace: str | None) -> str:
        """Function that the client names. A name without namespace also finds the only function of that name in one."""
        if namespace is not None or name in self._by_name:
            return qualified(name, namespace)
        found = [offer for offer in self._by_name.values() if offer.name == name]
        return qualified(name, found[0].namespace) if len(found) == 1 else name

    def allowed(self, choice: ResponseAllowedTools) -> list[str]:
        """Functions that a choice allows; hosted tools are left out."""
        names: list[str] = []
        for tool in choice.tools:
            if isinstance(tool, ToolName):
                names.append(self.function_of(tool.name, tool.namespace))
            elif isinstance(tool, NamespaceName):
                of_it = [name for name, offer in self._by_name.items() if offer.namespace == tool.name]
                names += of_it or [tool.name]
        return list(dict.fromkeys(names))


def _offers(tool: FunctionTool | CustomTool | NamespaceTool | HostedTool, source: Location) -> Iterator[Offer]:
    if isinstance(tool, HostedTool):
        yield Offer({"type": tool.type}, source)
    elif isinstance(tool, NamespaceTool):
        for index, member in enumerate(tool.tools):
            about = tool.description if index == 0 else None
            yield _offer(member, (*source, "tools", index), tool.name, about)
    else:
        yield _offer(tool, source)


def _offer(
    tool: FunctionTool | CustomTool, source: Location, namespace: str | None = None, about: str | None = None
) -> Offer:
    function: dict[str, Any] = {"name": qualified(tool.name, namespace)}
    described = [f"{namespace}: {about}" if about else None, tool.description]
    if isinstance(tool, CustomTool):
        function |= {"parameters": _one_text(tool), "strict": True}
    else:
        function |= {"parameters": tool.parameters, "strict": tool.strict}
    function["description"] = "\n\n".join(filter(None, described)) or None
    given = {field: value for field, value in function.items() if value is not None}
    return Offer({"type": "function", "function": given}, source, tool.name, namespace, isinstance(tool, CustomTool))


def _one_text(tool: CustomTool) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string"}
    if isinstance(tool.format, GrammarText):
        if tool.format.syntax == "regex":
            text["pattern"] = f"^(?:{tool.format.definition})$"
        else:
            text["description"] = f"In the language of this Lark grammar:\n{tool.format.definition}"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a chat, each with its place in the client's request."""

    messages: list[dict[str, Any]]
    sources: list[Location]
    """Location of each message: that of its first item."""
    calls: dict[int, list[Location]]
    """Locations of the calls in each message."""

    def source_of(self, index: int, call: int | None = None) -> Location:
        """Location in the request of what a message, or a call in it, was made of."""
        if call is not None and call < len(self.calls.get(index, ())):
            return self.calls[index][call]
        return self.sources[index] if index < len(self.sources) else ("input",)


class _Builder:
    """Joins items into messages: what the model said in one turn is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.sources: list[Location] = []
        self.calls: dict[int, list[Location]] = {}
        self._called: set[str] = set()

    def add(self, item: Item, source: Location) -> None:
        """Takes the next item."""
        match item:
            case MessageItem(role="assistant"):
                self._assistant(source, fresh=("content", "tool_calls"))["content"] = item.text
            case MessageItem(role="user"):
                self._append({"role": "user", "content": item.text}, source)
            case MessageItem():
                self.instruct(item.text, source)
            case ReasoningItem() if item.text:
                turn = self._assistant(source, fresh=("content", "tool_calls"))
                turn["reasoning_content"] = turn.get("reasoning_content", "") + item.text
            case FunctionCallItem():
                _check_arguments(item.arguments, dotted((*source, "arguments")))
                self._call(item, item.arguments, source)
            case CustomCallItem():
                self._call(item, to_json({INPUT: item.input}).decode(), source)
            case FunctionCallOutputItem() | CustomCallOutputItem():
                self._answer(item, source)

    def instruct(self, text: str, source: Location) -> None:
        """Adds a system message."""
        self._append({"role": "system", "content": text}, source)

    def _call(self, item: FunctionCallItem | CustomCallItem, arguments: str, source: Location) -> None:
        self._called.add(item.call_id)
        function = {"name": qualified(item.name, item.namespace), "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._assistant(source).setdefault("tool_calls", []).append(call)
        self.calls.setdefault(len(self.messages) - 1, []).append(source)

    def _answer(self, item: FunctionCallOutputItem | CustomCallOutputItem, source: Location) -> None:
        if item.call_id not in self._called:
            raise InvalidRequest(
                f"no function_call before it has the call_id {item.call_id[:80]!r}: send the call as well, or the "
                "previous_response_id of the response that made it",
                param=dotted((*source, "call_id")),
            )
        self._append({"role": "tool", "tool_call_id": item.call_id, "content": item.text}, source)

    def _assistant(self, source: Location, *, fresh: Sequence[str] = ()) -> dict[str, Any]:
        """Message of the model that an item belongs to: a new one, if the last one has a field of ``fresh`` already."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in fresh):
            self._append({"role": "assistant"}, source)
        return self.messages[-1]

    def _append(self, message: dict[str, Any], source: Location) -> None:
        self.messages.append(message)
        self.sources.append(source)


def _check_arguments(text: str, param: str) -> None:
    # The chat request checks them, too, but can only say which message they are in.
    try:
        arguments = from_json(text) if text.strip() else {}
    except ValueError as error:
        raise InvalidRequest(f"{param} must be a JSON object: {error}", param=param) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{param} must be a JSON object, and it is not an object", param=param)


def conversation(
    instructions: str | None,
    prior: Sequence[Item],
    given: Sequence[Item | None] | str,
    *,
    continues: str = "previous_response_id",
) -> Conversation:
    """Messages made of the instructions, the items that are continued, and the input.

    Args:
        instructions: of the request.
        prior: items of the response or conversation that it continues.
        continues: the field that names the response or conversation.
        given: input of the request; None: an item that nobody can read.

    Raises:
        InvalidRequest: a function's answer without its call.
    """
    builder = _Builder()
    if instructions is not None:
        builder.instruct(instructions, ("instructions",))
    for item in prior:
        builder.add(item, (continues,))
    if isinstance(given, str):
        builder.add(MessageItem(role="user", content=given), ("input",))
    else:
        for index, named in enumerate(given):
            if named is not None:
                builder.add(named, ("input", index))
    return Conversation(builder.messages, builder.sources, builder.calls)


_SAME = (
    *("model", "adapter", "adapters", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "stop", "cache_salt", "priority"),
    *("chat_template_kwargs", "stream", "parallel_tool_calls", "service_tier", "prompt_cache_key", "user"),
)
"""Fields that both APIs have, with one meaning."""
_RENAMED: Mapping[str, tuple[str, ...]] = {
    "max_completion_tokens": ("max_output_tokens",),
    "max_tokens": ("max_output_tokens",),
    "reasoning_effort": ("reasoning", "effort"),
    "response_format": ("text", "format"),
    "logprobs": ("include",),
    "messages": ("input",),
}
_NAMES = (
    (re.compile(r"\bmax(_completion)?_tokens\b"), "max_output_tokens"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\bresponse_format\b(\.json_schema\b)?"), "text.format"),
)
"""Names of a chat's fields, as error messages and their `param` have them, and their names here."""
_INDEXED = re.compile(r"messages\[(\d+)\].*")
_TOOL = re.compile(r"\btools\[(\d+)\](\.function)?")


@dataclass(frozen=True, slots=True)
class ChatFields:
    """Fields of a chat request, and the places in the Responses body that its messages come from."""

    fields: dict[str, Any]
    conversation: Conversation
    offers: Offers
    raw: dict[str, Any] = field(repr=False)
    """The Responses body."""

    def request(self) -> ChatRequest:
        """The chat request.

        Raises:
            RequestValidationError: chat refuses a value; the error names the field of the Responses body.
        """
        try:
            return ChatRequest.model_validate(self.fields)
        except ValidationError as error:
            self._refuse(error)

    def rename(self, error: TemperError) -> None:
        """Gives an error of the chat request the names of the Responses body."""
        error.message = self._reworded(error.message)
        if error.param is not None:
            given, error.param = error.param, self._param(error.param)
            if error.message.startswith(given):
                error.message = error.param + error.message.removeprefix(given)

    def _param(self, param: str) -> str:
        if indexed := _INDEXED.fullmatch(param):
            return dotted(self.conversation.source_of(int(indexed[1])))
        if param in ("messages", "logprobs"):
            return dotted(_RENAMED[param])
        return self._reworded(param)

    def _reworded(self, text: str) -> str:
        for name, ours in _NAMES:
            text = name.sub(ours, text)
        return _TOOL.sub(lambda found: dotted(self._tool(int(found[1]))), text)

    def _tool(self, index: int) -> Location:
        return self.offers.all[index].source if index < len(self.offers.all) else ("tools", index)

    def _refuse(self, error: ValidationError) -> NoReturn:
        errors = []
        for entry in error.errors(include_url=False):
            context = dict(entry.get("ctx") or {})
            location = entry["loc"]
            if not location and context.get("param"):
                context["param"] = self._param(context["param"])  # the error is of the whole body
            if "message" in context:
                context["message"] = self._reworded(str(context["message"]))
            where = ("body", *self._location(location))
            errors.append({**entry, "loc": where, "msg": self._reworded(entry["msg"]), "ctx": context})
        raise RequestValidationError(errors, body=self.raw) from error

    def _location(self, location: Location) -> Location:
        match location:
            case ("messages", int(index), "tool_calls", int(call), "function", *rest):
                return (*self.conversation.source_of(index, call), *rest)
            case ("messages", int(index), str(), "tool_calls", int(call), "function", *rest):  # with the role's tag
                return (*self.conversation.source_of(index, call), *rest)
            case ("messages", int(index), *rest):
                return (*self.conversation.source_of(index), *rest)
            case ("tools", int(index), *rest):
                return (*self._tool(index), *(segment for segment in rest if segment != "function"))
            case (str(head), *rest):
                return (*_RENAMED.get(head, (head,)), *rest)
        return location


def chat_fields(body: ResponseRequest, prior: Sequence[Item], given: str | Sequence[Item | None]) -> ChatFields:
    """Fields of the chat request that means the same as a Responses request.

    Args:
        body: the Responses request.
        prior: the items of the response or conversation that it continues.
        given: its input, with what it refers to.

    Raises:
        InvalidRequest: an item does not fit the ones before it.
    """
    continues = "conversation" if body.conversation_id else "previous_response_id"
    talk, offers = conversation(body.instructions, prior, given, continues=continues), Offers(body.tools)
    fields: dict[str, Any] = {"messages": talk.messages}
    for name in _SAME:
        value = getattr(body, name)
        if value is not None:
            fields[name] = value
    if body.logit_bias is not None:
        fields["logit_bias"] = {str(token): bias for token, bias in body.logit_bias.items()}
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    _add_tools(fields, body, offers)
    _add_format(fields, body)
    return ChatFields(fields, talk, offers, body.model_dump(mode="json", by_alias=True, exclude_unset=True))


def _add_tools(fields: dict[str, Any], body: ResponseRequest, offers: Offers) -> None:
    if body.tools:
        fields["tools"] = [offer.tool for offer in offers.all]
    elif body.parallel_tool_calls is not None:
        del fields["parallel_tool_calls"]  # without tools there are no calls
    match body.tool_choice:
        case ToolName(name=name, namespace=namespace):
            fields["tool_choice"] = _function(offers.function_of(name, namespace))
        case ResponseAllowedTools(mode=mode):
            allowed = [_function(name) for name in offers.allowed(body.tool_choice)]
            fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        case "auto" if not body.tools:
            pass  # OpenAI's default here, with or without tools; a chat may say it with tools only
        case str(choice):
            fields["tool_choice"] = choice


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _add_format(fields: dict[str, Any], body: ResponseRequest) -> None:
    form = body.text.format if body.text is not None else None
    if isinstance(form, SchemaFormat):
        schema = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form is not None:
        fields["response_format"] = {"type": form.type}
