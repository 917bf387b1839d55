"""Everything that can be set on a gateway."""

from __future__ import annotations

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

    @property
    def engine_addresses(self) -> tuple[str, ...]:
        """The engines, each once, in the order given."""
        return tuple(dict.fromkeys(part.strip() for part in self.engines.split(",") if part.strip()))
