"""Calls of a training session, and the request that opens one.

The same models validate a call in the gateway and in the engine, so that what is wrong with it is said before it has a
place in the session's line.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import not_
from typing import Annotated, ClassVar, Generic, Literal, TypeAlias, TypeVar, get_args

from pydantic import Field, TypeAdapter, model_validator

from services.common.adapters.names import AdapterName, AdapterRef
from services.common.errors import InvalidRequest
from services.common.jobs.base import Recompute
from services.common.jobs.fields.lora import LoraSettings
from services.common.jobs.training_sessions.data import Datum, DatumBase, TokenId
from services.common.jobs.training_sessions.names import CheckpointName
from services.common.validation.errors import contradiction
from services.common.validation.json_rules import (
    Rule,
    Rules,
    at_least_one,
    at_most_one,
    both,
    either,
    exactly_one,
    given,
    has,
    if_any,
    items,
    left_out,
    true_only_with,
)
from services.common.validation.strict_models import SentModel, absent

Loss: TypeAlias = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]
MAX_SEQ = 2**53 - 1
MAX_DATA = 4096
"""Data of one call; how many tokens they may have together is the engine's setting."""
MAX_SAMPLES = 1024
"""Completions of one call."""
_LOSS_FIELDS: dict[Loss, frozenset[str]] = {
    "cross_entropy": frozenset(),
    "importance_sampling": frozenset(),
    "ppo": frozenset({"clip_low", "clip_high"}),
    "cispo": frozenset({"floor", "cap"}),
    "dro": frozenset({"beta"}),
}
Seq = Annotated[int, Field(ge=1, le=MAX_SEQ)]


class OpenSession(SentModel):
    """POST /v1/train/sessions: a new adapter, a version to continue, or a checkpoint to take up again."""

    adapter: AdapterRef | None = None
    """"name" or "name@n" to start from; its shape is kept."""
    checkpoint: CheckpointName | None = None
    """Checkpoint of a session to start from: the adapter together with its optimizer."""
    fresh_optimizer: bool = Field(False, exclude_if=not_)
    """Leave the checkpoint's optimizer: its moments begin at 0, and steps are counted from 0."""
    lora: LoraSettings = LoraSettings()
    """Shape and seed of a new adapter. What is given must agree with an adapter or checkpoint to start from."""
    ttl_seconds: float | None = Field(None, gt=0)
    """Idle time after which the session is dropped; every call counts, and so does waiting for one. None: the engine's
    default."""
    max_tokens_per_microbatch: int | None = Field(None, ge=1)
    """Short data are packed up to this many tokens a forward and backward. None: 2048 on a GPU, 512 on a CPU."""
    recompute: Recompute = "none"
    """Amount that the backward computes again instead of keeping it: "none" is fastest, "selective" and "full" need
    less memory."""
    metadata: dict[str, Annotated[str, Field(max_length=512)]] = Field(default_factory=dict, max_length=16)

    json_rules: ClassVar[Rules] = (at_most_one("adapter", "checkpoint"),)

    @model_validator(mode="after")
    def _one_start(self) -> OpenSession:
        if self.adapter is not None and self.checkpoint is not None:
            raise contradiction("give adapter or checkpoint to start from, not both", "checkpoint")
        return self


class LossConfig(SentModel):
    """Settings of a loss; one that the chosen loss does not have is refused."""

    clip_low: float | None = Field(None, ge=0, le=1)
    """ppo: the ratio is clipped at 1 - clip_low. Default 0.2."""
    clip_high: float | None = Field(None, ge=0, le=1e6)
    """ppo: and at 1 + clip_high. Default 0.2."""
    cap: float | None = Field(None, gt=0, le=1e6)
    """cispo: the ratio's weight is at most this. Default 5."""
    floor: float | None = Field(None, ge=0, le=1e6, exclude_if=absent)
    """cispo: and at least this, which no cap may be below. Default 0."""
    beta: float | None = Field(None, ge=0, le=1e6, exclude_if=absent)
    """dro: weight of the squared distance to the policy that sampled. Default 0.1."""


class _Call(SentModel):
    seq: Seq
    """Place in the session's line, from 1. A repeated number with the same body is the same call."""


