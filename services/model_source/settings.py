"""What `python -m services.model_source` is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from services.common.settings import CommonSettings

UNCHECKED = "unchecked"


class ModelSourceSettings(CommonSettings):
    """Environment: `TEMPER_` + the field name in capitals."""

    model: Path
    """Where the checkpoint is to be: the engine's TEMPER_MODEL."""
    model_source: str
    """s3://bucket/prefix, or hf://organisation/name, with @revision if it is not main."""
    model_digest: str
    """What `python -m services.model_source --digest DIR` prints for a good copy: 64 hexadecimal digits. "unchecked":
    any checkpoint will do."""
    model_s3_endpoint: str = ""
    """Address of the server that has the checkpoint; empty: s3_endpoint. The same for the following four."""
    model_s3_access_key: SecretStr | None = None
    model_s3_secret_key: SecretStr | None = None
    """Both keys set and empty: the bucket is public, and nothing is signed."""
    model_s3_credentials: Literal["keys", "chain"] | None = None
    """keys or chain, as s3_credentials; unset: the same as that."""
    model_s3_region: str = ""
    model_s3_secure: bool | None = None
    hf_endpoint: str = "https://huggingface.co"
    """The hub or a mirror of it."""
    hf_token: SecretStr = SecretStr("")
    """Token for checkpoints that the hub does not give to everybody."""
    model_connections: int = Field(4, ge=1, le=32)
    """Files fetched at a time."""
    model_timeout_seconds: float = Field(30.0, gt=0)
    """Silence after which a connection is given up and asked for again, from where it stopped."""
    model_attempts: int = Field(6, ge=1)
    """Attempts in a row without a single new byte, after which the source counts as away."""

    @field_validator("model_digest")
    @classmethod
    def _digest(cls, value: str) -> str:
        value = value.strip().lower().removeprefix("sha256:")
        if value != UNCHECKED and not re.fullmatch("[0-9a-f]{64}", value):
            raise ValueError(
                "must be the 64 hexadecimal digits that `python -m services.model_source --digest DIR` prints for a "
                f'good copy, or "{UNCHECKED}" to take what the source has'
            )
        return value

    @field_validator("hf_endpoint")
    @classmethod
    def _http(cls, value: str) -> str:
        if not re.fullmatch(r"https?://[^/\s]+(/[^\s]*)?", value):
            raise ValueError("must be a URL like https://huggingface.co")
        return value.rstrip("/")
