"""Supervised fine-tuning: its request."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from services.common.jobs.base import JobBase, Message, StrictModel


class SftExample(StrictModel):
    """prompt + completion (loss on the completion) or messages (loss on the assistant turns)."""

    prompt: str | list[Message] | None = None
    completion: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    """Function definitions, rendered by the chat template."""

    @model_validator(mode="after")
    def _one_form(self) -> SftExample:
        pair = self.prompt is not None and self.completion is not None and self.messages is None
        chat = self.messages is not None and self.prompt is None and self.completion is None
        if not (pair or chat):
            raise ValueError("give either prompt and completion, or messages")
        if self.messages is not None and not any(m.role == "assistant" for m in self.messages):
            raise ValueError("messages need at least one assistant turn to learn from")
        return self


class SftJob(JobBase):
    """Supervised fine-tuning."""

    kind: Literal["sft"] = "sft"
    examples: list[SftExample] = Field(min_length=1)
    eval_examples: list[SftExample] = Field(default_factory=list)
    eval_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the examples held out for evaluation, when eval_examples is not given."""
    eval_every: int | None = Field(None, ge=1)
    """Optimizer steps between evaluations; None: at the end of each epoch."""
    epochs: int = Field(3, ge=1, le=1000)
    batch_size: int = Field(8, ge=1)
    """Examples an optimizer step."""
    shuffle: bool = True
    overlong: Literal["error", "drop", "truncate"] = "error"
    """What happens to an example over the token limit."""
