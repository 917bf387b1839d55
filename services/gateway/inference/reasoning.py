"""How long a model may think, as the engine is told it."""

from __future__ import annotations

from services.common.errors import InvalidRequest
from services.common.pb import engine_pb2
from services.gateway.engines.pool import ServedModel
from services.gateway.protocol.fields.reasoning import ReasoningFields
from services.gateway.settings import GatewaySettings
from services.gateway.text.output_parser import END_THINK
from services.gateway.text.tool_calls.parser import OPEN


def thinking_message(
    served: ServedModel,
    body: ReasoningFields,
    settings: GatewaySettings,
    *,
    opened: bool,
    constrained: bool,
    calls: bool,
) -> engine_pb2.Thinking | None:
    """Where the reasoning ends and when it is closed; None: the engine need not know.

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
