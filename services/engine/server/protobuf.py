"""Conversion between protobuf messages and the engine's own types."""

from __future__ import annotations

import json
import time

from services.common.adapters.composition import Composition, Member
from services.common.adapters.names import check_adapter_name
from services.common.errors import InvalidRequest
from services.common.pb import engine_pb2 as pb
from services.common.telemetry import tracing
from services.common.telemetry.recent_logs import LEVELS, MOST_LINES, LogLine, LogQuery
from services.engine.loop.rollout_buffer import Rollout
from services.engine.observability.status import LiveRequest, Phase
from services.engine.requests.adapter import AdapterChoice
from services.engine.requests.conversation_session import SessionName, check_session
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.prompt_scoring import PromptScores
from services.engine.requests.request import FinishReason, Pooling
from services.engine.requests.sampling_params import Constraint, ConstraintKind, SamplingParams, Thinking
from services.engine.requests.submission import Submission
from services.engine.server.errors import to_message

FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}

_PHASES = {
    Phase.LOADING: pb.REQUEST_PHASE_LOADING,
    Phase.WAITING: pb.REQUEST_PHASE_WAITING,
    Phase.PREFILL: pb.REQUEST_PHASE_PREFILL,
    Phase.DECODE: pb.REQUEST_PHASE_DECODE,
}

_POOLINGS = {pb.POOLING_UNSPECIFIED: None, pb.POOLING_LAST: Pooling.LAST, pb.POOLING_MEAN: Pooling.MEAN}

_MAX_REQUEST_ID = 256


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
        constraint=constraint(message.constraint) if message.HasField("constraint") else None,
        thinking=thinking(message.thinking) if message.HasField("thinking") else None,
    )


def constraint(message: pb.Constraint) -> Constraint:
    """Reads the constraint; the compiler checks whether it can be compiled.

    Raises:
        InvalidRequest: it has no kind that this engine knows.
    """
    param = message.param or "constraint"
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest(f"{param}: the constraint is of no kind that this engine knows", param=param)
    source = message.choices.texts if kind == "choices" else (getattr(message, kind),)
    return Constraint(ConstraintKind(kind), tuple(source), param)


def thinking(message: pb.Thinking) -> Thinking:
    """Reads the reasoning that the output begins in.

    Raises:
        InvalidRequest: the closing tokens do not close it.
    """
    budget = message.budget if message.HasField("budget") else None
    call = message.call_token_id if message.HasField("call_token_id") else None
    return Thinking(message.end_token_id, budget, tuple(message.closing_token_ids), call)


def submission(message: pb.GenerateRequest, vocab_size: int) -> Submission:
    """Reads a request. The loop checks whether it fits the context; a matcher, if it needs one, is added later.

    Raises:
        InvalidRequest: a value is out of range; ``param`` names it.
    """
    sampling = sampling_params(message.sampling)
    _check_ids(message, sampling, vocab_size)
    return Submission(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling,
        adapter=adapter_choice(message),
        deadline=monotonic_deadline(message),
        cache_salt=message.cache_salt,
        priority=message.priority,
        keep_rollout=message.keep_rollout,
        owner=message.owner,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        prompt_logprobs_from=message.prompt_logprobs_from,
        pooling=_pooling(message),
        traceparent=tracing.checked(message.traceparent),
        session=session_name(message.session) if message.HasField("session") else None,
        boundaries=tuple(message.boundaries),
    )


def session_name(message: pb.SessionRef) -> SessionName:
    """Reads the name of a conversation session.

    Raises:
        InvalidRequest: no session can have this name.
    """
    name = SessionName(message.owner, message.name)
    check_session(name)
    return name


def _pooling(message: pb.GenerateRequest) -> Pooling | None:
    if message.pooling not in _POOLINGS:
        raise InvalidRequest(f"pooling has no value {message.pooling}", param="pooling")
    return _POOLINGS[message.pooling]


def _check_ids(message: pb.GenerateRequest, sampling: SamplingParams, vocab_size: int) -> None:
    if not message.request_id or len(message.request_id) > _MAX_REQUEST_ID:
        raise InvalidRequest(f"request_id must have 1 to {_MAX_REQUEST_ID} characters", param="request_id")
    prompt = message.prompt_token_ids
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if max(prompt) >= vocab_size:
        raise InvalidRequest(f"prompt token id {max(prompt)} is outside the vocabulary of {vocab_size}", param="prompt")
    reasoning = sampling.thinking
    closing = () if reasoning is None else reasoning.closing
    call = () if reasoning is None or reasoning.call_token_id is None else (reasoning.call_token_id,)
    for name, ids in (
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
        ("thinking", (*closing, *call)),
    ):
        wrong = [token for token in ids if token >= vocab_size]
        if wrong:
            raise InvalidRequest(f"{name}: token id {wrong[0]} is outside the vocabulary of {vocab_size}", param=name)


