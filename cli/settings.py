"""Settings of the CLI from the environment. Options on the command line win over it."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class CliSettings(BaseSettings):
    """Environment: `TEMPER_` + the field name in capitals."""

    model_config = SettingsConfigDict(env_prefix="TEMPER_", extra="ignore", frozen=True)

    url: str = "http://localhost:8420"
    """The gateway that the client commands talk to."""
    api_key: SecretStr | None = None
    """Sent as a bearer token, if set: a key of a gateway that has keys."""
    request_timeout: float = Field(60.0, gt=0)
    """Seconds that a request which is not streamed may take."""


class UpSettings(BaseSettings):
    """Settings that `temper up` takes from the environment: stores to use instead of its own, and the patience to
    stop."""

    model_config = SettingsConfigDict(env_prefix="TEMPER_", extra="ignore", frozen=True)

    redis_url: SecretStr | None = None
    """An external Redis or Valkey (turn its AOF on); unset: `temper up` starts Valkey."""
    s3_endpoint: str | None = None
    """host:port of an external S3 server with conditional writes; unset: `temper up` starts SeaweedFS."""
    s3_access_key: SecretStr | None = None
    """Required with s3_endpoint."""
    s3_secret_key: SecretStr | None = None
    """Required with s3_endpoint."""
    api_keys_file: str = ""
    """The gateway's; given on to it as an absolute path."""
    audit_log_file: str = ""
    """The same."""
    cache_dir: Path = Path("~/.cache/temper")
    """The engine's; looked at before anything is started."""
    drain_seconds: float = Field(10.0, ge=0)
    """After a stop signal, how long the engine lets running requests finish."""
    shutdown_grace_seconds: int = Field(10, ge=0)
    """After a stop signal, how long the gateway lets running responses go on."""


class ModelDigest(BaseSettings):
    """The digest that an installation expects of its model."""

    model_config = SettingsConfigDict(env_prefix="TEMPER_", extra="ignore", frozen=True)

    model_digest: str = ""
    """The model source's; empty: any checkpoint will do."""


def inherited_environment() -> dict[str, str]:
    """The environment that child processes start from."""
    return dict(os.environ)
