"""Settings that every service shares. Each service derives its one settings class from this; nothing else reads the
environment. Variables are `TEMPER_` + the field name in capitals."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class CommonSettings(BaseSettings):
    """Where the stores are and how to log."""

    model_config = SettingsConfigDict(env_prefix="TEMPER_", extra="ignore", frozen=True)

    redis_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    """Valkey or Redis, with AOF on. May contain a password, so it is never logged."""
    s3_endpoint: str = "127.0.0.1:9000"
    """host:port of MinIO or another S3 server with conditional writes."""
    s3_access_key: SecretStr = SecretStr("temper")
    s3_secret_key: SecretStr = SecretStr("temper-secret")
    s3_bucket: str = "temper"
    s3_region: str = "us-east-1"
    s3_secure: bool = False
    """True: https."""
    served_model_name: str = "qwen3.5"
    """What clients put in `model` for the base model."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    metrics_port: int = Field(0, ge=0, le=65535)
    """Prometheus port of a process that has no HTTP of its own; 0: off."""
