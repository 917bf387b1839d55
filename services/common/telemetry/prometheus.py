"""Metrics as Prometheus reads them over HTTP.

The library's own choice of the format is not used: with OpenMetrics it writes the names of samples with `_` for `:`
(https://github.com/prometheus/client_python/issues/1177), and nobody would find `vllm:num_requests_waiting`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics_exposition

from services.common.errors import Unavailable

_OPENMETRICS = "application/openmetrics-text"
_OPENMETRICS_TYPE = f"{_OPENMETRICS}; version=1.0.0; charset=utf-8"


def expose(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """All series of a registry, and their content type.

    Args:
        accept: the request's header. OpenMetrics, which has exemplars, if it names it; else the plain text format.
    """
    if _OPENMETRICS in accept:
        # All of our names are allowed without any escaping, so this one changes none.
        escaping = openmetrics_exposition.ALLOWUTF8
        return openmetrics_exposition.generate_latest(registry, escaping=escaping), _OPENMETRICS_TYPE
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


@contextmanager
def serving(registry: CollectorRegistry, host: str, port: int) -> Iterator[None]:
    """Serves them on /metrics in threads of its own while the block runs; on no port with 0.

    Raises:
        Unavailable: the address is taken or not ours.
    """
    if not port:
        yield
        return

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET":
            start("405 Method Not Allowed", [("Allow", "GET")])
            return [b""]
        body, content_type = expose(registry, environ.get("HTTP_ACCEPT", ""))
        start("200 OK", [("Content-Type", content_type), ("Content-Length", str(len(body)))])
        return [body]

    kind = _Server6 if ":" in host else _Server
    try:
        server = make_server(host, port, answer, kind, _Quiet)
    except OSError as error:
        raise Unavailable(
            f"cannot serve metrics on {host}:{port} (TEMPER_METRICS_HOST, TEMPER_METRICS_PORT): {error.strerror}"
        ) from error
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    """Prometheus asks every few seconds: no line for each."""

    timeout = 10
    """Seconds for a request to come."""

    def log_message(self, format: str, *args: Any) -> None:
        """Writes nothing."""
