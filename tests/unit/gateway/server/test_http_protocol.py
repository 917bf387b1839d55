"""What reaches the gateway before it is a request."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from services.gateway.server.http_protocol import MAX_HEAD_BYTES, HttpProtocol

HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\n"


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, http=HttpProtocol, log_config=None, access_log=False, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()


def exchange(port: int, *pieces: bytes) -> tuple[int, bytes]:
    """Status and body of the first response; pieces that the server no longer wants are not an error."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        answer = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
            while b"\r\n\r\n" not in answer or len(answer.split(b"\r\n\r\n", 1)[1]) < _length(answer):
                received = connection.recv(65536)
                if not received:
                    break
                answer += received
        except (ConnectionResetError, BrokenPipeError):
            pass
    if not answer:
        return 0, b""
    head, body = answer.split(b"\r\n\r\n", 1)
    return int(head.split()[1]), body


def _length(answer: bytes) -> int:
    lines = answer.split(b"\r\n\r\n", 1)[0].lower().split(b"\r\n")
    return next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))


def test_large_bodies_and_usual_headers_pass(port: int) -> None:
    size = 4 * MAX_HEAD_BYTES
    header = b"X-Long: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n"
    assert exchange(port, HEAD + header + b"Content-Length: %d\r\n\r\n" % size, b"b" * size) == (200, b"%d" % size)
    chunk = b"%x\r\n" % size + b"c" * size + b"\r\n"
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    assert exchange(port, chunked, chunk, chunk, b"0\r\n\r\n") == (200, b"%d" % (2 * size))


@pytest.mark.parametrize("endless", [b"X-Long: " + b"a" * 4096, b"X: y\r\n" * 700])
def test_endless_headers_are_cut_off(port: int, endless: bytes) -> None:
    status, body = exchange(port, HEAD, *[endless] * (MAX_HEAD_BYTES // 2048))
    assert status in (0, 431)  # 0: reset, because there was more than we read
    if status == 431:
        assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_headers_just_over_the_limit_are_told_so(port: int) -> None:
    status, body = exchange(port, HEAD + b"X-Long: " + b"a" * MAX_HEAD_BYTES)
    assert status == 431
    assert str(MAX_HEAD_BYTES) in json.loads(body)["error"]["message"]


def test_endless_trailers_are_cut_off(port: int) -> None:
    start = HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-Trailer: "
    status, _ = exchange(port, start, *[b"a" * 4096] * (MAX_HEAD_BYTES // 2048))
    assert status in (0, 431)


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x00\xa5", HEAD + b"Content-Length: -5\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\nZ\r\n"],
)
def test_what_is_not_http_gets_the_usual_error_body(port: int, sent: bytes) -> None:
    status, body = exchange(port, sent)
    assert status == 400
    assert json.loads(body)["error"]["code"] == "invalid_http"