def _of_loss(loss: Loss) -> Rule:
    """Rule for a call with this loss: it has the loss's settings and no others, and advantages with the sampler's
    log-probabilities if the loss needs them."""
    config = left_out(*sorted(LossConfig.model_fields.keys() - _LOSS_FIELDS[loss]))
    if loss == "cross_entropy":  # the default, where there is one
        return if_any(loss=loss, loss_config=config, data=items(left_out("advantages", "logprobs")))
    datum = both(given("advantages"), at_least_one("logprobs", "trajectory"))
    return both(has(loss=loss, data=items(datum)), if_any(loss_config=config))


D = TypeVar("D", bound=DatumBase)


class LossCall(_Call, Generic[D]):
    """A loss over data of one form."""

    loss: Loss
    data: list[D] = Field(min_length=1, max_length=MAX_DATA)
    loss_config: LossConfig = LossConfig()
    temperature: float = Field(1.0, gt=0, le=100)
    """Log-probabilities are those of logits / temperature."""

    json_rules: ClassVar[Rules] = (either(*map(_of_loss, get_args(Loss))),)

    @model_validator(mode="after")
    def _of_this_loss(self) -> LossCall[D]:
        for name in sorted(self.loss_config.model_fields_set - _LOSS_FIELDS[self.loss]):
            if getattr(self.loss_config, name) is not None:
                known = ", ".join(sorted(_LOSS_FIELDS[self.loss])) or "none"
                raise contradiction(
                    f"the loss {self.loss} has no setting {name} (it has: {known})", f"loss_config.{name}"
                )
        sampled = self.loss != "cross_entropy"
        does = "needs" if sampled else "does not take"
        for index, datum in enumerate(self.data):
            if (field := datum.lacks(sampled=sampled)) is not None:
                raise contradiction(f"the loss {self.loss} {does} data[{index}].{field}", f"data[{index}].{field}")
        return self


class _Scoring(LossCall[Datum]):
    @property
    def num_tokens(self) -> int:
        return sum(len(datum.token_ids) for datum in self.data)

    @property
    def longest(self) -> int:
        """Tokens of the longest datum."""
        return max(len(datum.token_ids) for datum in self.data)


class ForwardBackward(_Scoring):
    """Adds the gradient of the loss to what has been accumulated since the last optim_step."""

    kind: Literal["forward_backward"] = "forward_backward"


class Forward(_Scoring):
    """Computes the loss as ForwardBackward does, without a gradient."""

    kind: Literal["forward"] = "forward"
    loss: Loss = "cross_entropy"


class OptimStep(_Call):
    """AdamW over the accumulated gradients, which are forgotten after it."""

    kind: Literal["optim_step"] = "optim_step"
    learning_rate: float | None = Field(None, ge=0, le=1)
    """None: by the model's width, 0.0001 at 4B (`Pace`). The result says what it was. 0
    moves the moments only: many schedules begin or end with it."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0, le=1)
    weight_decay: float = Field(0.0, ge=0, le=1e3)
    max_grad_norm: float | None = Field(None, gt=0)
    """None: gradients are not clipped."""


class Save(_Call):
    """Publishes the weights as a version of an adapter, or keeps weights and optimizer as a checkpoint."""

    kind: Literal["save"] = "save"
    name: AdapterName | None = None
    """The adapter that gets a new version."""
    attach: bool = False
    """Attach the version to the base model's name."""
    checkpoint: CheckpointName | None = None
    """Replaces a checkpoint of the same name."""

    json_rules: ClassVar[Rules] = (exactly_one("name", "checkpoint"), true_only_with("attach", given("name")))

    @model_validator(mode="after")
    def _one_form(self) -> Save:
        if (self.name is None) == (self.checkpoint is None):
            raise contradiction(
                "give exactly one of name (publishes a version) and checkpoint (keeps the optimizer)", "name"
            )
        if self.attach and self.name is None:
            raise contradiction("a checkpoint cannot be attached: give name to publish a version", "attach")
        return self


