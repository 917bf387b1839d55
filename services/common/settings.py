"""Settings that every service shares. Each service derives its one settings class from this; nothing else reads the
environment. Variables are `TEMPER_` + the field name in capitals; what no variable says may stand in one file,
temper.toml, under the field's name."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from services.common.validation.settings import variable_named

CONFIG_VARIABLE = "TEMPER_CONFIG"
CONFIG_NAME = "temper.toml"
S3_KEYS = ("s3_access_key", "s3_secret_key")
MODEL_KEYS = ("model_s3_access_key", "model_s3_secret_key")
SENT_TO = {
    "s3_endpoint": S3_KEYS,
    "model_s3_endpoint": (*MODEL_KEYS, *S3_KEYS),
    "hf_endpoint": ("hf_token",),
    "otlp_endpoint": ("otlp_headers",),
    "reward_webhooks": ("reward_webhook_secret",),
    "webhook_urls": ("webhook_secret",),
    "webhook_allow": ("webhook_secret",),
    **dict.fromkeys(("https_proxy", "http_proxy"), (*S3_KEYS, *MODEL_KEYS, "hf_token", "otlp_headers")),
}
"""Settings that name servers, with the secrets that these are sent, or see the use of. (A Redis URL has its own.)"""


def config_file() -> Path | None:
    """File of settings: the one that TEMPER_CONFIG names, else temper.toml in the working directory; None: neither."""
    named = os.environ.get(CONFIG_VARIABLE)
    return Path(named).expanduser().absolute() if named else found_file()


def found_file() -> Path | None:
    """File of settings that is used because it lies in the working directory; None: there is none, or one is named."""
    found = Path(CONFIG_NAME).absolute()
    return found if not os.environ.get(CONFIG_VARIABLE) and os.path.lexists(found) else None


def read_config_file(file: Path) -> dict[str, Any]:
    """Settings of a file, by the names of their fields.

    Raises:
        ValueError: the file cannot be read; with its name and the reason.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not TOML: {error}") from error


def check_destinations(file: Path, lines: Mapping[str, Any], sent_to: Mapping[str, Sequence[str]] = SENT_TO) -> None:
    """Refuses a file that lies in the working directory, and that nobody named, where it says which server a secret of
    the environment goes to: an agent at work may have written it, or whoever wrote what was cloned.

    Raises:
        ValidationError: with the setting, the secret and the way out.
    """
    variables = {name.upper(): value for name, value in os.environ.items()}
    for address, secrets in sent_to.items():
        variable = variable_named(address)
        if not lines.get(address) or variable in variables:
            continue
        for secret in secrets:
            given = variables.get(variable_named(secret))
            if given and given != lines.get(secret):
                reason = f"{variable_named(secret)} is not sent where {file} says, which nobody named"
                raise refused(address, ValueError(f"{reason}: name it by {CONFIG_VARIABLE}, or set {variable}"))


def refused(setting: str, error: ValueError) -> ValidationError:
    """Error of a source, told as one of a setting's value."""
    return ValidationError.from_exception_data(
        "settings", [{"type": "value_error", "loc": (setting,), "input": None, "ctx": {"error": error}}]
    )


class _ConfigFile(InitSettingsSource):
    """The file as a source. Unlike pydantic-settings' own for TOML it does not pass over a named file that is missing,
    and tells the file's faults as those of a variable are told."""

    def __init__(self, settings: type[FileSettings], file: Path) -> None:
        try:
            found = read_config_file(file)
        except ValueError as error:
            raise refused("config", error) from error
        if file == found_file():
            check_destinations(file, found, settings.sent_to)
        super().__init__(settings, found)


