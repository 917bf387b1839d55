"""A small real HTTP server that answers as it is told to: for commands' behaviour without a gateway."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class Seen:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class Reply:
    """One answer; a stream is an answer whose text is server-sent events."""

    body: Any = None
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def sse(*events: tuple[str, str, Any], done: bool = False) -> Reply:
    """Server-sent events of (id, event, data)."""
    text = "".join(f"id: {i}\nevent: {kind}\ndata: {json.dumps(data)}\n\n" for i, kind, data in events)
    return Reply(": hello\n\n" + text + ("data: [DONE]\n\n" if done else ""), content_type="text/event-stream")


@contextmanager
def serving(answer: Callable[[Seen], Reply]) -> Iterator[tuple[str, list[Seen]]]:
    """Yields the URL and the requests so far."""
    requests: list[Seen] = []

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            headers = {key.lower(): value for key, value in self.headers.items()}
            seen = Seen(self.command, self.path, headers, self.rfile.read(length))
            requests.append(seen)
            reply = answer(seen)
            body = reply.body if isinstance(reply.body, bytes | str) else json.dumps(reply.body)
            data = body.encode() if isinstance(body, str) else body
            self.send_response(reply.status)
            self.send_header("content-type", reply.content_type)
            self.send_header("content-length", str(len(data)))
            for key, value in reply.headers.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
