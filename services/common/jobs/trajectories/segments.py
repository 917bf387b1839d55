"""Trajectories as data: actions that a policy sampled, between observations that it did not."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from services.common.jobs.fields.messages import Message, check_asks
from services.common.jobs.fields.refs import FixedPolicy
from services.common.validation.json_rules import Rules, at_most_one, contains, exactly_one, has
from services.common.validation.strict_models import SentModel, absent

Reward = Annotated[float, Field(ge=-1e9, le=1e9)]
"""Bounded, so that statistics over rewards stay finite."""
MOST_SEGMENTS = 4096
"""Segments of a trajectory."""


SegmentTokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class SampledBy(SentModel):
    """Tokens in a row that one policy sampled."""

    adapter: FixedPolicy
    """"name@n", several together ("a@3*0.7+b@1"), or "base"."""
    tokens: Annotated[int, Field(ge=1)]
    """How many they are."""


class Action(SentModel):
    """Tokens that a policy sampled: one turn of it. They are what is learnt."""

    type: Literal["action"]
    token_ids: SegmentTokens
    logprobs: list[Annotated[float, Field(ge=-1e9, le=1e-3)]] | None = None
    """log softmax(logits / temperature) of each sampled token, as `sampling_logprobs` of a response gives it. Every
    action of a trajectory has them, or none: then they are computed again and marked `recomputed`."""
    temperature: float = Field(1.0, ge=0, le=100)
    adapter: FixedPolicy | None = None
    """"name@n" that sampled it, several together ("a@3*0.7+b@1"), or "base"; a version must exist when the job is
    submitted. Turns of one trajectory may have different ones."""
    versions: list[SampledBy] | None = Field(None, min_length=1, exclude_if=absent)
    """In the place of `adapter`, where a turn went on under another version: who sampled which of its tokens, in their
    order, altogether as many as token_ids."""
    reward: Reward | None = Field(None, exclude_if=absent)
    """Reward of this turn, beside the trajectory's."""

    json_rules: ClassVar[Rules] = (at_most_one("adapter", "versions"),)

    @model_validator(mode="after")
    def _one_each(self) -> Action:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError("logprobs must have one entry per token id")
        if self.versions is not None:
            if self.adapter is not None:
                raise ValueError("adapter and versions both say who sampled the tokens: leave one of them out")
            if (named := sum(span.tokens for span in self.versions)) != len(self.token_ids):
                raise ValueError(f"versions name {named} tokens, and the action has {len(self.token_ids)} token_ids")
        return self

    @property
    def sampled_by(self) -> list[SampledBy]:
        """Who sampled which of its tokens, in their order; nobody, where that is not said."""
        if self.adapter is not None:
            return [SampledBy(adapter=self.adapter, tokens=len(self.token_ids))]
        return list(self.versions or ())


class Observation(SentModel):
    """Tokens that the policy read: what a tool, an environment or a user said, with the template's around it."""

    type: Literal["observation"]
    token_ids: SegmentTokens | None = None
    text: str | None = Field(None, min_length=1)
    """Tokenized as it is, once; control tokens in it are plain text."""
    messages: list[Message] | None = Field(None, min_length=1)
    """Turns as the chat template writes them behind an assistant's turn, with the generation prompt of the next. An
    action that was cut off gets its end token here, where it is not learnt. At a beginning: a whole conversation."""
    restarts: bool = False
    """The context begins anew here: nothing before it is read (an agent that sums its history up, or a template that
    rewrites it)."""

    json_rules: ClassVar[Rules] = (exactly_one("token_ids", "text", "messages"),)

    @model_validator(mode="after")
    def _one_form(self) -> Observation:
        if sum(form is not None for form in (self.token_ids, self.text, self.messages)) != 1:
            raise ValueError("give exactly one of token_ids, text, messages")
        check_asks(self.messages, "messages")
        return self


Segment: TypeAlias = Annotated[Action | Observation, Field(discriminator="type")]
_ACTS = contains(has(type="action"))


class Trajectory(SentModel):
    """Actions and observations in their order, with what they earned."""

    segments: list[Segment] = Field(min_length=1, max_length=MOST_SEGMENTS)
    reward: Reward | None = None
    """Of the whole: earned at the last turn. None: 0, beside rewards of turns."""
    truncated: bool = False
    """It was cut off: by a budget of turns or tokens, or because its last action hit max_tokens."""

    json_rules: ClassVar[Rules] = (has(segments=_ACTS),)

    @model_validator(mode="after")
    def _consistent(self) -> Trajectory:
        if not self.actions:
            raise ValueError("segments has no action: nothing would be learnt")
        recorded = {action.logprobs is not None for action in self.actions}
        if len(recorded) > 1:
            raise ValueError("every action has logprobs, or none: give those of the others, or leave them out")
        for index, segment in enumerate(self.segments[1:], 1):
            if not isinstance(segment, Observation) or segment.restarts:
                continue
            if any(message.role == "assistant" for message in segment.messages or ()):
                raise ValueError(
                    f"segments[{index}].messages has an assistant's turn: what the policy says is an action"
                )
        if isinstance(self.segments[-1], Observation):
            raise ValueError("the last segment is an observation that no action answers: leave it out")
        return self

    @property
    def actions(self) -> list[Action]:
        """The turns of the policy."""
        return [segment for segment in self.segments if isinstance(segment, Action)]

    @property
    def scored(self) -> bool:
        """It has a reward, of the whole or of a turn."""
        return self.reward is not None or any(action.reward is not None for action in self.actions)

    @property
    def turn_rewards(self) -> list[float]:
        """Reward of each action; the last one earns the whole's, too."""
        rewards = [action.reward or 0.0 for action in self.actions]
        rewards[-1] += self.reward or 0.0
        return rewards

    @property
    def begins_by_itself(self) -> bool:
        """It has its own prompt: its first segment is an observation."""
        return isinstance(self.segments[0], Observation)

    @property
    def opening(self) -> dict[str, Any]:
        """Its first observation, as fields of a prompt; none of a trajectory that has no prompt of its own."""
        first = self.segments[0]
        if isinstance(first, Action):
            return {}
        names = {"token_ids": "prompt_token_ids", "messages": "messages", "text": "prompt"}
        found = first.model_dump(mode="json", include=set(names), exclude_none=True)
        return {names[name]: value for name, value in found.items()}

    @property
    def restarts(self) -> bool:
        """Its context begins anew somewhere, so that it is several sequences."""
        return any(isinstance(segment, Observation) and segment.restarts for segment in self.segments[1:])