def adapter_choice(message: pb.GenerateRequest) -> AdapterChoice:
    """Reads the adapter reference; without one the request gets the attached version.

    Raises:
        InvalidRequest: a name is malformed, or a scale out of range.
    """
    kind = message.adapter.WhichOneof("ref")
    if kind == "named":
        named = message.adapter.named
        return AdapterChoice(name=check_adapter_name(named.name), version=named.version or None)
    if kind == "composition":
        given = message.adapter.composition.members
        members = (Member(one.adapter.name, one.adapter.version or None, one.scale) for one in given)
        return AdapterChoice.of(Composition.of(members))
    return AdapterChoice(attached=kind != "base")


def monotonic_deadline(message: pb.GenerateRequest) -> float | None:
    """Deadline on this process's monotonic clock, seconds. What is left counts: clocks of machines may be apart."""
    if message.timeout_ms:
        return time.monotonic() + message.timeout_ms / 1000
    if message.deadline_unix_ms <= 0:
        return None
    return time.monotonic() + message.deadline_unix_ms / 1000 - time.time()


def update_message(update: SequenceUpdate) -> pb.Update:
    """Update of a request as a protobuf message."""
    token = update.token
    first = update.adapter is not None or update.cached_tokens is not None
    if token is not None and token.logprob is None and update.finish_reason is None and not first:
        # Most updates; one call is several times cheaper than setting fields one by one.
        return pb.Update(
            request_id=update.request_id, token_ids=(token.token_id,), sampling_logprobs=(token.sampling_logprob,)
        )
    message = pb.Update(request_id=update.request_id)
    if token is not None:
        message.token_ids.append(token.token_id)
        message.sampling_logprobs.append(token.sampling_logprob)
        if token.logprob is not None:
            message.logprobs.append(token.logprob)
            message.top_logprobs.add(token_ids=token.top_ids, logprobs=token.top_logprobs)
    if update.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[update.finish_reason]
    if update.error is not None:
        message.error.CopyFrom(to_message(update.error))
    if update.cached_tokens is not None:
        message.cached_tokens = update.cached_tokens
    if update.adapter is not None:
        message.adapter = update.adapter
    if update.prompt is not None:
        message.prompt_logprobs.CopyFrom(_prompt_logprobs(update.prompt))
    if update.embedding is not None:
        message.embedding.extend(update.embedding.tolist())
    if update.kept:
        message.kept = True
    return message


def _prompt_logprobs(scores: PromptScores) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(
        logprobs=scores.logprobs.tolist(),
        ranks=scores.ranks.tolist(),
        top_token_ids=scores.top_ids.reshape(-1).tolist(),
        top_logprobs=scores.top_logprobs.reshape(-1).tolist(),
    )


def rollout_message(rollout: Rollout) -> pb.Rollout:
    """Rollout as a protobuf message."""
    return pb.Rollout(
        completion_id=rollout.completion_id,
        prompt_token_ids=rollout.prompt_token_ids,
        token_ids=rollout.token_ids,
        sampling_logprobs=rollout.sampling_logprobs,
        temperature=rollout.temperature,
        adapter=rollout.adapter,
        finish_reason=FINISH_REASONS[rollout.finish_reason],
        owner=rollout.owner,
        session=rollout.session,
        ended_at=rollout.ended_at,
    )


def live_request_message(live: LiveRequest) -> pb.LiveRequest:
    return pb.LiveRequest(
        request_id=live.request_id,
        owner=live.owner,
        phase=_PHASES[live.phase],
        adapter=live.adapter,
        prompt_tokens=live.prompt_tokens,
        cached_tokens=live.cached_tokens,
        computed_tokens=live.computed_tokens,
        output_tokens=live.output_tokens,
        age_ms=int(live.age_seconds * 1000),
        priority=live.priority,
        background=live.background,
    )


def log_query(message: pb.GetLogsRequest) -> LogQuery:
    """Query of lines of the log.

    Raises:
        InvalidRequest: no such level, or a limit out of its range.
    """
    level = next((level for level in LEVELS if level == (message.level or LEVELS[0])), None)
    if level is None or not 1 <= message.limit <= MOST_LINES:
        raise InvalidRequest(f"a level is one of {', '.join(LEVELS)}, and a limit is of 1 to {MOST_LINES} lines")
    return LogQuery(level, message.text, frozenset(message.request_ids), message.since, message.limit)


def log_line_message(line: LogLine) -> pb.LogLine:
    return pb.LogLine(
        number=line.number,
        time=line.time,
        level=line.level,
        logger=line.logger,
        message=line.message,
        fields=json.dumps(line.fields),
        exception=line.exception,
    )
