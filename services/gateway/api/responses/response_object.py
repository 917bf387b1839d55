"""The response object, which begins with the request and changes while the model answers, and the record of it that is
kept, with the items that a response which continues it needs."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from services.common.errors import InvalidRequest, NotFound, Overloaded, TemperError
from services.gateway.core.errors import status_of
from services.gateway.protocol.fields.tools import HostedTool, types_of_hosted
from services.gateway.protocol.responses.items import InputItem, Item, ItemReference, MessageItem
from services.gateway.protocol.responses.request import ResponseRequest
from services.gateway.protocol.responses.tools import CustomTool, FunctionTool, NamespaceTool
from services.learning.canaries.enrolment import Enrolment, answer_digits

Data = dict[str, Any]


def new_id(kind: str) -> str:
    """An id as OpenAI makes them: "resp_" and hex digits."""
    return f"{kind}_{uuid.uuid4().hex}"


def new_item_id(kind: str, response_id: str) -> str:
    """Id of an item that a response was given or answers. The response's own id is part of it, by which it is found
    again."""
    return f"{kind}_{response_id.removeprefix('resp_')}{uuid.uuid4().hex[:16]}"


def new_response(body: ResponseRequest, enrolment: Enrolment | None = None) -> Data:
    """The object of a response that has not begun, whose id tells its part in a canary."""
    reasoning = body.reasoning
    return {
        "id": f"resp_{answer_digits(enrolment)}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "model": body.model,
        "adapter": None,
        "completion_id": None,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "conversation": {"id": body.conversation_id} if body.conversation_id else None,
        "output": [],
        "tools": [_tool(tool) for tool in body.tools or () if not isinstance(tool, HostedTool)],
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": _text(body),
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning else None,
        },
        "max_output_tokens": body.max_output_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "store": body.stored,
        "metadata": body.metadata or {},
        "service_tier": "default",
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "usage": None,
        **_left_out(body),
    }


def failure(error: Exception) -> Data:
    """`error` of a failed response. An unexpected error does not show its text."""
    if not isinstance(error, TemperError) or status_of(error) == 500:
        return {"code": "server_error", "message": "internal error; the log has the details"}
    code = "server_error"
    if isinstance(error, InvalidRequest):
        code = "invalid_prompt"
    elif isinstance(error, Overloaded):
        code = "rate_limit_exceeded"
    return {"code": code, "message": error.message}


def usage_of(counts: dict[str, Any]) -> Data:
    """Usage from the token counts of a chat completion."""
    prompt, completion = counts["prompt_tokens"], counts["completion_tokens"]
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    told: Data = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": counts["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": counts["total_tokens"],
    }
    return told | {"session": counts["session"]} if "session" in counts else told


def _tool_choice(body: ResponseRequest) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return choice.model_dump(exclude_none=True)


def _tool(tool: FunctionTool | CustomTool | NamespaceTool) -> Data:
    told: Data = {"type": tool.type, "name": tool.name, "description": tool.description}
    match tool:
        case FunctionTool():
            told |= {"parameters": tool.parameters, "strict": tool.strict}
        case CustomTool():
            told |= {"format": {"type": "text"} if tool.format is None else tool.format.model_dump()}
        case NamespaceTool():
            told |= {"description": tool.description or "", "tools": [_tool(member) for member in tool.tools]}
    return told


def _left_out(body: ResponseRequest) -> Data:
    left_out = types_of_hosted(body.tools)
    return {"left_out_tools": left_out} if left_out else {}


def _text(body: ResponseRequest) -> Data:
    given = body.text.format if body.text is not None else None
    form = {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_none=True)
    verbosity = None if body.text is None else body.text.verbosity
    return {"format": form, "verbosity": verbosity or "medium"}


_ID = re.compile(r"resp_[0-9a-f]{32}")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{16}")
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_UNKEPT = {"caller", "async_", "phase", "encrypted_content"}
_UNKEPT_OF_PARTS = ("cache_control", "prompt_cache_breakpoint")
"""Fields of a content part that have no effect and are not kept."""
ACTIVE = frozenset({"queued", "in_progress"})
"""States of a response that has not ended."""
CONTINUABLE = frozenset({"completed", "incomplete"})


@dataclass(slots=True)
class Record:
    """One stored response."""

    response: Data
    """Response as GET answers it."""
    items: list[Data] = field(default_factory=list)
    """Items that the response was given, oldest first: those that came before it and its own input, each with an id."""

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def status(self) -> str:
        return str(self.response["status"])

    @property
    def whole(self) -> list[Data]:
        """Items that the response was given and answered, which a response that continues it is given before its own
        input. A call that was cut off can be neither run nor read, and is left out."""
        return [*self.items, *self.said]

    @property
    def said(self) -> list[Data]:
        """Items of the answer that a later response can read."""
        return [_readable(item) for item in self.response["output"] if not cut_call(item)]

    def item(self, item_id: str) -> Data | None:
        """Item with an id, given or answered; None: there is none."""
        items = (*self.items, *map(_readable, self.response["output"]))
        return next((item for item in items if item["id"] == item_id), None)


def parsed(items: Sequence[Data]) -> list[Item]:
    """Stored items, parsed as those of a request."""
    # No reference is ever kept.
    return [item for item in _ITEMS.validate_python(items) if not isinstance(item, ItemReference)]


def checked_id(response_id: str, *, param: str = "response_id") -> str:
    """Returns an id that may be looked up.

    Raises:
        NotFound: no response can have it.
    """
    if not _ID.fullmatch(response_id):
        raise missing(response_id, param=param)
    return response_id


def missing(response_id: str, *, param: str = "response_id") -> NotFound:
    """The error of a response that is not kept."""
    return NotFound(
        f"no such response: {response_id[:80]!r}; responses are kept for a while only, and with store=true only",
        param=param,
    )


def response_of(item_id: str) -> str | None:
    """Id of the response that an item is kept with; None: no item of ours has such an id."""
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else f"resp_{found[1]}"


def given_items(given: str | Sequence[Item | None], response_id: str) -> list[Data]:
    """The input of a response as items, each with an id and a status."""
    items = [MessageItem(role="user", content=given)] if isinstance(given, str) else given
    return [_described(item, response_id) for item in items if item is not None]


def _described(item: Item, response_id: str) -> Data:
    data: dict[str, Any] = item.model_dump(mode="json", exclude_none=True, exclude=_UNKEPT)
    kind = data["type"] = item.type or "message"
    data["status"] = "completed"
    match kind:
        case "message":
            if isinstance(data["content"], str):
                part = "output_text" if data["role"] == "assistant" else "input_text"
                data["content"] = [{"type": part, "text": data["content"]}]
            for part in data["content"]:
                for unkept in _UNKEPT_OF_PARTS:
                    part.pop(unkept, None)
                if part["type"] == "output_text":
                    part |= {"annotations": [], "logprobs": []}
        case "reasoning":
            data = {"summary": [], "content": [], **data}
    data.setdefault("id", new_item_id(_PREFIXES[kind], response_id))
    return data


def cut_call(item: Data) -> bool:
    """True for a call that was cut off, which can be neither run nor read."""
    return item["type"] in ("function_call", "custom_tool_call") and item["status"] == "incomplete"


def _readable(item: Data) -> Data:
    """Output item without log-probabilities, which are of no use to a model and may be megabytes."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}
