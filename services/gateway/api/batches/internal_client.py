"""Requests that the gateway makes to itself, through the same middleware, validation, admission and handlers as
everybody's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.types import Message, Scope

from services.gateway.auth.caller import ON_BEHALF_OF
from services.gateway.core.errors import error_payload

_BUSY = frozenset({429, 503})
"""Statuses of answers that another attempt may not get again."""
_TOO_LATE = 504
_LATE_ATTEMPTS = 5
"""Attempts that may end too late. A request that waits behind those of users may run out of time before its turn; one
that always takes too long must end."""
_BACKOFF_SECONDS = (0.25, 15.0)
"""First and longest pause between attempts. A longer Retry-After counts, up to a minute."""
_LONGEST_RETRY_AFTER = 60.0


@dataclass(frozen=True, slots=True)
class InternalCall:
    """Sender of a request that the gateway makes to itself, for an owner whose own request was authenticated before."""

    owner: str
    priority: int
    """Priority of a request whose body has no field for one."""

    @property
    def id(self) -> str:
        """Id of the owner, in the place of the id of the key that sent a request."""
        return self.owner


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in one piece."""

    status: int
    request_id: str
    body: bytes
    """JSON."""
    retry_after: float


class Caller:
    """Calls the application as an owner.

    Args:
        priority: of requests that name none, where requests have one: after those of users.
        endpoints: the models of the bodies that may be sent, by path.
        has_room: whether the gateway has room beside the requests of users; asked before every attempt.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        priority: int,
        endpoints: Mapping[str, type[BaseModel]],
        has_room: Callable[[], bool],
    ) -> None:
        self._app = app
        self._priority = priority
        self._has_room = has_room
        self._with_priority = frozenset(path for path, model in endpoints.items() if "priority" in model.model_fields)

    async def call(self, path: str, body: Mapping[str, object], *, owner: str, request_id: str) -> Answer:
        """Sends a request, and repeats it while the gateway is busy or the answer too late, until it is cancelled."""
        if path in self._with_priority and body.get("priority") is None:
            body = {**body, "priority": self._priority}
        data = to_json(body, inf_nan_mode="constants")
        pause, longest = _BACKOFF_SECONDS
        late = 0
        while True:
            wait = pause
            if self._has_room():
                answer = await self._once(path, data, owner, request_id)
                late += answer.status == _TOO_LATE
                if answer.status not in _BUSY and (answer.status != _TOO_LATE or late == _LATE_ATTEMPTS):
                    return answer
                wait = max(pause, min(answer.retry_after, _LONGEST_RETRY_AFTER))
            await asyncio.sleep(wait * random.uniform(0.75, 1.25))
            pause = min(2 * pause, longest)

    async def _once(self, path: str, data: bytes, owner: str, request_id: str) -> Answer:
        caller = InternalCall(owner, self._priority)
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"host", b"batch.internal"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(data)).encode()),
                (b"x-request-id", request_id.encode()),
            ],
            "client": None,
            "server": None,
            "state": {"principal": caller},
            ON_BEHALF_OF: caller,
        }
        sent = False
        status = 0
        headers: dict[bytes, bytes] = {}
        parts: list[bytes] = []

        async def receive() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": data, "more_body": False}
            await asyncio.Event().wait()  # the sender stays connected until it is cancelled
            raise AssertionError("unreachable")

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers.update(message["headers"])
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        body = b"".join(parts)
        if status == 0 or not body or b"\n" in body:  # a bug in a handler, whose answer would break the file
            status = 500
            body = to_json(error_payload("the answer was cut off", status=500, code="internal_error", route=path))
        return Answer(status, request_id, body, _seconds(headers.get(b"retry-after")))


def _seconds(retry_after: bytes | None) -> float:
    text = (retry_after or b"").decode("latin-1")
    return float(text) if text.isascii() and text.isdigit() else 0.0
