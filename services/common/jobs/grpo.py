"""Group-relative policy optimisation: its request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from services.common.jobs.base import JobBase, Message, StrictModel

Reward = Annotated[float, Field(ge=-1e9, le=1e9)]
"""Bounded, so that statistics over rewards stay finite."""


class GrpoCompletion(StrictModel):
    """One scored rollout: by completion_id, by token ids with their behaviour log-probabilities, or as text."""

    completion_id: str | None = None
    token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    logprobs: list[Annotated[float, Field(le=1e-3)]] | None = None
    """log softmax(logits / temperature) of each sampled token, as `sampling_logprobs` of a response gives it;
    never over 0 by more than rounding."""
    text: str | None = None
    """Accepted, tokenized again, and its behaviour log-probabilities recomputed: marked `recomputed`."""
    temperature: float = Field(1.0, ge=0, le=100)
    truncated: bool = False
    """The completion hit max_tokens: it does not end its turn."""
    adapter: str | None = None
    """"name@n" that sampled it."""
    reward: Reward

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


class GrpoGroup(StrictModel):
    """Completions of one prompt, compared with each other. completion_id rollouts bring their own prompt."""

    prompt: str | list[Message] | None = None
    messages: list[Message] | None = None
    prompt_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    tools: list[dict[str, Any]] | None = None
    """Function definitions, rendered by the chat template; not with prompt_token_ids."""
    completions: list[GrpoCompletion] = Field(min_length=1)

    @model_validator(mode="after")
    def _prompt(self) -> GrpoGroup:
        forms = [self.prompt is not None, self.messages is not None, self.prompt_token_ids is not None]
        by_id = [c.completion_id is not None for c in self.completions]
        if sum(forms) > 1:
            raise ValueError("give one of prompt, messages, prompt_token_ids")
        if not any(forms) and not all(by_id):
            raise ValueError("a group without a prompt needs completion_id in every completion")
        if self.prompt_token_ids is not None and self.tools is not None:
            raise ValueError("tools are part of prompt_token_ids already")
        return self


class ScoredCompletion(StrictModel):
    """`{completion_id, reward}`: everything else is what the engine remembers."""

    completion_id: str
    reward: Reward


class GrpoJob(JobBase):
    """Group-relative policy optimisation on scored rollouts.

    Three ways to give the rollouts, which may not be mixed: `prompt` + `completions` + `rewards` (one group),
    `groups`, or `rollouts` of completion ids (grouped by equal prompt).
    """

    kind: Literal["grpo"] = "grpo"
    prompt: str | list[Message] | None = None
    completions: list[str] | None = None
    rewards: list[Reward] | None = None
    groups: list[GrpoGroup] | None = None
    rollouts: list[ScoredCompletion] | None = None
    epochs: int = Field(1, ge=1, le=100)
    """Passes over the rollouts."""
    groups_per_step: int | None = Field(None, ge=1)
    """Groups an optimizer step; None: all of them."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.28, ge=0)
    beta: float = Field(0.0, ge=0)
    """Weight of the k3 KL to the base model without adapter."""
    scale_rewards: bool = True
    """Divide the advantage by the group's standard deviation."""

    @model_validator(mode="after")
    def _one_form(self) -> GrpoJob:
        forms = [
            any(part is not None for part in (self.prompt, self.completions, self.rewards)),
            self.groups is not None,
            self.rollouts is not None,
        ]
        if sum(forms) != 1:
            raise ValueError("give exactly one of prompt+completions+rewards, groups, rollouts")
        if forms[0]:
            if self.prompt is None or self.completions is None or self.rewards is None:
                raise ValueError("prompt, completions and rewards go together")
            if not self.completions:
                raise ValueError("completions must not be empty")
            if len(self.completions) != len(self.rewards):
                raise ValueError(
                    f"completions has {len(self.completions)} entries and rewards {len(self.rewards)}: one reward each"
                )
        if self.groups is not None and not self.groups:
            raise ValueError("groups must not be empty")
        if self.rollouts is not None and not self.rollouts:
            raise ValueError("rollouts must not be empty")
        return self

    @property
    def completion_ids(self) -> list[str]:
        """The completion ids to resolve. The gateway replaces them by groups of `prompt_token_ids` and completions of
        `token_ids`, `logprobs`, `temperature`, `truncated` and `adapter` before the job enters the queue."""
        listed = [scored.completion_id for scored in self.rollouts or ()]
        grouped = [rollout.completion_id for group in self.groups or () for rollout in group.completions]
        return listed + [found for found in grouped if found is not None]
