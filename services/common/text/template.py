"""Chat templates: the checkpoint's own Jinja template, in the environment that templates are written for.

The globals, filters and options are those of transformers' `apply_chat_template`
(transformers/utils/chat_template_utils.py), which is what template authors test against.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from pydantic_core import from_json

from services.common.errors import CheckpointRejected, InvalidRequest

RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "documents"}
)
"""Names that chat_template_kwargs must not replace."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for trainers; here it only groups statements."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a language model must not see.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates expect them, without touching the caller's.

    None means absent; `reasoning` and `thinking` are other names of `reasoning_content`; the arguments of a tool call,
    a JSON text in OpenAI's API, become the object that Qwen's template iterates over.

    Raises:
        InvalidRequest: there are no messages, or a tool call's arguments are not a JSON object.
    """
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    normalized = []
    for index, message in enumerate(messages):
        turn = {key: value for key, value in message.items() if value is not None}
        for alias in ("thinking", "reasoning"):
            if alias in turn:
                turn.setdefault("reasoning_content", turn[alias])
        if "tool_calls" in turn:
            turn["tool_calls"] = [_tool_call(call, index) for call in turn["tool_calls"]]
        normalized.append(turn)
    return normalized


def absent(turns: Sequence[Mapping[str, Any]], mark: str) -> list[dict[str, Any]]:
    """The turns with a mark where the last one is to be continued: after its content, or after its reasoning when it
    has got no further.

    Raises:
        InvalidRequest: the last turn is not an assistant's, or ends in tool calls.
    """
    *before, last = (dict(turn) for turn in turns)
    if last.get("role") != "assistant" or last.get("tool_calls"):
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant without tool calls", param="messages"
        )
    key = "reasoning_content" if not last.get("content") and last.get("reasoning_content") else "content"
    return [*before, {**last, key: f"{last.get(key) or ''}{mark}"}]


def cut_at(rendered: str, mark: str) -> str:
    """The rendered text up to the mark.

    Raises:
        InvalidRequest: the template does not show the end of the last message.
    """
    text, found, _ = rendered.rpartition(mark)
    if not found:
        raise InvalidRequest(
            "continue_final_message: the chat template does not show the end of the last message", param="messages"
        )
    return text.replace(mark, "")


def _tool_call(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _tool_call(function, index)}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    param = f"messages[{index}].tool_calls"
    try:
        # pydantic's parser, because it refuses endless nesting as what it is, a wrong value.
        parsed = from_json(arguments) if arguments.strip() else {}
    except ValueError as error:
        raise InvalidRequest(f"{param}: arguments must be a JSON object, {error}", param=param) from error
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"{param}: arguments must be a JSON object, got {type(parsed).__name__}", param=param)
    return {**call, "arguments": parsed}


class ChatTemplate:
    """A compiled template. Rendering is thread-safe.

    Args:
        source: the Jinja text.
        special_tokens: `bos_token`, `eos_token`, … as templates may use them.

    Raises:
        CheckpointRejected: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointRejected(f"the checkpoint's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        """The conversation as one text.

        Raises:
            InvalidRequest: the template refuses the messages, or kwargs try to replace its inputs.
        """
        reserved = RESERVED_KWARGS & kwargs.keys()
        if reserved:
            raise InvalidRequest(
                f"chat_template_kwargs must not set {', '.join(sorted(reserved))}", param="chat_template_kwargs"
            )
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # Templates index, concatenate and compare what the user sent, so these are the user's errors too.
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error
