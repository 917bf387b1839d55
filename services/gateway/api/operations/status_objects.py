"""Answers of /v1/status and /v1/requests."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from services.common.pb import engine_pb2
from services.common.queue.depth import QueueDepth


class _Described(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class GatewayObject(_Described):
    """The gateway that answers."""

    id: str
    """New for each process: totals of two answers with different ids do not belong together."""
    version: str
    started_at: float
    """Seconds since 1970."""
    ready: bool
    in_flight: int
    """Completions (choices) in the gateway."""
    max_in_flight: int
    background_responses: int


class ModelFacts(_Described):
    """The model that all engines serve."""

    id: str
    name: str
    digest: str
    device: str
    dtype: str
    parameters: int
    max_model_len: int
    max_train_tokens: int
    max_lora_rank: int
    teacher: bool
    """Whether there is a second checkpoint that jobs may distil from."""

    @classmethod
    def of(cls, served_name: str, info: engine_pb2.Model) -> ModelFacts:
        """Facts of a model as an engine tells them."""
        return cls(
            id=served_name,
            name=info.name,
            digest=info.digest,
            device=info.device,
            dtype=info.dtype,
            parameters=info.parameters,
            max_model_len=info.max_model_len,
            max_train_tokens=info.max_train_tokens,
            max_lora_rank=info.max_lora_rank,
            teacher=bool(info.teacher),
        )


class Blocks(_Described):
    """Use of a pool."""

    used: int
    """Held by requests that have not ended."""
    cached: int
    """Held by the prefix cache alone: given up when they are needed."""
    total: int


class TokenTotals(_Described):
    """Tokens of an engine since its start."""

    decode: int
    """Tokens of answers."""
    prefill: int
    """Prompt tokens that were computed."""
    prompt: int
    """Prompt tokens of the requests that have ended: computed, or from the cache."""


class EngineObject(_Described):
    """One engine."""

    id: str
    name: str
    ready: bool
    breaker: str
    """"closed", "half_open", or "open": it fails, and gets no requests for a while."""
    error: str | None
    """Why nothing is known of it; null: it answers."""
    instance: str | None
    """New for each of its processes; null: it does not train."""
    draining: bool
    running: int
    waiting: int
    max_waiting: int
    kv_blocks: Blocks
    state_slots: Blocks
    memory_plan: dict[str, int]
    """Bytes of the device's memory by purpose; "free" is what the plan leaves of its budget."""
    tokens: TokenTotals
    cache_hit_tokens: dict[str, int]
    """Prompt tokens that came from the prefix cache, by where they were: "device", "host", "disk", "store"."""
    job_id: str | None
    """The training job that runs there."""
    loaded_adapters: list[str]
    attached_adapter: str | None
    training_sessions: int


class QueueObject(_Described):
    """A queue of jobs."""

    queued: int
    running: int
    dead: int
    """Dead letters: what the queue gave up on."""
    oldest_queued_seconds: float

    @classmethod
    def of(cls, depth: QueueDepth) -> QueueObject:
        return cls(
            queued=depth.queued,
            running=depth.running,
            dead=depth.dead,
            oldest_queued_seconds=depth.oldest_queued_seconds,
        )


class Distribution(_Described):
    """Measured times, in seconds."""

    bounds: list[float]
    """Upper bounds of the buckets but the last one, which has none; empty: nothing was measured."""
    counts: list[int]
    """Values in each bucket, one more than bounds."""
    sum: float


class StatusObject(_Described):
    """What Temper does now, and what it has done."""

    object: Literal["status"] = "status"
    time: float
    """Seconds since 1970, when this was said."""
    gateway: GatewayObject
    model: ModelFacts | None
    """null: no engine has been reached yet."""
    engines: list[EngineObject]
    queues: dict[str, QueueObject]
    """"training" and "batches"; empty while Redis does not answer."""
    tokens: dict[str, int]
    """Tokens of completions: "prompt", "cached" of those, "completion"."""
    first_token: Distribution
    """From a request to its first token."""
    between_tokens: Distribution
    """Between two tokens of an answer."""


class LiveRequestObject(_Described):
    """A request that has not ended."""

    id: str
    """Of the completion."""
    object: Literal["request"] = "request"
    engine: str
    phase: str
    """"loading" (its adapter), "waiting", "prefill" or "decode"."""
    key_id: str | None
    adapter: str | None
    """Version that answers; null: the base, or the policy that a job samples from."""
    rollout: bool
    """Whether a job asked for it."""
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    """Of the prompt, cached ones too."""
    output_tokens: int
    age_seconds: float
    priority: int

    @classmethod
    def of(cls, live: engine_pb2.LiveRequest, engine: str, phase: str) -> LiveRequestObject:
        """Object of a request that an engine has."""
        return cls(
            id=live.request_id,
            engine=engine,
            phase=phase,
            key_id=live.owner or None,
            adapter=live.adapter or None,
            rollout=live.background,
            prompt_tokens=live.prompt_tokens,
            cached_tokens=live.cached_tokens,
            computed_tokens=live.computed_tokens,
            output_tokens=live.output_tokens,
            age_seconds=live.age_ms / 1000,
            priority=live.priority,
        )


class RequestList(_Described):
    """Requests that have not ended."""

    object: Literal["list"] = "list"
    data: list[LiveRequestObject]
    total: int
    """Number of them, also beyond the limit."""
    unreachable: list[str]
    """Engines that did not say what they have."""
