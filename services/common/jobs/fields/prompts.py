"""Prompts in a job: those that it samples completions of, and those whose completions it brings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from services.common.jobs.fields.messages import SAYS, Message, check_asks
from services.common.validation.json_rules import Rules, exactly_one, if_any, left_out, only_with
from services.common.validation.strict_models import SentModel

TokenIds = list[Annotated[int, Field(ge=0)]]


class PromptFields(SentModel):
    """Fields of a prompt in one of its forms: text, a conversation or token ids."""

    prompt: str | list[Message] | None = None
    messages: list[Message] | None = None
    prompt_token_ids: TokenIds | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    """Function definitions, rendered by the chat template; not with prompt_token_ids."""


class SampledPrompt(PromptFields):
    """One prompt, as text, as a conversation or as token ids."""

    json_rules: ClassVar[Rules] = (
        exactly_one("prompt", "messages", "prompt_token_ids"),
        if_any(prompt=SAYS, messages=SAYS),
        only_with("tools", left_out("prompt_token_ids")),
    )

    @model_validator(mode="after")
    def _one_form(self) -> SampledPrompt:
        if sum(form is not None for form in (self.prompt, self.messages, self.prompt_token_ids)) != 1:
            raise ValueError("give exactly one of prompt, messages, prompt_token_ids")
        if self.prompt_token_ids is not None and self.tools is not None:
            raise ValueError("tools are part of prompt_token_ids already")
        check_asks(self.prompt, "prompt")
        check_asks(self.messages, "messages")
        return self


class AskedExample(SentModel):
    """A prompt that completions answer."""

    prompt: str | list[Message] | None = None
    messages: list[Message] | None = None
    """The conversation that the completions answer, when `prompt` is not given."""
    tools: list[dict[str, Any]] | None = None
    """Function definitions, rendered by the chat template."""

    json_rules: ClassVar[Rules] = (exactly_one("prompt", "messages"), if_any(prompt=SAYS, messages=SAYS))

    @model_validator(mode="after")
    def _one_prompt(self) -> AskedExample:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give one of prompt, messages")
        check_asks(self.asked, "messages" if self.prompt is None else "prompt")
        return self

    @property
    def asked(self) -> str | list[Message]:
        """The prompt, whichever way it was given."""
        return self.messages or [] if self.prompt is None else self.prompt


def as_prompt(value: Any) -> Any:
    """A plain string stands for a prompt object."""
    return {"prompt": value} if isinstance(value, str) else value
