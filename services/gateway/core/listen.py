"""Where a gateway listens: apart from its other settings, so that a probe every few seconds starts quickly."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ListenSettings(BaseSettings):
    """Environment: `TEMPER_` + the field name in capitals."""

    model_config = SettingsConfigDict(env_prefix="TEMPER_", extra="ignore", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(8420, ge=0, le=65535)
    """On Kubernetes a service called "temper" sets TEMPER_PORT to a URL, so the pod needs enableServiceLinks: false."""
