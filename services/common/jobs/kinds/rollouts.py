"""Scored rollouts in a GRPO job: completions or trajectories with rewards, grouped by what began them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from services.common.errors import InvalidRequest
from services.common.jobs.base import JobBase
from services.common.jobs.documents import check_thinking, completion_tokens
from services.common.jobs.fields.messages import SAYS, check_asks
from services.common.jobs.fields.prompts import PromptFields
from services.common.jobs.fields.refs import FixedPolicy
from services.common.jobs.trajectories.credit import Credit
from services.common.jobs.trajectories.segments import Reward, Trajectory
from services.common.jobs.trajectories.stored import STORED, AnyTrajectory, StoredTrajectory
from services.common.validation.json_rules import (
    NULL,
    SOME,
    Rule,
    Rules,
    at_least_one,
    at_most_one,
    both,
    contains,
    either,
    exactly_one,
    given,
    has,
    if_any,
    items,
    left_out,
    only_with,
)
from services.common.validation.strict_models import SentModel, absent

if TYPE_CHECKING:
    from services.common.text.tokenizer import TextCodec

MOST_SAMPLERS = 64
"""Adapter versions that the rollouts of a job may name; each is looked up."""


_PROMPTS = ("prompt", "messages", "prompt_token_ids")
_PROMPTED = at_least_one(*_PROMPTS)
_SCORED = either(
    given("reward"), given("rewards"), has(segments=contains(given("reward"))), has(trace=contains(given("reward")))
)


def _begins_with(kind: str) -> Rule:
    return has(segments={"type": "array", "prefixItems": [has(type=kind)]})


class GrpoCompletion(SentModel):
    """One scored rollout: by completion_id, by token ids with their behaviour log-probabilities, or as text."""

    completion_id: str | None = None
    token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    logprobs: list[Annotated[float, Field(ge=-1e9, le=1e-3)]] | None = None
    """log softmax(logits / temperature) of each sampled token, as `sampling_logprobs` of a response gives it;
    never over 0 by more than rounding."""
    text: str | None = None
    """Accepted, tokenized again, and its behaviour log-probabilities recomputed: marked `recomputed`."""
    temperature: float = Field(1.0, ge=0, le=100)
    truncated: bool | None = Field(
        default_factory=lambda given: None if given.get("text") is not None else False, exclude_if=absent
    )
    """The completion hit max_tokens: it does not end its turn. Of a text, false says that it does: the end token was
    sampled and is learnt. null does not say, and only the text is learnt."""
    adapter: FixedPolicy | None = None
    """"name@n" that sampled it, several together ("a@3*0.7+b@1"), or "base"; a version must exist when the job is
    submitted."""
    reward: Reward

    json_rules: ClassVar[Rules] = (
        exactly_one("completion_id", "token_ids", "text"),
        if_any(token_ids=either(NULL, SOME)),
        only_with("logprobs", given("token_ids")),
    )

    @model_validator(mode="after")
    def _one_form(self) -> GrpoCompletion:
        forms = [self.completion_id is not None, self.token_ids is not None, self.text is not None]
        if sum(forms) != 1:
            raise ValueError("give exactly one of completion_id, token_ids, text")
        if self.token_ids is not None and not self.token_ids:
            raise ValueError("token_ids must not be empty")
        if self.logprobs is not None and (self.token_ids is None or len(self.logprobs) != len(self.token_ids)):
            raise ValueError("logprobs must have one entry per token id")
        return self


def _empty(value: object) -> bool:
    return value == []


class GrpoGroup(PromptFields):
    """Completions of one prompt, or trajectories of one task, compared with each other. completion_id rollouts bring
    their own prompt; trajectories of a group without one begin with an observation."""

    completions: list[GrpoCompletion] = Field(default_factory=list, exclude_if=_empty)
    trajectories: list[AnyTrajectory] | None = Field(None, min_length=1, exclude_if=absent)
    """Rollouts of several turns, in place of completions."""

    json_rules: ClassVar[Rules] = (
        at_most_one("prompt", "messages", "prompt_token_ids"),
        either(
            both(
                has(completions=SOME),
                left_out("trajectories"),
                either(_PROMPTED, has(completions=items(given("completion_id")))),
            ),
            both(
                has(trajectories=both(SOME, items(_SCORED))),
                if_any(completions={"maxItems": 0}),
                either(
                    both(
                        _PROMPTED,
                        has(trajectories=items(both(_begins_with("action"), left_out(*STORED)))),
                    ),
                    both(
                        left_out(*_PROMPTS),
                        has(trajectories=items(either(at_least_one(*STORED), _begins_with("observation")))),
                    ),
                ),
            ),
        ),
        if_any(prompt=SAYS, messages=SAYS),
        only_with("tools", both(left_out("prompt_token_ids"), at_least_one("prompt", "messages"))),
    )

    @model_validator(mode="after")
    def _prompt(self) -> GrpoGroup:
        forms = [getattr(self, name) is not None for name in _PROMPTS]
        if sum(forms) > 1:
            raise ValueError("give one of prompt, messages, prompt_token_ids")
        if bool(self.completions) == (self.trajectories is not None):
            raise ValueError("give completions or trajectories of the group, one of them")
        if self.completions and not any(forms) and not all(c.completion_id is not None for c in self.completions):
            raise ValueError("a group without a prompt needs completion_id in every completion")
        for index, trajectory in enumerate(self.trajectories or ()):
            if not trajectory.scored:
                raise ValueError(f"trajectories[{index}] has no reward: give it one, or one to its actions")
            if any(forms) and isinstance(trajectory, StoredTrajectory):
                raise ValueError(f"trajectories[{index}] brings its own prompt, and the group has one: leave that out")
            if isinstance(trajectory, StoredTrajectory):
                continue
            if any(forms) and trajectory.begins_by_itself:
                raise ValueError(
                    f"trajectories[{index}] begins with an observation, and the group has a prompt: leave one out"
                )
            if not any(forms) and not trajectory.begins_by_itself:
                raise ValueError(
                    f"trajectories[{index}] begins with an action: give the group a prompt, or an observation first"
                )
        if self.tools is not None and (self.prompt_token_ids is not None or not any(forms)):
            raise ValueError("tools are rendered with prompt or messages: token ids have them already")
        check_asks(self.prompt, "prompt")
        check_asks(self.messages, "messages")
        return self

    @property
    def played(self) -> list[Trajectory]:
        """The trajectories whose tokens are known; those that the engine remembers are not, until they are resolved."""
        return [one for one in self.trajectories or () if isinstance(one, Trajectory)]

    @property
    def has_prompt(self) -> bool:
        """The group says what began its members."""
        return any(getattr(self, name) is not None for name in _PROMPTS)

    @property
    def openings(self) -> list[dict[str, Any]]:
        """The prompt of the group, or of each trajectory that has its own, as fields of a prompt."""
        if self.has_prompt or self.trajectories is None:
            return [self.model_dump(mode="json", include={*_PROMPTS, "tools"}, exclude_none=True)]
        return [trajectory.opening for trajectory in self.played]

    @property
    def turn_rewards(self) -> list[list[float]]:
        """Rewards of the turns of each member; a completion is one turn."""
        if self.trajectories is not None:
            return [trajectory.turn_rewards for trajectory in self.played]
        return [[completion.reward] for completion in self.completions]

    @property
    def rewards(self) -> list[float]:
        """What each member earned altogether."""
        return [math.fsum(rewards) for rewards in self.turn_rewards]

    @property
    def truncated(self) -> list[bool]:
        """Whether each member was cut off, as far as is known."""
        return [bool(member.truncated) for member in self.played or self.completions]

    @property
    def samplers(self) -> list[tuple[str, str]]:
        """Who sampled a member, or a turn of it or a part of one, where that is said, after the field that says it."""
        named = [
            (f"completions[{index}].adapter", one.adapter)
            for index, one in enumerate(self.completions)
            if one.adapter is not None
        ]
        for index, trajectory in enumerate(self.played):
            for place, segment in enumerate(trajectory.segments):
                if segment.type != "action":
                    continue
                field = f"trajectories[{index}].segments[{place}]"
                for number, span in enumerate(segment.sampled_by):
                    where = "adapter" if segment.versions is None else f"versions[{number}].adapter"
                    named.append((f"{field}.{where}", span.adapter))
        return named


class ScoredCompletion(SentModel):
    """`{completion_id, reward}`: everything else is what the engine remembers."""

    completion_id: str
    reward: Reward


def group_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A group of the API from a row of a file, whose completions may be plain strings with `rewards`, `truncated` and
    `temperature` beside them, as in the simple form of a job.

    Raises:
        InvalidRequest: the lists beside the completions are not as long as they are.
    """
    group = dict(row)
    shared = {name: group.pop(name) for name in ("rewards", "truncated", "temperature") if name in group}
    if not shared:
        return group
    completions = group.get("completions")
    if not isinstance(completions, list):
        raise InvalidRequest("completions must be a list")
    members = [dict(one) if isinstance(one, dict) else {"text": one} for one in completions]
    for name, value in shared.items():
        values = [value] * len(members) if name == "temperature" else value
        if not isinstance(values, list) or len(values) != len(members):
            raise InvalidRequest(f"completions and {name} must be lists of the same length")
        for member, one in zip(members, values, strict=True):
            member["reward" if name == "rewards" else name] = one
    group["completions"] = members
    return group


