"""uvicorn's HTTP protocol with what a public port needs: bounded headers, and errors in OpenAI's form.

httptools buffers a header line until it ends, and uvicorn sets no limit: without this one connection could fill the
memory before any of our code has seen it.
"""

from __future__ import annotations

from http import HTTPStatus

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.errors import error_payload

MAX_HEAD_BYTES = 64 * 1024
"""Of request line and headers together; also of the trailers behind a chunked body."""
_PIECE_BYTES = MAX_HEAD_BYTES // 4
"""Fed to the parser at once: within a piece nobody knows where what it finished ended."""


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    _pending = 0
    """Bytes that came since the parser last finished something."""
    _finished = False

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
