"""Trajectories by what the engine remembers: completion ids, a conversation session, or the trace of an agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from services.common.jobs.trajectories.segments import MOST_SEGMENTS, Reward, Trajectory
from services.common.validation.json_rules import NULL, Rules, contains, either, exactly_one, given, if_any, only_with
from services.common.validation.strict_models import SentModel

CompletionId = Annotated[str, Field(min_length=1, max_length=256)]


def unnumbered(completion_id: str) -> str:
    """The id of a response's first choice without its number: that of an only choice is the response's, but clients may
    number it."""
    return completion_id.removesuffix(":0")


class TracedMessage(SentModel):
    """A message as an agent keeps it. What it says besides is not read: the tokens of its completion, and of the prompt
    of the next one, are what was sampled and what was seen."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})

    role: str
    completion_id: CompletionId | None = None
    """Of an assistant's message that is to be learnt."""
    reward: Reward | None = None
    """Of this turn."""


class StoredTrajectory(SentModel):
    """A trajectory whose tokens the engine remembers. Each completion's prompt must begin with the tokens before it."""

    completion_ids: Annotated[list[CompletionId], Field(min_length=1, max_length=MOST_SEGMENTS)] | None = None
    """In their order."""
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """All completions of a conversation session (`session_id` of requests) that are remembered."""
    trace: Annotated[list[TracedMessage], Field(min_length=1, max_length=MOST_SEGMENTS)] | None = None
    """Messages of an agent, its own with their `completion_id`."""
    rewards: list[Reward] | None = None
    """Reward of each of completion_ids, beside the trajectory's."""
    reward: Reward | None = None
    truncated: bool | None = None
    """None: whether the last completion hit max_tokens."""
    split: bool = False
    """Where a prompt does not begin with the tokens before it, the context begins anew there. Otherwise that is
    refused."""

    json_rules: ClassVar[Rules] = (
        exactly_one("completion_ids", "session_id", "trace"),
        only_with("rewards", given("completion_ids")),
        if_any(trace=either(NULL, contains(given("completion_id")))),
    )

    @model_validator(mode="after")
    def _one_form(self) -> StoredTrajectory:
        if sum(form is not None for form in (self.completion_ids, self.session_id, self.trace)) != 1:
            raise ValueError("give exactly one of completion_ids, session_id, trace (or segments)")
        if self.rewards is not None and len(self.rewards) != len(self.completion_ids or ()):
            raise ValueError("rewards must have one entry per completion id")
        if self.trace is not None and not self.ids:
            raise ValueError("trace has no message with a completion_id: nothing would be learnt")
        if len(set(map(unnumbered, self.ids))) < len(self.ids):
            raise ValueError("a completion is in the trajectory twice")
        return self

    @property
    def ids(self) -> list[str]:
        """Completion ids as far as they are given; none of a session."""
        traced = [message.completion_id for message in self.trace or () if message.completion_id is not None]
        return list(self.completion_ids or traced)

    @property
    def rewards_given(self) -> list[float | None]:
        """Reward of each of ``ids``, None where it has none."""
        if self.trace is not None:
            return [message.reward for message in self.trace if message.completion_id is not None]
        return [None] * len(self.ids) if self.rewards is None else list(self.rewards)

    @property
    def scored(self) -> bool:
        """It has a reward, of the whole or of a turn."""
        return self.reward is not None or any(reward is not None for reward in self.rewards_given)


def _form(value: Any) -> str:
    if isinstance(value, Mapping):
        return "stored" if any(value.get(name) is not None for name in STORED) else "segments"
    return "stored" if isinstance(value, StoredTrajectory) else "segments"


STORED = ("completion_ids", "session_id", "trace")
AnyTrajectory: TypeAlias = Annotated[
    Annotated[Trajectory, Tag("segments")] | Annotated[StoredTrajectory, Tag("stored")], Discriminator(_form)
]
"""A trajectory, by its segments or by what the engine remembers."""
