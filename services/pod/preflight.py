"""Preflight checks of a pod: settings, port, Redis, object store, model directory. Errors are one line.

No torch here, so a mistyped address is reported at once.
"""

from __future__ import annotations

import os
import socket
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import redis
import structlog
from pydantic import ValidationError

from services.common.errors import CheckpointRejected, InvalidRequest, Refused, Unavailable
from services.common.security.tls import Certificates, TlsFiles
from services.common.storage.object_store import ObjectStore
from services.common.storage.redis import client_of
from services.common.validation.settings import wrong_settings
from services.engine.settings import EngineSettings
from services.trainer.settings import TrainerSettings

_REDIS_SECONDS = 3.0
_PAUSE_SECONDS = 1.0
_SAY_SECONDS = 10.0
"""Seconds between two log lines while waiting for a server."""

log = structlog.get_logger(__name__)


def read_settings() -> tuple[EngineSettings, TrainerSettings]:
    """Reads the settings of engine and trainer from the environment.

    Raises:
        InvalidRequest: one of them is malformed; the message names the variables.
    """
    try:
        return EngineSettings(), TrainerSettings()
    except ValidationError as error:
        raise InvalidRequest("; ".join(wrong_settings(error))) from error


def check_all(settings: EngineSettings) -> None:
    """Runs all checks that are possible before torch is imported and the model is loaded.

    Raises:
        TemperError: the first check that fails, in one line.
    """
    check_model_directory(settings)
    check_port(settings)
    deadline = time.monotonic() + settings.startup_wait_seconds
    _wait_for(lambda: check_redis(settings), "Redis", settings, deadline)
    _wait_for(lambda: check_store(settings), "the object store", settings, deadline)


def _wait_for(check: Callable[[], None], what: str, settings: EngineSettings, deadline: float) -> None:
    """Repeats a check while its server is away, until the deadline: on a first install everything starts at once, and
    an engine that crashes meanwhile would wait ever longer for its next start. A refusal by the server fails at
    once."""
    said = float("-inf")
    began = time.monotonic()
    while True:
        try:
            check()
        except Refused:
            raise
        except Unavailable as error:
            now = time.monotonic()
            if now >= deadline:
                if settings.startup_wait_seconds:
                    raise Unavailable(
                        f"{error.message} (waited {now - began:.0f} s, TEMPER_STARTUP_WAIT_SECONDS is "
                        f"{settings.startup_wait_seconds:g})"
                    ) from error
                raise
            if now - said >= _SAY_SECONDS:
                said = now
                log.warning(f"waiting for {what}", reason=error.message, seconds_left=round(deadline - now))
            time.sleep(min(_PAUSE_SECONDS, max(0.0, deadline - now)))
        else:
            if said > 0:
                log.info(f"{what} answers", waited=round(time.monotonic() - began, 1))
            return


def check_tls(settings: EngineSettings) -> Certificates | None:
    """Certificates that the settings name; None: they name none.

    Raises:
        InvalidRequest: they cannot be used; the message names the variable and the file.
    """
    files = TlsFiles.of(settings)
    if files is None:
        return None
    try:
        return Certificates(files)
    except InvalidRequest as error:
        raise InvalidRequest(f"TEMPER_{str(error.param).upper()}: {error.message}", param=error.param) from error


def check_model_directory(settings: EngineSettings) -> None:
    """Raises CheckpointRejected if the model directory has no checkpoint."""
    for name in ("config.json", "tokenizer.json"):
        if not (settings.model / name).is_file():
            raise CheckpointRejected(f"TEMPER_MODEL={settings.model}: there is no {name} in that directory")


def use_kernel_cache(settings: EngineSettings) -> Path:
    """Sets the directory where Triton keeps compiled kernels, and returns it. Triton reads the variable when it is
    imported, so this comes first. A TRITON_CACHE_DIR that is already set stays.

    Raises:
        InvalidRequest: the directory cannot be determined.
    """
    try:
        return Path(os.environ.setdefault("TRITON_CACHE_DIR", str(settings.kernel_cache_dir)))
    except ValueError as error:
        raise InvalidRequest(str(error), param="cache_dir") from error


def check_port(settings: EngineSettings) -> None:
    """Finds a taken port before minutes of loading; the server's own bind decides.

    Raises:
        Unavailable: the port is taken, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.grpc_host, settings.grpc_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise Unavailable(
            f"cannot listen on {settings.grpc_host}:{settings.grpc_port}: {error.strerror or error}; "
            "set TEMPER_GRPC_HOST and TEMPER_GRPC_PORT"
        ) from error


def check_redis(settings: EngineSettings) -> None:
    """Raises Unavailable if Redis does not answer, and Refused if it refuses user and password. Messages name the URL
    without its password."""
    url = settings.redis_url.get_secret_value()
    try:
        client = client_of(settings, socket_timeout=_REDIS_SECONDS, socket_connect_timeout=_REDIS_SECONDS)
        try:
            client.ping()
        finally:
            client.close()
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        raise Refused(
            f"Redis at {without_password(url)} refuses user and password: {_first_line(error)}; check the ones in "
            "TEMPER_REDIS_URL (redis://user:password@host:port/0)"
        ) from error
    except ValueError as error:
        raise InvalidRequest(f"TEMPER_REDIS_URL={without_password(url)}: {_first_line(error)}") from error
    except (redis.RedisError, OSError) as error:
        reason = _first_line(error)
        raise Unavailable(f"Redis at {without_password(url)} (TEMPER_REDIS_URL) does not answer: {reason}") from error


def check_store(settings: EngineSettings) -> None:
    """Raises Unavailable if the object store does not answer, Refused if it refuses the credentials, StoreRejected if
    it has no conditional writes."""
    try:
        ObjectStore(settings).check()
    except Refused:
        raise
    except Unavailable as error:
        raise Unavailable(f"{error.message}; TEMPER_S3_ENDPOINT says where it is") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def without_password(url: str) -> str:
    """URL without its password, for logs."""
    parts = urllib.parse.urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{parts.username or ''}:***@{host}").geturl()
