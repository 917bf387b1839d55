"""HTTP framing: what a request's may be, and that of answers for clients that are not of HTTP/1.1's usual form."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024
"""Largest size of request line and headers together; also of the trailers behind a chunked body."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to bytes that never become a request; the connection ends behind it."""

    status: HTTPStatus
    message: str
    code: str


class NotServed(Exception):
    """Raised where the head of a request has been read that gets a refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


HEAD_TOO_LARGE = Refusal(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"request line and headers are over the limit of {MAX_HEAD_BYTES} bytes: send fewer or shorter ones",
    "headers_too_large",
)


def head_too_slow(seconds: float) -> Refusal:
    """The answer to a head that has begun and does not end."""
    message = f"request line and headers did not arrive within {seconds:g} s: send them at once"
    return Refusal(HTTPStatus.REQUEST_TIMEOUT, message, "request_timeout")


def unserved(method: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> Refusal | None:
    """Refusal of a request whose head is HTTP but which the application does not serve; None: it is served."""
    if version not in ("1.0", "1.1"):
        message = f"HTTP/{version} is not spoken here: send HTTP/1.1"
        return Refusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, message, "invalid_http")
    if method == b"CONNECT":
        return Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "this is no proxy: CONNECT is not served", "method_not_allowed")
    if version == "1.1" and sum(name == b"host" for name, _ in headers) != 1:
        message = "a request of HTTP/1.1 has exactly one header 'Host' (RFC 9112, 3.2): send one"
        return Refusal(HTTPStatus.BAD_REQUEST, message, "invalid_http")
    if any(name == b"transfer-encoding" and value.strip().lower() != b"chunked" for name, value in headers):
        message = "the only transfer coding that is read here is chunked: a compressed body has a 'Content-Encoding'"
        return Refusal(HTTPStatus.NOT_IMPLEMENTED, message, "invalid_http")
    return None


def with_path(target: bytes) -> bytes:
    """A request's target with a path: a whole URI may have none, and means the root then (RFC 9110, 4.2.3)."""
    address, mark, query = target.partition(b"?")
    _, is_whole, authority = address.partition(b"://")
    return address + b"/" + mark + query if is_whole and b"/" not in authority else target


def not_http(error: BaseException) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, f"the request is not valid HTTP/1.1: {error}", "invalid_http")


def without_chunks(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """An application whose answers of unknown length end with the connection: HTTP/1.0 knows no chunks (RFC 9112, 6.1),
    and uvicorn would send some."""

    async def serve(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        endless = False

        async def send_plain(message: ASGISendEvent) -> None:
            nonlocal endless
            if message["type"] == "http.response.start":
                endless = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if endless:
                    cycle.chunked_encoding = False
            elif message["type"] == "http.response.body" and endless:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return serve


def closing_unless_continued(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """An application whose client waits for ``100 Continue``. An answer before that ends the connection: whether its
    body comes all the same is the client's choice, and where the next request begins would be a guess."""

    async def serve(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_closing(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.start" and cycle.waiting_for_100_continue and cycle.more_body:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await app(scope, receive, send_closing)

    return serve
