"""Training jobs as data: what a client submits, what the queue stores, what everybody reports. No torch, no Redis.

The same models validate a submission over HTTP, from the CLI and straight from Redis. Unknown fields are refused.
Text stays text here: only the trainer tokenizes (services/common/text renders and masks for both sides).
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from services.common.names import AdapterName


class StrictModel(BaseModel):
    """Refuses unknown fields, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class JobState(enum.StrEnum):
    """Where a job is. Terminal states never change again."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Message(StrictModel):
    """One chat turn, as the chat template takes it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class LoraSettings(StrictModel):
    """Shape of a new adapter. A job that continues one takes its shape: fields that are given must agree with it."""

    rank: int = Field(16, ge=1, le=256)
    alpha: float = Field(32.0, gt=0)
    use_rslora: bool = False
    target_modules: list[str] | None = None
    """None: every linear layer."""
    seed: int = Field(0, ge=0, lt=2**63)

    @model_serializer(mode="wrap")
    def _only_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # What was given explicitly must agree with a continued adapter, and must survive the queue's JSON as such.
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}


class OptimizerSettings(StrictModel):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-4, gt=0, le=1)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "cosine"] = "constant"
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class JobBase(StrictModel):
    """Fields of every training job."""

    adapter: AdapterName
    """The adapter that gets a new version."""
    start_from: str | None = None
    """"name" or "name@n" to continue from. Default: the adapter's own current version if it exists, else a new
    adapter. "base" starts afresh even if the adapter exists."""
    attach: bool = True
    """Attach the new version to the base model's name when the job succeeds."""
    lora: LoraSettings = LoraSettings()
    learning_rate: float | None = Field(None, gt=0, le=1)
    """Shorthand for optimizer.learning_rate."""
    optimizer: OptimizerSettings = OptimizerSettings()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """For prompts that are rendered with the chat template, e.g. {"enable_thinking": true}."""
    prompt_format: Literal["chat", "raw"] = "chat"
    """How a plain-string prompt is read: as one user message, or as text that is used as it is."""
    max_tokens_per_microbatch: int | None = Field(None, ge=1)
    """Short documents are packed up to this many tokens a forward and backward; a longer one is alone. Gradients do not
    depend on it; memory does, and how long a request may wait for a layer. None: 2048 on a GPU, 512 on a CPU."""
    gradient_checkpointing: bool = False
    checkpoint_every: int = Field(10, ge=1)
    """Optimizer steps between resumable checkpoints."""
    seed: int = Field(0, ge=0, lt=2**63)
    metadata: dict[str, str] = Field(default_factory=dict)

    @property
    def effective_learning_rate(self) -> float:
        return self.optimizer.learning_rate if self.learning_rate is None else self.learning_rate


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


JobSpec = Annotated[SftJob | GrpoJob, Field(discriminator="kind")]


class JobProgress(StrictModel):
    """How far a running job is."""

    step: int = 0
    total_steps: int = 0
    eta_seconds: float | None = None


class Job(StrictModel):
    """A job as everybody sees it (HTTP, CLI, Redis hash)."""

    id: str
    kind: Literal["sft", "grpo"]
    adapter: str
    state: JobState
    created_at: float
    """Unix seconds, like every time here."""
    started_at: float | None = None
    finished_at: float | None = None
    attempts: int = 0
    reason: str | None = None
    """Why it failed or was cancelled, in words for the user."""
    progress: JobProgress = JobProgress()
    cancel_requested: bool = False
    metrics: dict[str, float] = Field(default_factory=dict)
    """The newest of each metric."""
    result_adapter: str | None = None
    """"name@n" that the job published."""
    metadata: dict[str, str] = Field(default_factory=dict)


class JobEvent(StrictModel):
    """One entry of a job's replayable event stream. ``id`` is the Redis stream id (SSE Last-Event-ID)."""

    id: str
    kind: Literal["state", "progress", "checkpoint", "eval", "published", "log"]
    time: float
    data: dict[str, Any]
