"""The response object: what of it the request says, and what of it changes while the model answers."""

from __future__ import annotations

import time
from typing import Any

from services.common.errors import InvalidRequest, Overloaded, TemperError
from services.gateway.api.responses.streaming.items import Data, new_id
from services.gateway.core.errors import status_of
from services.gateway.protocol.fields.hosted_tools import HostedTool, types_of_hosted
from services.gateway.protocol.responses.request import ResponseRequest
from services.gateway.protocol.responses.tools import CustomTool, FunctionTool, NamespaceTool


def new_response(body: ResponseRequest) -> Data:
    """The object of a response that has not begun."""
    reasoning = body.reasoning
    return {
        "id": new_id("resp"),
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
    """`error` of a failed response; an unexpected one shows nothing of itself."""
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