def check_unmasked(groups: Sequence[GrpoGroup], credit: Credit, *, mask_truncated: bool) -> None:
    """Some group that has spread has a member to learn from.

    Raises:
        InvalidRequest: they are truncated, all of them.
    """
    differing = [group for group in groups if credit.spread(group.turn_rewards)]
    if mask_truncated and all(truncated for group in differing for truncated in group.truncated):
        raise InvalidRequest(
            f"nothing to learn: mask_truncated leaves out every completion of the {len(differing)} groups whose "
            "rewards differ; sample with a higher max_tokens, or set mask_truncated to false",
            param="mask_truncated",
        )


def check_spread(groups: Sequence[GrpoGroup], credit: Credit) -> None:
    """Some group has something to learn from.

    Raises:
        InvalidRequest: all rewards are equal in each of them.
    """
    if any(credit.spread(group.turn_rewards) for group in groups):
        return
    rewards = [reward for group in groups for reward in group.rewards]
    equal = f"differ by less than least_reward_std {credit.least_std:g}" if credit.least_std else "are equal"
    if credit.discount < 1:
        equal = f"discounted by {credit.discount:g} a turn {equal}"
    raise InvalidRequest(
        f"nothing to learn: in each of the {len(groups)} groups all rewards {equal} "
        f"(mean {math.fsum(rewards) / len(rewards):g}), so no completion is better than another; sample more "
        "completions, at a higher temperature, or score them more finely",
        param="rewards",
    )


def rollout_tokens(codec: TextCodec, spec: JobBase, prompt: Sequence[int], completion: GrpoCompletion) -> list[int]:
    """Sampled tokens of a scored completion; of a text, the end of its turn only where it is known to be.

    Raises:
        InvalidRequest: nothing was, or a text never leaves the thinking block that its prompt opens.
    """
    if completion.token_ids is not None:
        return completion.token_ids
    text = completion.text or ""
    # Of an empty completion that was not cut off the end is all there is.
    ends = completion.truncated is False or (completion.truncated is None and not text)
    tokens = completion_tokens(codec, text, ends=ends)
    if not tokens:
        raise InvalidRequest("has no tokens: an empty completion must not be truncated", param="completions")
    if spec.prompt_format == "chat" and not completion.truncated:
        check_thinking(codec, prompt, tokens)
    return tokens
