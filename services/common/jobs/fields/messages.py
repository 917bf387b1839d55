"""A turn of a conversation in a job: what the chat endpoint answers and takes, and nothing that it would not render."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from services.common.validation.json_rules import SOME, Rule, Rules, both, either, given, has, if_any, only_with, where
from services.common.validation.strict_models import SentModel, absent

SAYS: Rule = either(SOME, {"type": ["string", "null"]})
"""A prompt of one or more turns, or a text."""


def _null(instead: str) -> BeforeValidator:
    """Validator of a field that clients send as null; anything else would be lost."""

    def check(value: Any) -> None:
        if value is not None:
            raise ValueError(f"must be null or left out: {instead}")

    return BeforeValidator(check)


_NoRefusal = Annotated[None, _null("what the assistant says, a refusal too, is its content")]
_NoAudio = Annotated[None, _null("this model reads text")]
_NoFunctionCall = Annotated[None, _null("use tool_calls, its successor")]


def _text_type(value: Any) -> Any:
    if value != "text":
        raise ValueError(f"parts of type {str(value)[:40]!r} are not learnt from: this model reads and writes text")
    return value


class JobTextPart(SentModel):
    """A piece of a turn's text."""

    type: Annotated[Literal["text"], BeforeValidator(_text_type)]
    text: str


class Message(SentModel):
    """One chat turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """"developer" is the same as "system"."""
    content: str | Annotated[list[JobTextPart], Field(min_length=1)] | None = None
    reasoning_content: str | None = None
    """The thinking before the content, as an answer gives it."""
    reasoning: str | None = Field(None, exclude_if=absent)
    """Other name of reasoning_content."""
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    weight: int | None = Field(None, ge=0, le=1, exclude_if=absent)
    """Weight of an assistant's turn: 0 makes it context that nothing is learnt from."""
    refusal: _NoRefusal = Field(None, exclude=True)
    annotations: list[Any] | None = Field(None, exclude=True)
    """Accepted and ignored: openai-python's messages carry it."""
    audio: _NoAudio = Field(None, exclude=True)
    function_call: _NoFunctionCall = Field(None, exclude=True)

    json_rules: ClassVar[Rules] = (
        either(
            given("content"),
            both(
                has(role="assistant"),
                either(has(tool_calls=SOME), given("reasoning_content"), given("reasoning")),
            ),
        ),
        *(only_with(name, has(role="assistant")) for name in ("reasoning_content", "reasoning", "weight")),
        where(has(tool_calls=SOME), has(role="assistant")),
    )

    @model_validator(mode="after")
    def _of_its_role(self) -> Message:
        if self.role != "assistant":
            for name in ("reasoning_content", "reasoning", "weight"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} belongs to turns of the assistant, not of the {self.role}")
            if self.tool_calls:
                raise ValueError(f"tool_calls belong to turns of the assistant, not of the {self.role}")
            if self.content is None:
                raise ValueError(f"the {self.role}'s turn needs content")
        elif self.content is None and not self.tool_calls and self.thoughts is None:
            raise ValueError("the assistant's turn needs content, tool_calls or reasoning_content")
        return self

    @property
    def thoughts(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @property
    def taught(self) -> bool:
        """A turn that is to be learnt, as far as it says so itself."""
        return self.role == "assistant" and self.weight != 0

    @property
    def turn(self) -> dict[str, Any]:
        """Turn as TextCodec takes it, equal to what the chat endpoint makes of the same message."""
        text = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.thoughts,
            "tool_calls": self.tool_calls or None,
        }
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | {key: value for key, value in optional.items() if value is not None}


def as_turns(asked: str | Iterable[Message]) -> list[Mapping[str, Any]]:
    """A prompt or a conversation as TextCodec takes it; a plain string is one message of the user."""
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    return [message.turn for message in asked]


def check_asks(asked: str | Sequence[Message] | None, field: str) -> None:
    """A prompt ends with a turn that can be answered.

    Raises:
        ValueError: it has no turns, or the last one is the assistant's.
    """
    if asked is None or isinstance(asked, str):
        return
    if not asked:
        raise ValueError(f"{field} must end with the turn that is to be answered, and has none")
    if asked[-1].role == "assistant":
        raise ValueError(
            f"{field} must end with the turn that is to be answered, not the assistant's: leave that out, or put its "
            "text in front of the completion"
        )


def check_taught(messages: Sequence[Message], field: str) -> None:
    """A conversation has a turn to learn: of the assistant, not of weight 0, and behind a turn of the user, which the
    template asks for. What the assistant says before any user is context.

    Raises:
        ValueError: there is none.
    """
    first = next((index for index, message in enumerate(messages) if message.role == "user"), len(messages))
    if any(message.taught for message in messages[first:]):
        return
    raise ValueError(
        f"{field} has no turn to learn: it needs a turn of the assistant behind one of the user, and not with weight 0"
    )


TEACHES: Rule = both(
    {"type": "array", "contains": has(role="user")},
    {"type": "array", "contains": both(has(role="assistant"), if_any(weight={"enum": [1, None]}))},
)
"""Rule of check_taught for a conversation, as far as JSON Schema can say it."""
