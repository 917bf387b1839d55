"""Settings of the CLI: of the command line, the environment, temper.toml, and for clients a saved context, in this
order."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from services.common.errors import InvalidRequest
from services.common.settings import (
    CONFIG_VARIABLE,
    FileSettings,
    check_destinations,
    config_file,
    found_file,
    read_config_file,
    refused,
)
from services.common.validation.settings import wrong_settings

S = TypeVar("S", bound=BaseSettings)


class BadSettings(InvalidRequest):
    """A variable, the file of settings or the saved contexts cannot be used."""


def read(settings: type[S]) -> S:
    """Settings of a class.

    Raises:
        BadSettings: with the names of the variables.
    """
    try:
        return settings()
    except ValidationError as error:
        raise BadSettings("; ".join(wrong_settings(error))) from error


class Context(BaseModel):
    """A server that client commands may talk to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    api_key: str | None = Field(None, repr=False)


class Contexts(BaseModel):
    """Saved servers by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    current: str | None = None
    """Name of the one that is used; None: none is."""
    contexts: Mapping[str, Context] = {}


def contexts_file() -> Path:
    """File of the saved contexts, in the user's directory of configuration."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "temper" / "contexts.json"


def read_contexts() -> Contexts:
    """The saved contexts; none if there is no file.

    Raises:
        ValueError: the file cannot be read; with its name and the reason.
    """
    file = contexts_file()
    try:
        return Contexts.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file} has no contexts: correct it or remove it") from error


class _SavedContext(PydanticBaseSettingsSource):
    """URL and key of the context in use, where nothing else says the URL: a key goes to its own server only."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        del field  # asked for by the class above; all values come at once
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        if "url" in self.current_state:
            return {}
        try:
            saved = read_contexts()
        except ValueError as error:
            raise refused("context", error) from error
        name = self.current_state.get("context") or saved.current
        if name is None:
            return {}
        if name not in saved.contexts:
            known = ", ".join(saved.contexts) or "none"
            raise refused("context", ValueError(f"there is no context {name!r}: `temper context list` has {known}"))
        return {"context": name, **saved.contexts[name].model_dump(exclude_none=True)}


class CliSettings(FileSettings):
    """Environment: `TEMPER_` + the field name in capitals."""

    sent_to: ClassVar[Mapping[str, Sequence[str]]] = {}
    """None: where the key goes is seen when it is used (key_for), for a command line may name another server."""
    url: str = "http://localhost:8420"
    """The gateway that the client commands talk to."""
    api_key: SecretStr | None = None
    """Sent as a bearer token, if set: a key of a gateway that has keys."""
    context: str = ""
    """A server that `temper context add` saved, used where nothing says a URL; empty: that of `temper context use`."""
    request_timeout: float = Field(60.0, gt=0)
    """Seconds that a request which is not streamed may take."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **named: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        before = super().settings_customise_sources(settings_cls, *sources, **named)
        return (*before, _SavedContext(settings_cls))

    def key_for(self, url: str | None) -> str:
        """API key for a server; empty: none. A context's key is for its own URL.

        Args:
            url: named on the command line; None: that of the settings.

        Raises:
            BadSettings: the working directory has a file that names the server, and the key is from elsewhere: whoever
                can write there, an agent at work, would be sent it.
        """
        key = "" if self.api_key is None else self.api_key.get_secret_value()
        if url is None and key and (file := found_file()) is not None and _decides_url(file, key):
            raise BadSettings(
                f"the API key is not sent to the url of {file}, which nobody named: name the server by --url or "
                "TEMPER_URL, or the file by TEMPER_CONFIG"
            )
        if url is None or not self.context or url.rstrip("/") == self.url.rstrip("/"):
            return key
        saved = read_contexts().contexts.get(self.context)
        return "" if saved is not None and saved.api_key == key else key


def _decides_url(file: Path, key: str) -> bool:
    """Whether a file of settings names the server, but not the key for it."""
    lines = read_config_file(file)
    named = any(name.upper() == "TEMPER_URL" for name in os.environ)
    return "url" in lines and not named and lines.get("api_key") != key


class UpSettings(FileSettings):
    """Settings that `temper up` takes from the environment: stores to use instead of its own, and the patience to
    stop."""

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
    model_digest: str = "unchecked"
    """Digest that a model of the hub or of an object store must have; "unchecked": any."""
    model_s3_endpoint: str = ""
    """host:port of the S3 server that has the model of --model s3://…; empty: s3_endpoint."""
    drain_seconds: float = Field(10.0, ge=0)
    """After a stop signal, how long the engine lets running requests finish."""
    shutdown_grace_seconds: int = Field(10, ge=0)
    """After a stop signal, how long the gateway lets running responses go on."""
    torch_threads: int = Field(0, ge=0)
    """The engine's; 0: all cores, of which several engines on a CPU have equal shares."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """The engine's; of several (`--engines`) each has the next one."""
    health_port: int = Field(0, ge=0, le=65535)
    """The same."""
    kv_events: str = ""
    """The same, where it listens (tcp://*:5557)."""
    kv_events_replay: str = ""
    """The same."""


def inherited_environment() -> dict[str, str]:
    """The environment that child processes start from, wherever they work: the file of settings is named in full.

    Raises:
        BadSettings: nobody named that file, and it says where secrets go.
    """
    file = config_file()
    if file is not None and file == found_file():
        try:
            check_destinations(file, read_config_file(file))
        except ValidationError as error:
            raise BadSettings("; ".join(wrong_settings(error))) from error
        except ValueError as error:
            raise BadSettings(str(error)) from error
    return dict(os.environ) if file is None else os.environ | {CONFIG_VARIABLE: str(file)}
