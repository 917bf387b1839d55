"""Outermost middleware: request id, HEAD, the body limit, the access log, metrics, and the last resort for bugs."""

from __future__ import annotations

import re
import time
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.telemetry import tracing
from services.common.telemetry.tracing import NO_SPAN, NO_TRACER, Span, Tracer
from services.gateway.auth.caller import UNAUTHENTICATED
from services.gateway.auth.route_permissions import PERMISSION, UNKNOWN
from services.gateway.core.errors import CLIENT_CLOSED_REQUEST, in_anthropic_form, response_of, told_of
from services.gateway.core.metrics import GatewayMetrics

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_QUIET = frozenset(
    {"/livez", "/readyz", "/healthz", "/health", "/ping", "/load", "/metrics", "/v1/status", "/v1/requests"}
)
log = structlog.get_logger("access")


class RequestContext:
    """Gives a request an id (the client's x-request-id if it is harmless), logs and counts it, answers bugs with 500.

    Args:
        app: what it surrounds.
        metrics: where requests are counted.
        tracer: gets a span of each, but of probes and scrapes.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, tracer: Tracer = NO_TRACER) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        span = self._span(scope) if self._tracer.on and scope["path"] not in _QUIET else NO_SPAN
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers["x-request-id"] = request_id
                if in_anthropic_form(scope["path"]):
                    headers["request-id"] = request_id  # the name that Anthropic's clients read
            await send(message)

        with tracing.running(span.traceparent), structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception as error:
                log.exception("unhandled exception", method=scope["method"], path=scope["path"])
                if status == 0:
                    await response_of(told_of(error), scope["path"])(scope, receive, send_with_id)
            finally:
                self._account(scope, status, time.monotonic() - started, span)
                structlog.contextvars.unbind_contextvars("completion_id")  # of generations of this request

    def _span(self, scope: Scope) -> Span:
        """https://opentelemetry.io/docs/specs/semconv/http/http-spans/#http-server-span"""
        headers = Headers(scope=scope)
        parent = tracing.checked(headers.get("traceparent", ""))
        return self._tracer.start(
            scope["method"],
            parent=parent,
            state=headers.get("tracestate", "")[:512] if parent else "",
            kind="server",
            attributes={
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "url.scheme": scope.get("scheme", "http"),
                "user_agent.original": headers.get("user-agent", "")[:256],
            },
        )

    def _account(self, scope: Scope, status: int, seconds: float, span: Span) -> None:
        name = _route(scope)
        if status == 0 or scope.get("temper.disconnected"):
            status = CLIENT_CLOSED_REQUEST
        self._metrics.requests.labels(scope["method"], name, str(status)).inc()
        self._metrics.duration.labels(name).observe(seconds, tracing.exemplar(span.traceparent))
        if span.recorded:
            span.rename(f"{scope['method']} {name}")
            span.set({"http.route": name, "http.response.status_code": status})
            if status >= 500:
                span.fail(str(status))
        span.end()
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
            principal=None if principal is None or principal is UNAUTHENTICATED else principal.id,
        )


def _route(scope: Scope) -> str:
    """Template of the request's path: that of its rule where it was refused before the router saw it."""
    if (path := getattr(scope.get("route"), "path", None)) is not None:
        return str(path)
    permission = scope.get(PERMISSION, UNKNOWN)
    return "unmatched" if permission is UNKNOWN else permission.path


class HeadRequests:
    """Answers HEAD wherever GET is (RFC 9110, 9.1): as GET would, without the body.

    Args:
        app: what it surrounds.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        ended = False

        async def send_head(message: Message) -> None:
            nonlocal ended
            if ended:
                return
            await send(message)
            if message["type"] == "http.response.start":
                ended = True  # a stream hears from `receive` that nobody waits for the rest
                await send({"type": "http.response.body", "body": b""})

        inner = {**scope, "method": "GET"}  # not in its place: whoever sends the answer must still know it is HEAD's
        try:
            await self._app(inner, receive, send_head)
        finally:
            scope.update(inner, method="HEAD")
