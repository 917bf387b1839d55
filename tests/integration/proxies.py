"""A real proxy for https that notes who asks for what, and the server under it."""

from __future__ import annotations

import http.server
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Proxy(http.server.BaseHTTPRequestHandler):
    """CONNECT and nothing else; who connects is noted."""

    def do_CONNECT(self) -> None:
        server = self.server
        assert isinstance(server, Noting)
        server.seen.append((self.path, self.headers.get("proxy-authorization", "")))
        # Whatever name is asked for, it is this machine's port.
        with socket.create_connection(("127.0.0.1", int(self.path.rpartition(":")[2]))) as there:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: there, there: self.connection}
            while True:
                for end in select.select(list(ends), [], [], 5)[0]:
                    data = end.recv(65536)
                    if not data:
                        return
                    ends[end].sendall(data)

    def log_message(self, format: str, *args: object) -> None: ...


class Noting(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.seen: list[tuple[str, str]] = []


@contextmanager
def serving(server: Noting) -> Iterator[int]:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
