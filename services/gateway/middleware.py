"""What surrounds every request: its id, the body limit, the access log, metrics, and the last resort for bugs."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

import structlog
from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.access.principal import NOBODY
from services.gateway.errors import CLIENT_CLOSED_REQUEST, error_payload
from services.gateway.metrics import GatewayMetrics

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_QUIET = frozenset({"/livez", "/readyz", "/healthz", "/metrics"})
log = structlog.get_logger("access")


class RequestContext:
    """Gives a request an id (the client's x-request-id if it is harmless), logs and counts it, answers bugs with 500.

    Args:
        app: what it surrounds.
        metrics: where requests are counted.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(raw=message["headers"])["x-request-id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                log.exception("unhandled exception", method=scope["method"], path=scope["path"])
                if status == 0:
                    await _send_internal_error(send_with_id)
            finally:
                self._account(scope, status, time.monotonic() - started)

    def _account(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        name = getattr(route, "path", None) or "unmatched"
        if status == 0 or scope.get("temper.disconnected"):
            status = CLIENT_CLOSED_REQUEST
        self._metrics.requests.labels(scope["method"], name, str(status)).inc()
        self._metrics.duration.labels(name).observe(seconds)
        if scope["path"] in _QUIET:
            return
        client, principal = scope.get("client"), scope["state"].get("principal")
        log.info(
            "request",
            method=scope["method"],
            path=scope["path"],
            status=status,
            seconds=round(seconds, 4),
            client=client[0] if client else None,
            principal=None if principal is None or principal is NOBODY else principal.id,
        )


async def _send_internal_error(send: Send) -> None:
    body = to_json(error_payload("internal error; the log has the details", status=500, code="internal_error"))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class BodyLimit:
    """Stops reading a body that is over its limit, announced or chunked. The error handlers make it a 413.

    Args:
        app: what it surrounds.
        limit: bytes of an ordinary body.
        upload_limit: bytes of a multipart body on a route that takes one.
        is_upload: whether a request is one.
    """

    def __init__(self, app: ASGIApp, limit: int, upload_limit: int, is_upload: Callable[[Scope], bool]) -> None:
        self._app = app
        self._limit = limit
        self._upload_limit = upload_limit
        self._is_upload = is_upload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        limit = self._upload_limit if self._is_upload(scope) else self._limit
        announced = headers.get("content-length", "")
        if announced.isascii() and announced.isdigit() and len(announced) < 20:
            excess = int(announced) > limit
        else:
            excess = bool(announced)
        seen = 0

        async def receive_limited() -> Message:
            nonlocal seen
            if excess:
                raise _too_large(limit)
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > limit:
                    raise _too_large(limit)
            return message

        await self._app(scope, receive_limited, send)


def _too_large(limit: int) -> HTTPException:
    # An HTTPException, because that is the one kind that FastAPI lets through while it reads a body.
    return HTTPException(413, f"the request body is over the limit of {limit} bytes: split it into smaller requests")
