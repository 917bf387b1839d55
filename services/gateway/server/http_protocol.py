"""HTTP protocol of a public port: uvicorn's, with bounded heads, exact framing, and errors in OpenAI's form.

httptools buffers a header line until it ends, and uvicorn sets no limit: without this one connection could fill the
memory before any of our code has seen it. And whatever a request's head says, each request gets one answer, and no body
is ever read as a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
import structlog
from pydantic_core import to_json
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.core.errors import error_payload
from services.gateway.server.framing import (
    HEAD_TOO_LARGE,
    MAX_HEAD_BYTES,
    NotServed,
    Refusal,
    closing_unless_continued,
    head_too_slow,
    not_http,
    unserved,
    with_path,
    without_chunks,
)

_LINGER_SECONDS = 2.0


class LingeringTransport(asyncio.Transport):
    """A transport whose ``close`` keeps the last answer readable (RFC 9112, 9.6).

    A socket that is closed with bytes that nobody has read resets its connection, and the client loses what it has not
    read yet: the answer to an upload that was refused early. So this one ends what is sent, throws away what still
    comes, and closes when the client does, or after two seconds.

    Args:
        inner: the connection's own.
        busy: whether the client may be sending; a connection without a request is closed at once.
    """

    def __init__(self, inner: asyncio.Transport, busy: Callable[[], bool]) -> None:
        super().__init__()
        self._inner = inner
        self._busy = busy
        self._ended = False
        self.write = inner.write  # type: ignore[method-assign] # once a piece of a stream: without a call in between

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._busy() or not self._inner.can_write_eof():
            self._inner.close()
            return
        self._ended = True
        self._inner.write_eof()
        self._inner.resume_reading()
        asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._inner.close)

    def is_closing(self) -> bool:
        return self._ended or self._inner.is_closing()

    def abort(self) -> None:
        self._inner.abort()

    def pause_reading(self) -> None:
        if not self._ended:
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)


log = structlog.get_logger(__name__)

_PIECE_BYTES = MAX_HEAD_BYTES // 4
"""Fed to the parser at once: within a piece nobody knows where what it finished ended."""
WRITE_TIMEOUT_SECONDS = 30.0


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    write_timeout = WRITE_TIMEOUT_SECONDS
    """Seconds for which a client may take nothing of what is to be sent."""
    head_timeout = 30.0
    """Seconds from the first byte of a head to its last."""

    _pending = 0
    """Bytes that came since the parser last finished something."""
    _finished = False
    _unsent = 0
    """Bytes that were to be sent when the client was last looked at."""
    _watch: asyncio.TimerHandle | None = None
    _late: asyncio.TimerHandle | None = None
    """Runs while a head is on its way."""
    _in_head = _in_body = False
    """Parser's place: in the head or in the body of a message; between two messages neither."""
    _outstanding = 0
    """Requests without a whole answer."""
    _refusal: Refusal | None = None

    _NEXT_REQUEST_SECONDS = 1
    """Time for a client to send another request over a connection whose last answer did not say that it closes."""

    draining: Callable[[], bool] = staticmethod(lambda: False)
    """True while answers close their connection, so that its client comes back through a balancer."""

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
            self.timeout_keep_alive = self._NEXT_REQUEST_SECONDS
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._stop_head_timer()
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

    # What comes in: bytes, in pieces of any size.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection over which no request comes is closed as one over which no further one comes."""
        super().connection_made(LingeringTransport(transport, self._is_busy))
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        for begin in range(0, len(data), _PIECE_BYTES):
            piece = data[begin : begin + _PIECE_BYTES]
            self._finished = False
            left = piece
            while left:
                if self._refusal is not None or self.transport.is_closing():
                    return
                left = self._feed(left)
            self._pending = 0 if self._finished else self._pending + len(piece)
            if self._pending > MAX_HEAD_BYTES and self._refusal is None:
                self._refuse(HEAD_TOO_LARGE)

    def _feed(self, data: bytes) -> bytes:
        """Returns what is still to be fed."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._head_without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause.refusal if isinstance(cause, NotServed) else not_http(cause or error))
        return b""

    def _head_without_upgrade(self) -> bytes:
        """The head that the parser has just read, for a parser of its own, without its header ``Upgrade``.

        A server may ignore that header and answer the request as it stands (RFC 9110, 7.8). llhttp cannot: it takes all
        that comes behind such a head for another protocol, so the body would be lost, or be read as the next request.
        """
        version = self.parser.get_http_version().encode("ascii")
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        return b"\r\n".join([*lines, b"", b""])

    # What the parser found in it.

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._in_head = True
        if self._late is None:
            self._late = self.loop.call_later(self.head_timeout, self._on_late_head)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which is no part of the head (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._finished = True
        self._in_head = False
        version = self.parser.get_http_version()
        refusal = unserved(self.parser.get_method(), version, self.headers)
        if refusal is not None:
            raise NotServed(refusal)
        if self.parser.should_upgrade():
            return  # it comes again: _head_without_upgrade
        self._stop_head_timer()
        if not self.url.startswith(b"/"):
            self.url = with_path(self.url)
        if version == "1.0":
            self.expect_100_continue = False  # RFC 9110, 10.1.1
        super().on_headers_complete()
        self._in_body = True
        self._outstanding += 1
        if self.draining():
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._finished = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._finished = True
        if self._in_body:
            self._in_body = False
            super().on_message_complete()

    # What goes out: answers in their turn, and nothing behind a refusal.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = without_chunks(app, cycle)
        elif cycle.waiting_for_100_continue:
            app = closing_unless_continued(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._outstanding -= 1
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.pipeline:
            self.flow.pause_reading()  # or who sends requests and reads no answers would fill the memory
        elif self._refusal is not None and not self._outstanding:
            self._send_refusal(self._refusal)

    def _on_late_head(self) -> None:
        self._late = None
        if self.flow.read_paused:  # that is why the rest of it has not come
            self._late = self.loop.call_later(self.head_timeout, self._on_late_head)
        else:
            self._refuse(head_too_slow(self.head_timeout))

    def _refuse(self, refusal: Refusal) -> None:
        """Ends the connection with ``refusal``, behind the answers to what came before."""
        self._refusal = refusal
        self._stop_head_timer()
        cycle = self.cycle
        if not self._in_body:
            waits = self._outstanding > 0
        elif self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
            self._outstanding -= 1
            waits = True
        else:
            waits = False
            cycle.disconnected = True  # its application has nobody to answer
            cycle.message_event.set()
            if cycle.response_started:  # one answer is enough
                self.transport.close()
                return
        if waits:
            self.flow.pause_reading()
        else:
            self._send_refusal(refusal)

    def _send_refusal(self, refusal: Refusal) -> None:
        route = self.url.partition(b"?")[0].decode("latin-1")
        body = to_json(error_payload(refusal.message, status=refusal.status, code=refusal.code, route=route))
        head = (
            f"HTTP/1.1 {refusal.status.value} {refusal.status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()

    def _is_busy(self) -> bool:
        return self._outstanding > 0 or self._refusal is not None

    def _stop_head_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
