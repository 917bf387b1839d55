"""A proxy between a client and Temper that keeps what was asked and answered."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_HOP = {"connection", "content-length", "date", "server", "transfer-encoding"}
"""Headers of an answer that this server writes itself."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and what came of it."""

    method: str
    path: str
    body: bytes
    status: int
    answer: bytes

    @property
    def refused(self) -> bool:
        return self.status >= 400

    def __str__(self) -> str:
        told = self.answer[:500].decode(errors="replace") if self.refused else ""
        return f"{self.method} {self.path} -> {self.status} {told}".rstrip()


@dataclass(slots=True)
class Recording:
    """What went through so far, in the order of the answers' ends."""

    url: str
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def refusals(self) -> list[str]:
        return [str(exchange) for exchange in self.exchanges if exchange.refused]


@contextmanager
def recorded(upstream: str, change: Callable[[str, dict[str, Any]], None] | None = None) -> Iterator[Recording]:
    """A proxy in front of ``upstream``, a URL without a path.

    Args:
        change: may change the body of a request, which it gets with its path, before it is passed on.
    """
    host = urlsplit(upstream).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body = sent = self.rfile.read(int(self.headers.get("content-length") or 0))
            if change is not None and body:
                parsed = json.loads(body)
                change(self.path, parsed)
                sent = json.dumps(parsed).encode()
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            headers.pop("Accept-Encoding", None)
            connection = http.client.HTTPConnection(host, timeout=600)
            try:
                connection.request(self.command, self.path, sent or None, headers)
                response = connection.getresponse()
                answer = self._pass_on(response)
            finally:
                connection.close()
            recording.exchanges.append(Exchange(self.command, self.path, body, response.status, answer))

        do_GET = do_HEAD = do_POST = do_DELETE = handle_one  # noqa: N815

        def _pass_on(self, response: http.client.HTTPResponse) -> bytes:
            """Piece by piece, as a stream comes; the connection's end is the answer's."""
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            pieces: list[bytes] = []
            while piece := response.read1(65536):
                pieces.append(piece)
                self.wfile.write(piece)
                self.wfile.flush()
            return b"".join(pieces)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: the recording has it."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that leaves before its answer is none."""

    server = Server(("127.0.0.1", 0), Handler)
    recording = Recording(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield recording
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
