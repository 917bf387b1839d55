"""Feedback as data: what is said of one answer, by whom, and whether a data set has learnt from it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from services.common.storage.ids import PATTERN, key_of
from services.common.validation.errors import contradiction
from services.common.validation.json_rules import Rules, at_least_one, exactly_one, left_out, only_with
from services.common.validation.strict_models import SentModel, StrictModel

ID_PATTERN: Final = f"^fb_{PATTERN}$"
TARGETS: Final = ("completion_id", "response_id", "message_id", "session_id", "completion_ids")
"""Fields that name what is spoken of."""
SAYINGS: Final = ("score", "thumb", "label", "correction", "preferred_over", "comment")
"""Fields that say something of it."""
Source = Literal["user", "judge", "test"]
_Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]
_MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
_MetadataValue = Annotated[str, Field(max_length=512)]


class Feedback(SentModel):
    """What somebody says of an answer, as it is sent."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    json_rules: ClassVar[Rules] = (
        exactly_one(*TARGETS),
        at_least_one(*SAYINGS),
        only_with("preferred_over", left_out("session_id", "completion_ids")),
        only_with("correction", left_out("completion_ids")),
    )

    completion_id: _Name | None = None
    """Id of a completion or of one of its choices ("chatcmpl-…:1")."""
    response_id: _Name | None = None
    """Id of an answer of /v1/responses."""
    message_id: _Name | None = None
    """Id of an answer of /v1/messages."""
    session_id: _Name | None = None
    """A whole session, by the id that its requests had."""
    completion_ids: Annotated[list[_Name], Field(min_length=2, max_length=256)] | None = None
    """Completions that are one piece of work, in their order: what an agent without `session_id` did."""
    score: float | None = Field(None, ge=-1, le=1)
    """How good it is: -1 the worst, 1 the best."""
    thumb: Literal["up", "down"] | None = None
    label: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$")
    """A word of your own, by which data sets choose."""
    correction: str | None = Field(None, min_length=1, max_length=65536)
    """Text that the answer should have had."""
    preferred_over: _Name | None = None
    """Id of another answer to the same messages, which is worse."""
    comment: str | None = Field(None, min_length=1, max_length=8192)
    source: Source = "user"
    user: _Name | None = None
    """Who says it: your user's id, as in `user` of a request. Each has one opinion of an answer and source; what is
    sent again replaces it, until a data set has used it."""
    metadata: dict[_MetadataKey, _MetadataValue] | None = Field(None, max_length=16)

    @model_validator(mode="after")
    def _of_one_thing(self) -> Feedback:
        named = [field for field in TARGETS if getattr(self, field) is not None]
        if len(named) != 1:
            said = "none is given" if not named else f"{' and '.join(named)} are given"
            param = named[-1] if named else TARGETS[0]
            raise contradiction(f"one of {', '.join(TARGETS)} says what is spoken of, and {said}", param)
        if all(getattr(self, field) is None for field in SAYINGS):
            raise contradiction(f"it says nothing: give one of {', '.join(SAYINGS)}", SAYINGS[0])
        if self.preferred_over == self.target:
            raise contradiction("an answer cannot be better than itself: name another one", "preferred_over")
        several = "session_id" if self.session_id is not None else "completion_ids" if self.completion_ids else None
        if self.preferred_over is not None and several is not None:
            raise contradiction(f"only answers are compared: name one instead of {several}", "preferred_over")
        if self.completion_ids is not None:
            if self.correction is not None:
                raise contradiction("a correction is of one answer: name it by completion_id", "correction")
            if len(set(self.completion_ids)) < len(self.completion_ids):
                raise contradiction("a completion is named twice", "completion_ids")
        return self

    @property
    def target(self) -> str:
        """Id of what is spoken of. That of a session begins with "session:", that of several completions with
        "completions:", as no answer's does."""
        if self.session_id is not None:
            return f"session:{self.session_id}"
        if self.completion_ids is not None:
            return "completions:" + key_of("\n".join(self.completion_ids))
        return self.completion_id or self.response_id or self.message_id or ""

    @property
    def answers(self) -> tuple[str, ...]:
        """Ids of the answers that it names: none for a session."""
        if self.session_id is not None:
            return ()
        return tuple(self.completion_ids) if self.completion_ids is not None else (self.target,)

    @property
    def rating(self) -> float | None:
        """How good it is, -1 to 1, by score, thumb or preference; None: neither says so."""
        if self.score is not None:
            return self.score
        if self.thumb is not None:
            return 1.0 if self.thumb == "up" else -1.0
        return 1.0 if self.preferred_over is not None else None


class FeedbackRecord(StrictModel):
    """Feedback as it is kept. Times are unix seconds."""

    id: str
    owner: str
    """Id of the API key that sent it; empty: there are no keys."""
    said: Feedback
    created_at: float
    changed_at: float
    used_by: tuple[str, ...] = ()
    """Data sets ("name@version") that have it; such feedback does not change any more."""
