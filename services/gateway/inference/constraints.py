"""Constraints of an answer that the engine enforces: its structure, and how long the model may think."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from services.common.errors import InvalidRequest
from services.common.pb import engine_pb2
from services.common.text.output_parser import END_THINK
from services.common.text.tool_calls.parser import OPEN
from services.gateway.engines.served_model import ServedModel
from services.gateway.protocol.chat_request import ChatRequest
from services.gateway.protocol.fields.sampling import ReasoningFields
from services.gateway.protocol.fields.structured_outputs import ConstraintFields, Wanted
from services.gateway.settings import GatewaySettings
from services.gateway.text.detokenizer import Vocabulary
from services.gateway.text.grammar.tool_calls import CallForm, TurnForm, tool_grammar


def thinking_message(
    served: ServedModel,
    body: ReasoningFields,
    settings: GatewaySettings,
    *,
    opened: bool,
    constrained: bool,
    calls: bool,
) -> engine_pb2.Thinking | None:
    """Limits of the reasoning: where it ends and when it is closed; None: the engine need not know.

    Args:
        served: the model.
        body: what the request says.
        settings: the budgets of reasoning_effort.
        opened: the prompt ends inside the reasoning.
        constrained: a constraint begins where the reasoning ends.
        calls: it is one of calls, the first of which may come before that.

    Raises:
        InvalidRequest: the request wants thinking and the prompt has none, or the other way round.
    """
    field = body.budget_field or "reasoning_effort"
    if body.wants_thinking and not opened:
        raise InvalidRequest(
            f"{field} asks for thinking, but the prompt does not open it: this model's chat template has no thinking, "
            "or the message to be continued is past it",
            param=field,
        )
    if body.reasoning_effort == "none" and opened:
        raise InvalidRequest(
            "reasoning_effort 'none' asks for no thinking, but the prompt opens it: this model's chat template always "
            "does, or the message to be continued is inside it",
            param=field,
        )
    budget = body.budget
    if body.reasoning_effort is not None and body.reasoning_effort != "none":
        budget = settings.reasoning_budget(body.reasoning_effort)
    if not opened or (budget is None and not constrained):
        return None
    end = served.vocabulary.markup.get(END_THINK)
    if end is None:
        raise InvalidRequest(
            f"this model has no token {END_THINK}, so that its thinking can neither be limited nor be followed by a "
            "constrained answer: turn thinking off",
            param=field if budget is not None else "chat_template_kwargs.enable_thinking",
        )
    call = served.vocabulary.markup.get(OPEN) if constrained and calls else None
    if budget is None:
        return engine_pb2.Thinking(end_token_id=end, call_token_id=call)
    # With no thinking at all, the markup is that of a prompt with thinking turned off.
    text = f"\n\n{settings.reasoning_closing}\n" if budget and settings.reasoning_closing else "\n"
    closing = [*served.codec.encode_plain(text), end]
    return engine_pb2.Thinking(end_token_id=end, budget=budget, closing_token_ids=closing, call_token_id=call)


def check_constraint(body: ConstraintFields, settings: GatewaySettings) -> None:
    """Refuses what is too large, before anything is done with it.

    Raises:
        InvalidRequest: a limit of the settings is passed.
    """
    wanted = body.wanted
    if wanted is None:
        return
    match wanted.kind:
        case "json_schema":
            check_schema(wanted.value, wanted.param, settings)
        case "regex":
            _at_most(len(wanted.value), settings.max_regex_chars, "characters", wanted.param)
        case "lark":
            _at_most(len(wanted.value.encode()), settings.max_grammar_bytes, "bytes", wanted.param)
        case "choices":
            _at_most(len(wanted.value), settings.max_constraint_choices, "texts", wanted.param)
            size = sum(len(text.encode()) for text in wanted.value)
            _at_most(size, settings.max_grammar_bytes, "bytes", wanted.param)


def check_schema(schema: Any, param: str, settings: GatewaySettings) -> None:
    """Refuses a JSON schema that is too large.

    Raises:
        InvalidRequest: a limit of the settings is passed; the message has both.
    """
    properties = 0
    level, depth = [schema], 0
    while level:
        containers = [value for value in level if isinstance(value, dict | list)]
        depth += bool(containers)
        _at_most(depth, settings.max_schema_depth, "levels of nesting", param)
        level = []
        for value in containers:
            if isinstance(value, list):
                level += value
                continue
            level += value.values()
            if isinstance(named := value.get("properties"), dict):
                properties += len(named)
            if isinstance(pattern := value.get("pattern"), str):
                _at_most(len(pattern), settings.max_regex_chars, "characters in a pattern", param)
    _at_most(properties, settings.max_schema_properties, "properties", param)
    _at_most(len(to_json(schema)), settings.max_schema_bytes, "bytes", param)


def _at_most(found: int, limit: int, what: str, param: str) -> None:
    if found > limit:
        raise InvalidRequest(f"{param} has {found} {what} and may have {limit}", param=param)


def constraint_of(wanted: Wanted) -> engine_pb2.Constraint:
    """The message of one constraint."""
    match wanted.kind:
        case "json_schema":
            return engine_pb2.Constraint(json_schema=to_json(wanted.value).decode(), param=wanted.param)
        case "regex":
            return engine_pb2.Constraint(regex=wanted.value, param=wanted.param)
        case "lark":
            return engine_pb2.Constraint(lark=wanted.value, param=wanted.param)
    return engine_pb2.Constraint(choices=engine_pb2.Choices(texts=wanted.value), param=wanted.param)


def check_chat(body: ChatRequest, settings: GatewaySettings) -> None:
    """Refuses what is too large or cannot be had together, before the conversation is tokenized.

    Raises:
        InvalidRequest: the field is named.
    """
    check_constraint(body, settings)
    for index, tool in body.usable_tools:
        if tool.function.parameters is not None:
            check_schema(tool.function.parameters, f"tools[{index}].function.parameters", settings)
    wanted = body.wanted
    if wanted is None or not body.usable_tools:
        return
    if body.must_call and not wanted.of_text:
        raise InvalidRequest(
            f"{wanted.param} constrains the whole output and tool_choice makes it a call: send one of them",
            param=wanted.param,
        )
    if not body.must_call and wanted.kind != "json_schema":
        raise InvalidRequest(
            f"{wanted.param} leaves no room for a call of the tools: send tool_choice 'none', or a JSON schema",
            param=wanted.param,
        )


def chat_constraint(
    body: ChatRequest, vocabulary: Vocabulary, settings: GatewaySettings
) -> engine_pb2.Constraint | None:
    """Constraint on the answer to a conversation; None: anything is allowed.

    A forced call is bound to the schema of its function; with tool_choice "auto" that of functions with ``strict`` is,
    and a JSON schema for the text means: calls, or a document. response_format does not apply to a forced call, which
    has no text.

    Args:
        body: ``check_chat`` has seen it.
        vocabulary: of the model.
        settings: limits.

    Raises:
        InvalidRequest: a function's schema asks for what cannot be enforced.
    """
    wanted, names = body.wanted, body.callable_names
    forced = body.must_call
    functions = [
        CallForm(
            tool.function.name,
            tool.function.parameters,
            forced or bool(tool.function.strict),
            f"tools[{index}].function.parameters",
        )
        for index, tool in body.usable_tools
        if names is None or tool.function.name in names
    ]
    bound = forced or names is not None or wanted is not None or any(function.enforced for function in functions)
    if not functions or not bound:
        return None if wanted is None else constraint_of(wanted)
    document: Mapping[str, Any] | None = None if wanted is None or forced else wanted.value
    form = TurnForm(forced, body.may_repeat_calls, document, "response_format" if wanted is None else wanted.param)
    grammar = tool_grammar(functions, form, vocabulary.markup, limit=settings.max_grammar_bytes)
    return engine_pb2.Constraint(lark=grammar, param="tools")
