"""Process of an environment's server."""

from __future__ import annotations

import uvicorn

from services.environments.registry import ENVIRONMENTS
from services.environments.server import MOST_SESSIONS, create_app

_MESSAGE_BYTES = 64 * 1024
"""Largest message of a client; actions are short."""


def serve(name: str, host: str, port: int, most_sessions: int = MOST_SESSIONS) -> None:
    """Serves an environment of the registry until it is interrupted."""
    uvicorn.run(
        create_app(ENVIRONMENTS[name], most_sessions),
        host=host,
        port=port,
        ws="websockets-sansio",
        ws_max_size=_MESSAGE_BYTES,
        log_level="warning",
        access_log=False,
    )
