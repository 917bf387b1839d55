"""Settings of the trainer thread. Variables are `TEMPER_` + the field name in capitals."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from services.common.jobs.scorers.allowed_webhooks import webhook_parts
from services.common.settings import CommonSettings


class TrainerSettings(CommonSettings):
    """Settings of the trainer: how jobs are claimed, kept alive and made resumable."""

    trainer_name: str | None = None
    """Name of this process in the consumer group; None: host, process id and a random part."""
    job_reclaim_seconds: float = Field(30.0, gt=0)
    """Silence after which a job's owner counts as dead and another trainer takes the job over."""
    job_heartbeat_seconds: float = Field(1.0, gt=0)
    """Between two signs of life; also how soon a cancellation is noticed. Keep well below job_reclaim_seconds."""
    job_max_attempts: int = Field(3, ge=1)
    """Attempts after which a job is a dead letter, from the last on that left a checkpoint, answers or a stage."""
    checkpoint_dir: Path = Path(".temper/checkpoints")
    """Directory where checkpoints wait while the object store is away."""
    checkpoints_kept: int = Field(2, ge=1)
    """Newest checkpoints that stay in the object store while a job runs."""
    forge_dir: Path = Path(".temper/forge")
    """Directory of what forge jobs have made so far, up to some copies of the model; on a volume that survives a
    restart they go on where they were."""
    forge_key_file: Path | None = None
    """Ed25519 private key (PEM) that records of forge jobs are signed with; unset: they are not signed."""
    receipt_key_file: Path | None = None
    """Ed25519 private key (PEM) that receipts of training jobs are signed with; unset: they are not signed."""
    trainer_jobs_a_step: int = Field(32, ge=1)
    """Small sft jobs of different adapters that take their optimizer steps together, in one forward and backward; 1:
    one job runs after another."""
    trainer_tokens_a_step: int = Field(0, ge=0)
    """Tokens that the steps of jobs taken together may read in all. A job whose own step reads more runs alone.
    0: 16,384 on a GPU, 1,024 on a CPU, where more are no faster together."""
    trainer_drain_seconds: float = Field(20.0, gt=0)
    """Time for which a draining trainer tries to hand its job back in order."""
    rollout_sequences: int = Field(64, ge=1)
    """Rollouts of a job that are in the engine at once, at most max_num_seqs. Users' requests go before them."""
    rollout_timeout_seconds: float = Field(1800.0, gt=0)
    """Time that one round's rollouts may take beside users' requests; then the job is tried again."""
    reward_webhooks: str = ""
    """URL prefixes to which jobs may send their samples to be scored, separated by commas; without a scheme: https."""
    reward_webhook_secret: SecretStr | None = Field(None, min_length=16)
    """Signs the requests to webhooks (HMAC-SHA256); without it there are none."""
    reward_webhook_timeout_seconds: float = Field(30.0, gt=0)
    """Timeout of one request to a webhook."""
    reward_webhook_attempts: int = Field(4, ge=1)
    """Attempts of one request to a webhook that cannot be reached or answers with 429 or 5xx."""
    target_keys: SecretStr = SecretStr("")
    """API keys of other servers that evaluations compare with: url-prefix=key, separated by commas. A key is sent below
    its prefix only, for every job whose target is there."""
    sandbox: Literal["off", "namespaces", "landlock"] = "off"
    """Isolation of programs that scorers run (docs/decisions/sandbox.md): namespaces of their own, or where those are
    denied Landlock, which is weaker. off: none are run. What does not work here keeps the engine from starting."""
    sandbox_programs: int = Field(2, ge=1)
    """Programs that run at once."""
    adapter_sync_seconds: float = Field(30.0, gt=0)
    """Time for which a finished job waits until the engine beside it serves the new version."""
    adapter_versions_kept: int | None = Field(None, ge=1)
    """After each publish, versions of the adapter beyond this many newest ones are removed, unless
    TEMPER_ADAPTER_DAYS_KEPT, a pointer or an unfinished job keeps them; unset: all stay."""
    adapter_days_kept: float | None = Field(None, ge=0)
    """After each publish, versions of the adapter older than this are removed, unless TEMPER_ADAPTER_VERSIONS_KEPT, a
    pointer or an unfinished job keeps them; unset: all stay."""

    # Training sessions.
    sessions_max: int = Field(4, ge=0)
    """Training sessions open at once in this engine; 0: none."""
    session_ttl_seconds: float = Field(900.0, gt=0)
    """Idle time after which a session is dropped, where it does not say so itself."""
    session_ttl_max_seconds: float = Field(86400.0, gt=0)
    """The longest idle time that a session may ask for."""
    session_call_tokens: int = Field(65536, ge=2)
    """Most tokens of one call of a session."""
    session_pending_calls: int = Field(64, ge=1)
    """Calls of one session that may wait for those before them."""
    session_gap_seconds: float = Field(30.0, gt=0)
    """Time for which a call waits for an earlier one that never comes."""
    session_results: int = Field(256, ge=1)
    """Newest results of a session that are kept for polling."""
    session_result_seconds: float = Field(900.0, gt=0)
    """Time for which a result is kept."""

    @field_validator("reward_webhooks")
    @classmethod
    def _are_urls(cls, value: str) -> str:
        for entry in _prefixes(value):
            try:
                webhook_parts(entry)
            except ValueError as error:
                raise ValueError(f"{entry!r}: {error}") from error
        return value

    @field_validator("target_keys")
    @classmethod
    def _are_keys(cls, value: SecretStr) -> SecretStr:
        for place, (prefix, key) in enumerate(_keys(value), start=1):
            try:
                webhook_parts(prefix)
            except ValueError as error:
                raise ValueError(f"entry {place}: begins with no URL prefix: {error}") from error
            if not key or not key.isascii() or any(character.isspace() for character in key):
                raise ValueError(f"entry {place}: has no key behind {prefix}= that a header can carry")
        return value

    @property
    def keys_by_prefix(self) -> dict[str, str]:
        """The entries of target_keys."""
        return dict(_keys(self.target_keys))

    @property
    def webhook_prefixes(self) -> tuple[str, ...]:
        """The entries of reward_webhooks, each with its scheme."""
        return _prefixes(self.reward_webhooks)


def _keys(value: SecretStr) -> list[tuple[str, str]]:
    entries = (part.strip().partition("=") for part in value.get_secret_value().split(",") if part.strip())
    return [(prefix, key) for prefix, _, key in entries]


def _prefixes(value: str) -> tuple[str, ...]:
    entries = (part.strip() for part in value.split(","))
    return tuple(entry if "://" in entry else f"https://{entry}" for entry in entries if entry)
