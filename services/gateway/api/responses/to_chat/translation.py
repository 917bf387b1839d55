"""Translation of a Responses request into the chat request that answers it, and of errors back to its fields."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from services.common.errors import TemperError
from services.gateway.api.responses.to_chat.conversation import Conversation, conversation
from services.gateway.api.responses.to_chat.places import Location, dotted
from services.gateway.api.responses.to_chat.tools import Offers
from services.gateway.protocol.chat.request import ChatRequest
from services.gateway.protocol.responses.items import Item
from services.gateway.protocol.responses.request import ResponseRequest, SchemaFormat
from services.gateway.protocol.responses.tools import ResponseAllowedTools, ToolName

_SAME = (
    *("model", "adapter", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "stop", "cache_salt", "priority", "chat_template_kwargs", "stream"),
    *("parallel_tool_calls", "service_tier", "prompt_cache_key", "user"),
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
"""What error messages and their `param` say, and what it is called here."""
_INDEXED = re.compile(r"messages\[(\d+)\].*")
_TOOL = re.compile(r"\btools\[(\d+)\](\.function)?")


@dataclass(frozen=True, slots=True)
class ChatFields:
    """A chat request's fields, and where its messages come from."""

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
                context["param"] = self._param(context["param"])  # of the whole body
            if "message" in context:
                context["message"] = self._reworded(str(context["message"]))
            where = ("body", *self._location(location))
            errors.append({**entry, "loc": where, "msg": self._reworded(entry["msg"]), "ctx": context})
        raise RequestValidationError(errors, body=self.raw) from error

    def _location(self, location: Location) -> Location:
        match location:
            case ("messages", int(index), "tool_calls", int(call), "function", *rest):
                return (*self.conversation.source_of(index, call), *rest)
            case ("messages", int(index), str(), "tool_calls", int(call), "function", *rest):  # behind the role's tag
                return (*self.conversation.source_of(index, call), *rest)
            case ("messages", int(index), *rest):
                return (*self.conversation.source_of(index), *rest)
            case ("tools", int(index), *rest):
                return (*self._tool(index), *(segment for segment in rest if segment != "function"))
            case (str(head), *rest):
                return (*_RENAMED.get(head, (head,)), *rest)
        return location


def chat_fields(body: ResponseRequest, prior: Sequence[Item], given: str | Sequence[Item | None]) -> ChatFields:
    """What a chat request of the same meaning has.

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
        del fields["parallel_tool_calls"]  # nothing to be parallel
    match body.tool_choice:
        case ToolName(name=name, namespace=namespace):
            fields["tool_choice"] = _function(offers.function_of(name, namespace))
        case ResponseAllowedTools(mode=mode):
            allowed = [_function(name) for name in offers.allowed(body.tool_choice)]
            fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        case "auto" if not body.tools:
            pass  # OpenAI's default here, with or without tools; in chat it needs some
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
