"""Everything that can be set on a gateway."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from services.common.settings import CommonSettings


class GatewaySettings(CommonSettings):
    """Environment: `TEMPER_` + the field name in capitals."""

    host: str = "127.0.0.1"
    port: int = Field(8420, ge=0, le=65535)
    """On Kubernetes a service called "temper" sets TEMPER_PORT to a URL, so the pod needs enableServiceLinks: false."""
    engines: str = "127.0.0.1:50051"
    """host:port of every engine, separated by commas."""
    max_body_bytes: int = Field(32 * 2**20, ge=1024)
    """Largest JSON body; more is answered with 413."""
    max_upload_bytes: int = Field(2 * 2**30, ge=1024)
    """Largest adapter upload."""
    max_in_flight: int = Field(1024, ge=1)
    """Completions (choices) in the gateway at a time; more are answered with 503 and Retry-After."""
    max_choices: int = Field(128, ge=1)
    """Largest `n`, and most choices of one request (prompts x n)."""
    max_inputs: int = Field(2048, ge=1)
    """Texts of one request for embeddings or scores; as many as `max_choices` are read at a time."""
    max_prompt_logprobs: int = Field(2**17, ge=1)
    """Log-probabilities of prompt tokens that one answer may have: tokens x (1 + alternatives)."""
    default_max_tokens: int = Field(4096, ge=1)
    """Tokens a chat may generate when the request sets no limit and the context leaves room."""
    request_timeout_seconds: float = Field(600.0, gt=0)
    """Longest life of a completion, queueing included."""
    engine_retry_seconds: float = Field(20.0, ge=0)
    """How long a request that has no token yet waits for another engine, or for this one to come back."""
    status_interval_seconds: float = Field(1.0, gt=0)
    """Pause between two GetStatus calls to an engine."""
    sync_timeout_seconds: float = Field(10.0, gt=0)
    """How long an attach, detach or upload waits for the engines to serve it."""
    validate_timeout_seconds: float = Field(120.0, gt=0)
    """How long an engine may take to check an uploaded adapter."""
    keep_alive_seconds: float = Field(15.0, gt=0)
    """Pause after which a silent event stream gets a comment line, so that proxies keep it open."""
    offload_chars: int = Field(16384, ge=0)
    """Longer prompts are rendered and tokenized in a thread, not on the event loop."""
    max_schema_bytes: int = Field(65536, ge=64)
    """Largest JSON schema that constrains an answer, in bytes of JSON."""
    max_schema_depth: int = Field(32, ge=1)
    """Deepest nesting of objects and lists in a JSON schema."""
    max_schema_properties: int = Field(1000, ge=1)
    """Most properties in a JSON schema, all its objects together."""
    max_regex_chars: int = Field(4096, ge=1)
    """Longest regular expression that constrains an answer, a schema's patterns included."""
    max_grammar_bytes: int = Field(262144, ge=64)
    """Largest grammar that constrains an answer, that of tool calls included; also all texts of a choice together."""
    max_constraint_choices: int = Field(1024, ge=1)
    """Most texts that an answer may be chosen from."""
    reasoning_budget_minimal: int = Field(512, ge=0)
    """Tokens of thinking under reasoning_effort "minimal"."""
    reasoning_budget_low: int = Field(2048, ge=0)
    """Tokens of thinking under reasoning_effort "low"."""
    reasoning_budget_medium: int = Field(8192, ge=0)
    """Tokens of thinking under reasoning_effort "medium"."""
    reasoning_budget_high: int = Field(24576, ge=0)
    """Tokens of thinking under reasoning_effort "high"."""
    reasoning_budget_xhigh: int = Field(81920, ge=0)
    """Tokens of thinking under reasoning_effort "xhigh"."""
    reasoning_closing: str = (
        "Considering the limited time by the user, I have to give the solution based on the thinking directly now."
    )
    """What the model's thinking ends with when its budget is used up, a paragraph of its own before the closing tag.
    The words are Qwen's: its models have learnt to answer after them. Empty: the tag alone."""
    max_file_bytes: int = Field(200 * 2**20, ge=1024)
    """Largest file of /v1/files."""
    batch_workers: int = Field(2, ge=0, le=64)
    """Batches that this gateway runs at a time; 0: it runs none, and other gateways do."""
    batch_concurrency: int = Field(32, ge=1, le=4096)
    """Requests of batches that this gateway runs at a time."""
    batch_priority: int = Field(100, ge=-(2**31), lt=2**31)
    """Of a batch's request that sets none. Users' requests have 0, and lower is served first."""
    batch_max_requests: int = Field(50_000, ge=1)
    """Lines of a batch's input file."""
    batch_heartbeat_seconds: float = Field(2.0, gt=0)
    """How often a gateway says that it is still at a batch, and asks whether to cancel it."""
    batch_reclaim_seconds: float = Field(30.0, gt=0)
    """Silence after which a batch's gateway counts as dead and another goes on; several heartbeats."""
    batch_max_attempts: int = Field(3, ge=1)
    """Deaths of gateways within a batch, without a result in between, after which it fails."""
    shutdown_grace_seconds: int = Field(30, ge=0)
    """How long running responses may go on after SIGTERM."""
    responses_ttl_seconds: int = Field(7 * 86400, ge=1)
    """How long a response of /v1/responses is kept in Redis for previous_response_id and GET."""
    response_max_bytes: int = Field(4 * 2**20, ge=1024)
    """Largest response that is kept, with everything it was given, in bytes of JSON."""
    responses_max_bytes: int = Field(256 * 2**20, ge=0)
    """Of all kept responses together; the oldest make room for new ones. Redis holds the jobs, too. 0: none is kept."""
    max_background_responses: int = Field(64, ge=0)
    """Background responses that one gateway runs at a time; more are answered with 503. 0: none."""
    response_beat_seconds: float = Field(1.0, gt=0)
    """Pause between two signs of life of background responses; a cancelled one ends within it."""
    response_lease_seconds: float = Field(30.0, gt=0, validate_default=True)
    """Silence after which a background response counts as lost together with its gateway, and as failed."""

    @field_validator("batch_reclaim_seconds")
    @classmethod
    def _outlives_heartbeats(cls, seconds: float, info: ValidationInfo) -> float:
        heartbeat = info.data.get("batch_heartbeat_seconds")
        if heartbeat is not None and seconds < 2 * heartbeat:
            raise ValueError(f"must be at least two heartbeats (TEMPER_BATCH_HEARTBEAT_SECONDS is {heartbeat})")
        return seconds

    @field_validator("response_lease_seconds")
    @classmethod
    def _outlives_beats(cls, lease: float, info: ValidationInfo) -> float:
        beat = info.data.get("response_beat_seconds", 0.0)
        if lease < 3 * beat:
            raise ValueError(
                f"it is {lease:g}, less than three times TEMPER_RESPONSE_BEAT_SECONDS ({beat:g}): one late beat would "
                "lose a response"
            )
        return lease

    def reasoning_budget(self, effort: Literal["minimal", "low", "medium", "high", "xhigh"]) -> int:
        """Tokens of thinking under a reasoning_effort."""
        return {
            "minimal": self.reasoning_budget_minimal,
            "low": self.reasoning_budget_low,
            "medium": self.reasoning_budget_medium,
            "high": self.reasoning_budget_high,
            "xhigh": self.reasoning_budget_xhigh,
        }[effort]

    @property
    def engine_addresses(self) -> tuple[str, ...]:
        """The engines, each once, in the order given."""
        return tuple(dict.fromkeys(part.strip() for part in self.engines.split(",") if part.strip()))
