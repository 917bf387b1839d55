"""uvicorn's HTTP protocol with what a public port needs: bounded headers, and errors in OpenAI's form.

httptools buffers a header line until it ends, and uvicorn sets no limit: without this one connection could fill the
memory before any of our code has seen it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import structlog
from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.errors import error_payload

log = structlog.get_logger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Of request line and headers together; also of the trailers behind a chunked body."""
_PIECE_BYTES = MAX_HEAD_BYTES // 4
"""Fed to the parser at once: within a piece nobody knows where what it finished ended."""


WRITE_TIMEOUT_SECONDS = 30.0


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    write_timeout = WRITE_TIMEOUT_SECONDS
    """Seconds for which a client may take nothing of what is to be sent."""

    _pending = 0
    """Bytes that came since the parser last finished something."""
    _finished = False
    _unsent = 0
    """Bytes that were to be sent when the client was last looked at."""
    _watch: asyncio.TimerHandle | None = None

    _LINGER_SECONDS = 1
    """How long a client may still send a request over a connection whose last answer did not say that it closes."""

    draining: Callable[[], bool] = staticmethod(lambda: False)
    """Whether answers close their connection, so that its client comes back through a balancer."""

    @classmethod
    def of(cls, write_timeout: float, draining: Callable[[], bool]) -> type[HttpProtocol]:
        """The protocol of one server: uvicorn makes its instances itself."""
        return type(cls.__name__, (cls,), {"write_timeout": write_timeout, "draining": staticmethod(draining)})

    # While more is to be sent than the transport takes, uvicorn's senders wait, so the rest can only become less. A
    # client that reads nothing is noticed by that it does not; one timer, and none for clients that keep up.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def shutdown(self) -> None:
        """Called once the listener is closed. A client whose answer began before the drain was told that it may send
        another request here: closing right behind that answer would meet this request on its way."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete and cycle.keep_alive:
            self.timeout_keep_alive = self._LINGER_SECONDS
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """A connection without a new request is closed; not politely, if its last answer was never read."""
        transport = self.transport
        if not transport.is_closing() and transport.get_write_buffer_size():
            transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _look_again(self) -> None:
        self._stop_watching()
        self._unsent = self.transport.get_write_buffer_size()
        self._watch = asyncio.get_running_loop().call_later(self.write_timeout, self._check)

    def _check(self) -> None:
        transport = self.transport
        if transport.get_write_buffer_size() < self._unsent:
            self._look_again()
        else:
            log.info("client reads nothing, it is cut off", client=self.client, seconds=self.write_timeout)
            transport.abort()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def data_received(self, data: bytes) -> None:
        for begin in range(0, len(data), _PIECE_BYTES):
            if self.transport.is_closing():
                return
            self._feed(data[begin : begin + _PIECE_BYTES])

    def _feed(self, piece: bytes) -> None:
        self._finished = False
        super().data_received(piece)
        self._pending = 0 if self._finished else self._pending + len(piece)
        if self._pending > MAX_HEAD_BYTES and not self.transport.is_closing():
            message = (
                f"request line and headers are over the limit of {MAX_HEAD_BYTES} bytes: send fewer or shorter ones"
            )
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message, "headers_too_large")

    def on_headers_complete(self) -> None:
        self._finished = True
        super().on_headers_complete()
        if self.draining() and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._finished = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._finished = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn says to bytes that are not HTTP."""
        self._refuse(HTTPStatus.BAD_REQUEST, msg, "invalid_http")

    def _refuse(self, status: HTTPStatus, message: str, code: str) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = to_json(error_payload(message, status=status, code=code))
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode("ascii") + body)
        self.transport.close()
