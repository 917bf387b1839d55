"""`draft`: a job whose version the drafter is refreshed for; and the texts that a drafter learns on."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from services.common.jobs.fields.messages import SAYS, TEACHES, Message, check_asks, check_taught
from services.common.jobs.fields.prompts import TokenIds
from services.common.validation.json_rules import NULL, Rules, both, either, given, if_any, left_out
from services.common.validation.strict_models import SentModel, absent


class RefreshesDrafter(SentModel):
    """Fields of a job that can have the drafter refreshed."""

    draft: bool | None = Field(None, exclude_if=absent)
    """Refresh the drafter that the engine follows (TEMPER_DRAFTER): once the job's version is published, a draft job
    trains it on this job's texts and prompts, for what the version says."""


class DraftExample(SentModel):
    """An example of sft; or a prompt alone, as text, as a conversation that ends with a question, or as token ids: the
    target answers it first."""

    prompt: str | list[Message] | None = None
    completion: str | None = None
    messages: list[Message] | None = None
    text: str | None = Field(None, min_length=1)
    prompt_token_ids: TokenIds | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    """Function definitions, rendered by the chat template."""

    json_rules: ClassVar[Rules] = (
        either(
            both(given("prompt"), left_out("messages", "text", "prompt_token_ids")),
            both(given("messages"), left_out("prompt", "completion", "text", "prompt_token_ids")),
            both(given("text"), left_out("prompt", "completion", "messages", "tools", "prompt_token_ids")),
            both(given("prompt_token_ids"), left_out("prompt", "completion", "messages", "tools", "text")),
        ),
        if_any(prompt=SAYS, messages=either(NULL, SAYS, TEACHES)),
    )

    @model_validator(mode="after")
    def _one_form(self) -> DraftExample:
        forms = ("prompt", "messages", "text", "prompt_token_ids")
        if sum(getattr(self, name) is not None for name in forms) != 1:
            raise ValueError(f"give exactly one of {', '.join(forms)}")
        if self.completion is not None and self.prompt is None:
            raise ValueError("a completion answers a prompt: give both")
        if self.tools is not None and self.prompt is None and self.messages is None:
            raise ValueError("tools are rendered by the chat template, which texts and token ids do not go through")
        check_asks(self.prompt, "prompt")
        if self.messages is not None:
            if self.answered:
                check_taught(self.messages, "messages")
            else:
                check_asks(self.messages, "messages")
        return self

    @property
    def answered(self) -> bool:
        """False: the target has to answer it first."""
        if self.messages is not None:
            return bool(self.messages) and self.messages[-1].role == "assistant"
        return self.text is not None or self.completion is not None
