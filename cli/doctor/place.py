"""Where `temper doctor` looks: settings, model, data directory, stores and server, each read once."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from cli.doctor.findings import NotHere
from cli.local.external_tool import run_tool
from cli.output import CliError, Output
from cli.settings import BadSettings, CliSettings, S, UpSettings, inherited_environment, read
from services.common.errors import TemperError
from services.common.settings import CommonSettings
from services.common.storage.redis import connect, unavailable

if TYPE_CHECKING:
    from services.engine.settings import EngineSettings

CARD_MODULE = "services.card_check"


class CardBroken(NotHere):
    """The process that has torch did not say why it ended."""


@dataclass
class Place:
    """What is examined. What cannot be had is NotHere, with the reason."""

    model: Path
    data_dir: Path = Path(".temper")
    url: str | None = None
    """The server to ask; None: the usual one, if it runs."""
    host: str = "127.0.0.1"
    port: int = 8420
    """Where a gateway is to listen."""
    output: Output = field(default_factory=lambda: Output(as_json=False))

    @cached_property
    def engine(self) -> EngineSettings:
        # Imported here: it takes longer than all quick checks.
        from services.engine.settings import EngineSettings

        return _read(EngineSettings)

    @cached_property
    def up(self) -> UpSettings:
        return _read(UpSettings)

    @cached_property
    def client(self) -> CliSettings:
        return _read(CliSettings)

    @cached_property
    def state(self) -> dict[str, Any] | None:
        """What `temper up` says of itself in the data directory; None: nothing."""
        return _document(self.data_dir / "state.json")

    @cached_property
    def redis_settings(self) -> CommonSettings:
        """Settings of the Redis that is named, or that `temper up` runs now."""
        if self.up.redis_url is not None:
            return self.engine
        ports, secrets = self._local("redis", "Valkey")
        url = f"redis://:{secrets['redis_password']}@127.0.0.1:{ports['redis']}/0"
        return CommonSettings.model_validate({"redis_url": url})

    @cached_property
    def s3_settings(self) -> CommonSettings:
        """Settings of the object store that is named, or that `temper up` runs now."""
        if self.up.s3_endpoint is not None:
            return self.engine
        ports, secrets = self._local("s3", "SeaweedFS")
        keys = {"s3_access_key": secrets["s3_access_key"], "s3_secret_key": secrets["s3_secret_key"]}
        return CommonSettings.model_validate({"s3_endpoint": f"127.0.0.1:{ports['s3']}", "s3_secure": False, **keys})

    @cached_property
    def redis(self) -> redis.Redis:
        """A connection that has answered once.

        Raises:
            Unavailable: it does not answer.
        """
        settings = self.redis_settings
        try:
            client = connect(settings)
            client.ping()
        except (redis.RedisError, OSError) as error:
            raise unavailable(error) from error
        return client

    @cached_property
    def redis_info(self) -> dict[str, Any]:
        """INFO of the server; NotHere if it does not answer."""
        try:
            info: Any = self.redis.info()
        except (TemperError, redis.RedisError, ValueError) as error:
            raise NotHere("Redis does not answer") from error
        return dict(info)

    @property
    def card(self) -> dict[str, dict[str, Any]]:
        """Findings of the process that has torch, by check.

        Raises:
            CardBroken: it ended without a word.
        """
        if isinstance(self._card, NotHere):
            raise self._card
        return self._card

    @cached_property
    def _card(self) -> dict[str, dict[str, Any]] | NotHere:
        env = {"TEMPER_LOG_LEVEL": "warning"} | inherited_environment() | {"TEMPER_MODEL": str(self.model.absolute())}
        try:
            found: dict[str, dict[str, Any]] = run_tool(self.output, [], module=CARD_MODULE, env=env)["findings"]
        except CliError as error:
            kind = NotHere if error.error else CardBroken
            return kind(f"torch and card cannot be looked at: {error.message}")
        return found

    def _local(self, part: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Ports and credentials of the stores of a running `temper up`."""
        secrets = _document(self.data_dir / "secrets.json")
        if self.state is None or secrets is None or part not in self.state.get("ports", {}):
            raise NotHere(f"no `temper up` runs in {self.data_dir}, which would start its own {name}")
        return self.state["ports"], secrets


def _read(settings: type[S]) -> S:
    try:
        return read(settings)
    except BadSettings as error:
        raise NotHere("the settings cannot be read") from error


def _document(file: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(file.read_text())
        return found if isinstance(found, dict) else None
    return None
