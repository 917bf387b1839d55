"""What an output must look like, as a request says it. Plain data: nothing here is compiled."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.common.errors import InvalidRequest

_MAX_CLOSING = 256
"""Tokens that close the reasoning: a sentence, not an answer."""


class ConstraintKind(enum.Enum):
    """How a language is written down."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    CHOICES = "choices"


@dataclass(frozen=True, slots=True)
class Constraint:
    """The language of an answer. Equal ones, but for ``param``, are compiled once."""

    kind: ConstraintKind
    source: tuple[str, ...]
    """The texts to choose from; of other kinds one text."""
    param: str = "constraint"
    """The request field that a refusal names."""

    def __post_init__(self) -> None:
        if not self.source:
            raise InvalidRequest("there must be at least one text to choose from", param=self.param)
        if self.kind is not ConstraintKind.CHOICES and len(self.source) != 1:
            raise ValueError(f"a {self.kind.value} is one text, got {len(self.source)}")

    @property
    def key(self) -> tuple[ConstraintKind, tuple[str, ...]]:
        """What compiled grammars are cached by."""
        return self.kind, self.source

    @property
    def size(self) -> int:
        """Bytes of the source in UTF-8; a lone surrogate counts as one that is encoded."""
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in self.source)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The output begins inside the model's reasoning, which a token of its own ends.

    Raises:
        InvalidRequest: the closing tokens do not end with that token, or have it elsewhere too.
    """

    end_token_id: int
    budget: int | None = None
    """Tokens that may come before the reasoning is closed; None: as many as the model wants."""
    closing_ids: tuple[int, ...] = ()
    """What closes it when the budget is used up; empty: the token alone."""
    call_token_id: int | None = None
    """With which the answer may begin before the reasoning is closed."""

    def __post_init__(self) -> None:
        closing = self.closing
        if self.budget is not None and self.budget < 0:
            raise InvalidRequest("the thinking budget must not be negative", param="thinking")
        if closing[-1] != self.end_token_id or self.end_token_id in closing[:-1] or len(closing) > _MAX_CLOSING:
            raise InvalidRequest(
                f"closing_token_ids must be at most {_MAX_CLOSING} tokens, of which the last and no other is the token "
                f"that ends the reasoning ({self.end_token_id})",
                param="thinking",
            )

    @property
    def closing(self) -> tuple[int, ...]:
        return self.closing_ids or (self.end_token_id,)
