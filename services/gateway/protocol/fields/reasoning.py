"""Fields that say whether and how long a model thinks before it answers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from services.common.validation.json_rules import Rules, at_most_one
from services.gateway.protocol.fields.base import JsonObject, RequestModel, contradiction

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningFields(RequestModel):
    """What is left out is up to the chat template."""

    reasoning_effort: Effort | None = None
    """"none": no thinking. Otherwise thinking, up to the budget that the gateway's settings give this effort; "max" is
    "xhigh"."""
    thinking_budget: int | None = Field(None, ge=0, lt=2**31)
    """Thinking, up to so many tokens: then the reasoning is closed and the answer begins. 0: no thinking."""
    thinking_token_budget: int | None = Field(None, ge=0, lt=2**31)
    """vLLM's name of thinking_budget."""
    chat_template_kwargs: JsonObject | None = None
    """Variables of the chat template, e.g. {"enable_thinking": true}."""

    json_rules: ClassVar[Rules] = (at_most_one("reasoning_effort", "thinking_budget", "thinking_token_budget"),)

    @property
    def budget_field(self) -> str | None:
        """The field that gives a budget, if one does."""
        if self.thinking_budget is not None:
            return "thinking_budget"
        return None if self.thinking_token_budget is None else "thinking_token_budget"

    @property
    def budget(self) -> int | None:
        """Tokens of thinking that the request asks for itself."""
        return self.thinking_token_budget if self.thinking_budget is None else self.thinking_budget

    @property
    def wants_thinking(self) -> bool | None:
        """Whether there shall be thinking, as far as the fields beside chat_template_kwargs say; None: they do not."""
        if self.reasoning_effort is not None:
            return self.reasoning_effort != "none"
        return None if self.budget is None else self.budget > 0

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template, enable_thinking as the other fields say."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.wants_thinking is not None:
            kwargs.setdefault("enable_thinking", self.wants_thinking)
        return kwargs

    @model_validator(mode="after")
    def _agree(self) -> ReasoningFields:
        if self.thinking_budget is not None and self.thinking_token_budget is not None:
            raise contradiction(
                "thinking_budget and thinking_token_budget are the same field: send one", "thinking_token_budget"
            )
        field = self.budget_field
        if self.reasoning_effort is not None and field is not None:
            raise contradiction(
                f"reasoning_effort and {field} both set how long the model thinks: send one of them", field
            )
        said = (self.chat_template_kwargs or {}).get("enable_thinking")
        if said is None or self.wants_thinking is None:
            return self
        by = "reasoning_effort" if field is None else field
        # A budget of 0 with enable_thinking true is a template that opens the reasoning, which is closed at once.
        if bool(said) != self.wants_thinking and not (said and field is not None):
            wanted = "on" if self.wants_thinking else "off"
            raise contradiction(f"{by} turns thinking {wanted} and chat_template_kwargs.enable_thinking does not", by)
        return self
