"""Names around training sessions: ids of sessions and of their futures, checkpoints and their keys."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from services.common.adapters.names import NAME_SCHEMA, check_adapter_name
from services.common.errors import InvalidRequest

_SESSION = re.compile(r"ts-([0-9a-f]{12})-([0-9a-f]{12})")
_FUTURE = re.compile(r"tf-([0-9a-f]{12})-([0-9a-f]{12})-([0-9a-f]{1,14})-([0-9a-f]{6})")


def _checkpoint_name(name: str) -> str:
    try:
        return check_adapter_name(name)
    except InvalidRequest as error:
        raise ValueError(error.message.replace("adapter name", "checkpoint name")) from error


CheckpointName = Annotated[str, AfterValidator(_checkpoint_name), WithJsonSchema({"type": "string", **NAME_SCHEMA})]


def checkpoint_key(name: str) -> str:
    """Key of a checkpoint's object in the store."""
    return f"sessions/checkpoints/{name}.safetensors"


def session_id(instance: str, serial: str) -> str:
    """Id of a session.

    Args:
        instance: the engine process that holds it, 12 hex digits.
        serial: 12 hex digits.
    """
    return f"ts-{instance}-{serial}"


def future_id(session: str, seq: int, nonce: str) -> str:
    """Id of the future of a call.

    Args:
        session: id of its session.
        seq: its place in the session's line.
        nonce: 6 hex digits, others for each attempt at one place.
    """
    return f"tf-{session.removeprefix('ts-')}-{seq:x}-{nonce}"


def session_instance(session: str) -> str | None:
    """Engine process that a session's id names; None if it is no such id."""
    match = _SESSION.fullmatch(session)
    return match.group(1) if match else None


def future_session(future: str) -> str | None:
    """Session that a future's id names; None if it is no such id."""
    match = _FUTURE.fullmatch(future)
    return session_id(match.group(1), match.group(2)) if match else None
