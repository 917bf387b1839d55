"""Everything that can be set on a gateway."""

from __future__ import annotations

from pydantic import Field

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
    shutdown_grace_seconds: int = Field(30, ge=0)
    """How long running responses may go on after SIGTERM."""

    @property
    def engine_addresses(self) -> tuple[str, ...]:
        """The engines, each once, in the order given."""
        return tuple(dict.fromkeys(part.strip() for part in self.engines.split(",") if part.strip()))
