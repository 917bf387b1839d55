"""The health command of the gateway's image."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from services.gateway.server import probe


class _Handler(BaseHTTPRequestHandler):
    answer = 200
    paths: list[str] = []  # noqa: RUF012

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self.paths.append(self.path)
        self.send_response(self.answer)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Handler]]:
    class Handler(_Handler):
        paths: list[str] = []  # noqa: RUF012

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setenv("TEMPER_PORT", str(server.server_port))
    yield Handler
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_alive(handler: type[_Handler], monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("TEMPER_HOST", host)
    assert probe.main() == 0
    assert handler.paths == ["/livez"]


def test_not_well(handler: type[_Handler], capsys: pytest.CaptureFixture[str]) -> None:
    handler.answer = 503
    assert probe.main() == 1
    assert "answers 503" in capsys.readouterr().err


def test_nobody_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TEMPER_PORT", "1")
    assert probe.main() == 1
    assert capsys.readouterr().err.startswith("temper gateway: no answer on 127.0.0.1:1: ")


def test_a_port_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TEMPER_PORT", "tcp://10.0.0.1:8420")
    assert probe.main() == 1
    assert capsys.readouterr().err.startswith("temper gateway: TEMPER_PORT: ")
