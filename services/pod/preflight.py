"""What must hold before a pod starts: settings, port, Redis, object store, model directory. Errors are one line.

No torch here: whoever mistypes an address learns it at once.
"""

from __future__ import annotations

import os
import socket
import urllib.parse

import redis
from pydantic import ValidationError

from services.common.errors import CheckpointRejected, InvalidRequest, Unavailable
from services.common.store import ObjectStore
from services.engine.settings import EngineSettings
from services.trainer.settings import TrainerSettings

_REDIS_SECONDS = 3.0


def read_settings() -> tuple[EngineSettings, TrainerSettings]:
    """The settings of engine and trainer from the environment.

    Raises:
        InvalidRequest: one of them is malformed; the message names the variables.
    """
    try:
        return EngineSettings(), TrainerSettings()
    except ValidationError as error:
        problems = [
            f"{'TEMPER_' + '_'.join(map(str, e['loc'])).upper() if e['loc'] else 'settings'}: {e['msg']}"
            for e in error.errors(include_input=False, include_url=False)
        ]
        raise InvalidRequest("; ".join(problems)) from error


def check_all(settings: EngineSettings) -> None:
    """Everything that can be known before torch is imported and the model is loaded.

    Raises:
        TemperError: the first thing that is wrong, in one line.
    """
    check_model_directory(settings)
    check_port(settings)
    check_redis(settings)
    check_store(settings)


def check_model_directory(settings: EngineSettings) -> None:
    """Raises CheckpointRejected if there is no checkpoint to load."""
    for name in ("config.json", "tokenizer.json"):
        if not (settings.model / name).is_file():
            raise CheckpointRejected(f"TEMPER_MODEL={settings.model}: there is no {name} in that directory")


def use_kernel_cache(settings: EngineSettings) -> None:
    """Tells Triton where to keep compiled kernels. Triton reads the variable when it is imported, so this comes first;
    a TRITON_CACHE_DIR that is already set stays.

    Raises:
        InvalidRequest: there is no such place.
    """
    try:
        os.environ.setdefault("TRITON_CACHE_DIR", str(settings.kernel_cache_dir))
    except ValueError as error:
        raise InvalidRequest(str(error), param="cache_dir") from error


def check_port(settings: EngineSettings) -> None:
    """Finds a taken port before minutes of loading; the server's own bind has the last word.

    Raises:
        Unavailable: it is taken or the address is not ours.
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
    """Raises Unavailable, naming the URL without its password, if Redis does not answer."""
    url = settings.redis_url.get_secret_value()
    try:
        client = redis.Redis.from_url(
            url, socket_timeout=_REDIS_SECONDS, socket_connect_timeout=_REDIS_SECONDS, protocol=2
        )
        try:
            client.ping()
        finally:
            client.close()
    except (redis.RedisError, OSError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise Unavailable(f"Redis at {without_password(url)} (TEMPER_REDIS_URL) does not answer: {reason}") from error


def check_store(settings: EngineSettings) -> None:
    """Raises Unavailable if the object store does not answer, StoreRejected if it has no conditional writes."""
    try:
        ObjectStore(settings).check()
    except Unavailable as error:
        raise Unavailable(f"{error.message}; TEMPER_S3_ENDPOINT says where it is") from error


def without_password(url: str) -> str:
    """A URL that may be logged."""
    parts = urllib.parse.urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{parts.username or ''}:***@{host}").geturl()