class FileSettings(BaseSettings):
    """Settings of arguments, else of variables, else of the file, else their defaults."""

    model_config = SettingsConfigDict(env_prefix="TEMPER_", extra="ignore", frozen=True)
    sent_to: ClassVar[Mapping[str, Sequence[str]]] = SENT_TO
    """What check_destinations looks at before a file that nobody named is read."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del settings_cls  # cls, of which more is known here
        file = config_file()
        given = (init_settings, env_settings, dotenv_settings, file_secret_settings)
        if file is None:
            return given
        return (*given, _ConfigFile(cls, file))


class CommonSettings(FileSettings):
    """Settings of every service: stores and logs."""

    redis_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    """Valkey or Redis, with AOF on: redis://, rediss:// (TLS), or, for the primary that Sentinels know under a name,
    redis+sentinel://:password@host:26379,host:26379/name/0 (rediss+sentinel:// with TLS). May contain a password, so
    it is never logged."""
    s3_endpoint: str = "127.0.0.1:9000"
    """host:port of MinIO or another S3 server with conditional writes."""
    s3_access_key: SecretStr = SecretStr("temper")
    s3_secret_key: SecretStr = SecretStr("temper-secret")
    s3_credentials: Literal["keys", "chain"] = "keys"
    """keys: the two above. chain: the identity of the process, as AWS gives it: web identity
    (AWS_WEB_IDENTITY_TOKEN_FILE, AWS_ROLE_ARN), a container's credentials (EKS Pod Identity, ECS), or the role of the
    instance."""
    web_identity: str = Field("", validation_alias="aws_web_identity_token_file")
    """File of the token that the chain shows to AWS' token service; who gives pods an identity sets it, too."""
    s3_bucket: str = "temper"
    s3_region: str = "us-east-1"
    s3_secure: bool = False
    """True: https."""
    ca_bundle: Path | None = None
    """PEM file of authorities that are trusted beside the public ones, by all that leaves the process: Redis, S3, the
    hub, webhooks, the collector."""
    https_proxy: SecretStr = Field(SecretStr(""), validation_alias="https_proxy")
    """Proxy for https (http://host:port) to S3, hub and collector. Empty: none. Webhooks never go through one."""
    http_proxy: SecretStr = Field(SecretStr(""), validation_alias="http_proxy")
    """The same for http."""
    no_proxy: str = Field("", validation_alias="no_proxy")
    """Hosts and domains that are reached without a proxy, separated by commas; *: all."""
    jobs_ttl_seconds: int = Field(30 * 86400, ge=1)
    """Time for which a job and a batch stay visible once they have ended, with the results of message batches; their
    events for a week of that at most. The same for gateways and engines."""
    served_model_name: str = "qwen3.5"
    """Name that clients put in `model` for the base model."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    log_lines: int = Field(2000, ge=0, le=100_000)
    """Last lines of its log that a process keeps in memory, for `GET /v1/logs`; 0: none."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Prometheus port of a process that has no HTTP of its own; 0: off."""
    metrics_host: str = "127.0.0.1"
    """Address that it listens on; there is no authentication. 0.0.0.0: all interfaces."""
    otlp_endpoint: str = Field("", pattern=r"^(https?://[^/\s]+)?$")
    """Collector of traces, OTLP over gRPC: http://collector:4317, or https:// for TLS. Empty: nothing is traced."""
    otlp_headers: SecretStr = SecretStr("")
    """Sent to the collector with every export: name=value, separated by commas."""
    trace_ratio: float = Field(1.0, ge=0, le=1)
    """Share of the traces that begin here and are kept; who calls with a traceparent decides for its own."""
    grpc_tls_cert: Path | None = None
    """PEM file: this service's certificate for gRPC between gateway and engine, intermediates behind it. With it both
    sides demand each other's. Set all three files or none; they are read again when they change."""
    grpc_tls_key: Path | None = None
    """PEM file: the key of grpc_tls_cert, without a password."""
    grpc_tls_ca: Path | None = None
    """PEM file: the CA that signed the certificates of both sides."""

    @field_validator("grpc_tls_cert", "grpc_tls_key", "grpc_tls_ca", "ca_bundle", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return None if value == "" else value

    @model_validator(mode="after")
    def _tls_is_whole(self) -> CommonSettings:
        files = {name: getattr(self, name) for name in ("grpc_tls_cert", "grpc_tls_key", "grpc_tls_ca")}
        missing = [f"TEMPER_{name.upper()}" for name, path in files.items() if path is None]
        if 0 < len(missing) < len(files):
            raise ValueError(f"TLS needs all three files, and {' and '.join(missing)} is not set: set it, or none")
        return self