class Load(_Call):
    """Replaces the session's weights: by a version's, with a fresh optimizer, or by a checkpoint's with its optimizer.
    Accumulated gradients are forgotten."""

    kind: Literal["load"] = "load"
    adapter: AdapterRef | None = None
    checkpoint: CheckpointName | None = None
    fresh_optimizer: bool = Field(False, exclude_if=not_)
    """Leave the checkpoint's optimizer, as in OpenSession."""

    json_rules: ClassVar[Rules] = (exactly_one("adapter", "checkpoint"),)

    @model_validator(mode="after")
    def _one_form(self) -> Load:
        if (self.adapter is None) == (self.checkpoint is None):
            raise contradiction("give exactly one of adapter and checkpoint", "adapter")
        return self


class Sample(_Call):
    """Completions of the session's weights as they are now, by the engine: batched, behind users' requests."""

    kind: Literal["sample"] = "sample"
    prompts: list[Annotated[str, Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1)]] = Field(
        min_length=1, max_length=MAX_DATA
    )
    """Token ids, or text."""
    prompt_format: Literal["chat", "raw"] = "raw"
    """Reading of a text: as it is, or as one user message."""
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    """Completions a prompt."""
    max_tokens: int = Field(ge=1, lt=2**31)
    temperature: float = Field(1.0, ge=0, le=100)
    """0 is greedy."""
    seed: int = Field(0, ge=0, lt=2**63)
    """The same weights, prompts and seed give the same tokens."""
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=64)
    """Besides the model's own end tokens."""

    @model_validator(mode="after")
    def _bounded(self) -> Sample:
        if len(self.prompts) * self.n > MAX_SAMPLES:
            raise contradiction(
                f"{len(self.prompts)} prompts with {self.n} completions each are over the limit of {MAX_SAMPLES} a "
                "call: split it",
                "prompts",
            )
        return self


class Refused(_Call):
    """A call that was refused before it came here, by a client's protocol that has given it its number already: its
    place in the line must not stay empty. It fails with the reason."""

    kind: Literal["refused"] = "refused"
    reason: str = Field(min_length=1, max_length=4096)
    param: str | None = Field(None, max_length=256)
    gradient: bool = False
    """It was a forward_backward: what was accumulated before it is dropped, as if it had failed."""


Call: TypeAlias = ForwardBackward | Forward | OptimStep | Sample | Save | Load | Refused
CALL: TypeAdapter[Call] = TypeAdapter(Annotated[Call, Field(discriminator="kind")])
"""Parses and validates a call of any kind."""


def check_tokens(call: Call, *, vocab_size: int, max_train_tokens: int, max_call_tokens: int) -> None:
    """Checks a call against the engine's limits. A limit of 0 is not known here and is left to the engine.

    Raises:
        InvalidRequest: a token id outside the vocabulary, a datum or the call too long.
    """
    if isinstance(call, Sample):
        _check_vocabulary("stop_token_ids", call.stop_token_ids, vocab_size)
        for index, prompt in enumerate(call.prompts):
            _check_vocabulary(f"prompts[{index}]", () if isinstance(prompt, str) else prompt, vocab_size)
        return
    if not isinstance(call, ForwardBackward | Forward):
        return
    for index, datum in enumerate(call.data):
        if max_train_tokens and len(datum.token_ids) > max_train_tokens:
            raise InvalidRequest(
                f"data[{index}] has {len(datum.token_ids)} tokens and the limit for training is {max_train_tokens} "
                "(TEMPER_MAX_TRAIN_TOKENS): shorten it",
                param=f"data[{index}].token_ids",
            )
        _check_vocabulary(f"data[{index}].token_ids", datum.token_ids, vocab_size)
        _check_vocabulary(f"data[{index}].targets", datum.targets or (), vocab_size)
    if max_call_tokens and call.num_tokens > max_call_tokens:
        raise InvalidRequest(
            f"the call has {call.num_tokens} tokens and one call may have {max_call_tokens} "
            "(TEMPER_SESSION_CALL_TOKENS): split it, gradients accumulate over calls",
            param="data",
        )


def _check_vocabulary(field: str, tokens: Sequence[int], vocab_size: int) -> None:
    if vocab_size and tokens and (highest := max(tokens)) >= vocab_size:
        raise InvalidRequest(
            f"{field} has the token id {highest}, and the vocabulary ends at {vocab_size - 1}", param=field
        )
