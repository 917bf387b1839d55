"""Protobuf messages to the engine's own types and back."""

from __future__ import annotations

import time
from dataclasses import dataclass

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.common.names import check_adapter_name
from services.common.pb import engine_pb2 as pb
from services.engine.request import FinishReason, SamplingParams

FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the engine can take."""

    vocab_size: int
    max_model_len: int
    max_request_id: int = 256


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Reads sampling parameters; fields whose zero is no value (top_p, repetition_penalty, max_tokens) default.

    Raises:
        InvalidRequest: a value is out of range.
    """
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else None,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=dict(message.logit_bias),
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        max_tokens=message.max_tokens,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
    )


def check_request(message: pb.GenerateRequest, sampling: SamplingParams, limits: Limits) -> None:
    """Refuses what can never be served.

    Raises:
        InvalidRequest: an id is empty, too long or outside the vocabulary.
        ContextLengthExceeded: prompt and max_tokens do not fit the context.
    """
    if not message.request_id or len(message.request_id) > limits.max_request_id:
        raise InvalidRequest(f"request_id must have 1 to {limits.max_request_id} characters", param="request_id")
    prompt = message.prompt_token_ids
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if max(prompt) >= limits.vocab_size:
        raise InvalidRequest(
            f"prompt token id {max(prompt)} is outside the vocabulary of {limits.vocab_size}", param="prompt"
        )
    for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        wrong = [token for token in ids if token >= limits.vocab_size]
        if wrong:
            raise InvalidRequest(
                f"{name}: token id {wrong[0]} is outside the vocabulary of {limits.vocab_size}", param=name
            )
    if len(prompt) + sampling.max_tokens > limits.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}: together over the context "
            f"of {limits.max_model_len} tokens; shorten the prompt or lower max_tokens",
            param="prompt" if len(prompt) >= limits.max_model_len else "max_tokens",
        )


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """What a request asked for: attached, base (name is None) or a name with or without a version."""

    attached: bool = False
    name: str | None = None
    version: int | None = None
    """None: the current one."""


def adapter_choice(message: pb.GenerateRequest) -> AdapterChoice:
    """Reads the adapter reference; without one the request takes what is attached.

    Raises:
        InvalidRequest: the name is malformed.
    """
    kind = message.adapter.WhichOneof("ref")
    if kind == "named":
        named = message.adapter.named
        return AdapterChoice(name=check_adapter_name(named.name), version=named.version or None)
    return AdapterChoice(attached=kind != "base")


def monotonic_deadline(message: pb.GenerateRequest) -> float | None:
    """The deadline on this process's monotonic clock, seconds."""
    if message.deadline_unix_ms <= 0:
        return None
    return time.monotonic() + message.deadline_unix_ms / 1000 - time.time()
