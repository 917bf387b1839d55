"""Raw HTTP exchanges, drawn from a seed, with the answers that they must get.

`python -m tests.unit.gateway.raw_exchanges 100000` sends that many and tells what went wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import json
import logging
import random
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from backports import zstd
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from services.gateway.core.errors import install_error_handlers
from services.gateway.middleware.request_body import BodyDecoding, BodyLimit
from services.gateway.middleware.request_context import HeadRequests
from services.gateway.server.framing import MAX_HEAD_BYTES
from services.gateway.server.http_protocol import HttpProtocol

BODY_LIMIT = 256 * 1024
_METHODS = ("POST", "POST", "POST", "PUT", "DELETE", "GET", "HEAD", "OPTIONS")
_UPGRADES = (
    (),
    (),
    (),
    (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA"),
    (b"Upgrade: h2c", b"connection: keep-alive, upgrade"),
    (
        b"Connection: Upgrade",
        b"Upgrade: websocket",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ),
    (b"Connection: upgrade", b"Upgrade: TLS/1.2, HTTP/2.0"),
    (b"Connection: upgrade", b"Connection: keep-alive", b"UPGRADE: foo"),
)


async def _echo(request: Request) -> Response:
    """What was asked for, and what of the body has come; a stream with ?stream, without the body with ?early."""
    body = b"" if "early" in request.query_params else await request.body()
    told = {"id": request.headers.get("x-request-id"), "method": request.method, "digest": digest(body)}
    if "stream" not in request.query_params:
        return JSONResponse(told)

    async def pieces() -> Iterator[bytes]:  # type: ignore[misc]
        text = json.dumps(told).encode()
        for begin in range(0, len(text), 11):
            await asyncio.sleep(0)
            yield text[begin : begin + 11]

    return StreamingResponse(pieces(), media_type="application/json")


def digest(body: bytes) -> str:
    return f"{len(body)}:{hashlib.sha256(body).hexdigest()[:16]}"


class _Failures(logging.Handler):
    """Keeps what uvicorn says of exceptions that reached it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []
        self.emit = self.records.append  # type: ignore[method-assign]


@contextmanager
def serving() -> Iterator[int]:
    """The port of a server with the gateway's framing, which echoes.

    Raises:
        AssertionError: at the end, if an exception reached the server.
    """
    failures = _Failures()
    logging.getLogger("uvicorn.error").addHandler(failures)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    methods = ["GET", "POST", "PUT", "DELETE", "OPTIONS"]
    limited = {"limit": lambda _: BODY_LIMIT}
    around = [Middleware(HeadRequests), Middleware(BodyDecoding, **limited), Middleware(BodyLimit, **limited)]
    app = Starlette(routes=[Route("/echo", _echo, methods=methods)], middleware=around)
    install_error_handlers(app)  # type: ignore[arg-type]
    config = uvicorn.Config(
        app, loop="uvloop", http=HttpProtocol, ws="none", log_config=None, access_log=False, lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        logging.getLogger("uvicorn.error").removeHandler(failures)
    assert not failures.records, failures.records[0].exc_info


@dataclass(frozen=True, slots=True)
class Expected:
    """An answer. ``told``: what the echo says; None: an error. ``closes``: nothing comes behind it."""

    status: int
    told: dict[str, str] | None = None
    head_only: bool = False
    closes: bool = False


@dataclass(slots=True)
class Conversation:
    """What is sent over one connection, and what comes back."""

    sent: bytearray = field(default_factory=bytearray)
    expected: list[Expected] = field(default_factory=list)

    def add(self, sent: bytes, expected: Expected) -> None:
        self.sent += sent
        self.expected.append(expected)


def draw(rng: random.Random, longest: int = 5) -> Conversation:
    """Requests behind one another: right ones, and at the end perhaps one that is not."""
    conversation = Conversation()
    for _ in range(rng.randrange(longest)):
        request, expected = _request(rng)
        conversation.add(request, expected)
        if expected.closes:
            return conversation
    if rng.random() < 0.4:
        conversation.add(*_broken(rng))
        return conversation
    conversation.add(*_request(rng, last=True))
    if rng.random() < 0.3:  # what comes behind the last one is nobody's request
        conversation.sent += _request(rng)[0]
    return conversation


def _request(rng: random.Random, *, last: bool = False) -> tuple[bytes, Expected]:
    method = rng.choice(_METHODS)
    old = last and rng.random() < 0.3
    body, coded, coding, status = _body(rng)
    query = rng.choice(("", "", "?stream", "?early" if status == 200 else ""))
    name = f"r-{rng.getrandbits(48):012x}"
    lines = [f"{method} /echo{query} HTTP/1.{0 if old else 1}".encode(), f"X-Request-Id: {name}".encode()]
    lines += rng.choice(_UPGRADES)
    if rng.random() < 0.05:
        lines.append(b"X-Long: " + b"a" * rng.randrange(MAX_HEAD_BYTES // 2))
    if not old or rng.random() < 0.5:
        lines.insert(1, b"Host: x")
    if last and not old:
        lines.append(b"Connection: close")
    if coding:
        lines.append(b"Content-Encoding: " + coding)
    if not old and status == 200 and query != "?early" and rng.random() < 0.1:
        lines.append(b"Expect: 100-continue")
    framed = _framed(rng, coded, lines, may_leave_out=not coding)
    told = {"id": name, "method": "GET" if method == "HEAD" else method}
    told["digest"] = digest(b"" if query == "?early" or framed is None else body)
    head = b"\r\n".join([*lines, b"", b""])
    expected = Expected(status, told if status == 200 else None, head_only=method == "HEAD", closes=last)
    return head + (framed or b""), expected


def _body(rng: random.Random) -> tuple[bytes, bytes, bytes, int]:
    """Body, coded body, its codings and the status of the answer."""
    body = rng.choice(
        (
            b"",
            b"{}",
            b'\xef\xbb\xbf{"model": "m"}',
            b"GET /echo HTTP/1.1\r\nHost: x\r\nX-Request-Id: smuggled\r\n\r\n",
            b"0\r\n\r\nPOST /echo HTTP/1.1\r\nHost: x\r\nX-Request-Id: smuggled\r\nContent-Length: 0\r\n\r\n",
            bytes(rng.getrandbits(8) for _ in range(rng.randrange(300))),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        )
    )
    if rng.random() < 0.05:
        body = rng.randbytes(rng.randrange(100_000))
    coding = rng.choice((b"", b"", b"", b"", b"gzip", b"deflate", b"zstd", b"gzip, zstd", b"identity", b"br"))
    if rng.random() < 0.03:
        return b"", gzip.compress(bytes(BODY_LIMIT + 1 + rng.randrange(10**6))), b"gzip", 413
    if rng.random() < 0.03:
        return b"", rng.choice((b"abc", gzip.compress(b"abcdef")[:-5], gzip.compress(b"x") + b"y")), b"GZIP", 400
    match coding:
        case b"gzip":
            half = len(body) // 2
            return body, gzip.compress(body[:half]) + gzip.compress(body[half:]), coding, 200
        case b"deflate":
            raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
            return body, rng.choice((zlib.compress(body), raw.compress(body) + raw.flush())), coding, 200
        case b"zstd":
            return body, zstd.compress(body), coding, 200
        case b"gzip, zstd":
            return body, zstd.compress(gzip.compress(body)), coding, 200
        case b"br":
            return b"", body, coding, 415
    return body, body, coding, 200


def _framed(rng: random.Random, body: bytes, lines: list[bytes], *, may_leave_out: bool) -> bytes | None:
    """The body as it is sent, with what the head says of it; None: there is none."""
    if may_leave_out and rng.random() < 0.2:
        return None
    if rng.random() < 0.5:
        lines.append(b"Content-Length: %d" % len(body))
        return body
    lines.append(rng.choice((b"Transfer-Encoding: chunked", b"transfer-encoding: CHUNKED")))
    chunks, begin = bytearray(), 0
    while begin < len(body):
        size = rng.randrange(1, len(body) - begin + 1)
        chunks += b"%x%s\r\n" % (size, rng.choice((b"", b";a=b", b';q="x"'))) + body[begin : begin + size] + b"\r\n"
        begin += size
    trailer = rng.choice((b"", b"", b"X-Request-Id: trailer\r\n", b"Content-Encoding: gzip\r\nUpgrade: h2c\r\n"))
    return bytes(chunks) + b"0\r\n" + trailer + b"\r\n"


_BROKEN: tuple[tuple[int, bytes], ...] = (
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n"),
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3, 3\r\n\r\nabc"),
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n"),
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n"),
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length : 3\r\n\r\nabc"),
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n 0\r\n\r\n0123456789"),
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n"),
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nX: a\r\n\tfolded\r\n\r\n"),
    (400, b"GET /echo HTTP/1.1\nHost: x\n\n"),
    (400, b"GET /echo HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n"),
    (400, b"GET /echo HTTP/1.1\r\nHost: x\r\n: nameless\r\n\r\n"),
    (400, b"GET /echo HTTP/1.1\r\n\r\n"),
    (400, b"GET /echo HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n"),
    (400, b"get /echo HTTP/1.1\r\nHost: x\r\n\r\n"),
    (400, b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n"),
    (400, b"\x16\x03\x01\x00\xa5\x01\x00\x00"),
    (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n"),
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\nz\r\n0\r\n\r\n"),
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n"),
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\nz\r\n0\r\n\r\n"),
    (400, b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nz"),
    (501, b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n1\r\nz\r\n0\r\n\r\n"),
    (405, b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\nGET /echo HTTP/1.1\r\nHost: x\r\n\r\n"),
    (505, b"GET /echo HTTP/2.0\r\nHost: x\r\n\r\n"),
    (505, b"GET /echo HTTP/0.9\r\nHost: x\r\n\r\n"),
    (431, b"GET /echo HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * (MAX_HEAD_BYTES + 20_000)),
    (431, b"GET /echo HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * (MAX_HEAD_BYTES // 4)),
)


def _broken(rng: random.Random) -> tuple[bytes, Expected]:
    status, sent = rng.choice(_BROKEN)
    return sent, Expected(status, closes=True)


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    """Segments: all at once, cut at some places, or byte for byte."""
    way = rng.random()
    if way < 0.15 and len(data) < 1500:
        return [data[i : i + 1] for i in range(len(data))]
    places = sorted(rng.randrange(len(data)) for _ in range(rng.randrange(1, 6))) if way < 0.7 else []
    return [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True)]


def converse(port: int, conversation: Conversation, segments: list[bytes]) -> str:
    """What went wrong; empty: nothing."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sending = threading.Thread(target=_send, args=(connection, segments))
        long = sum(map(len, segments)) > 60_000  # else the kernel takes it all, whether it is read or not
        sending.start() if long else _send(connection, segments)
        try:
            with connection.makefile("rb") as stream:
                for place, expected in enumerate(conversation.expected):
                    if wrong := _compare(stream, expected):
                        return f"answer {place + 1}: {wrong}"
                rest = stream.read()
        except (TimeoutError, ConnectionError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if long:
                sending.join()
    return f"more than the answers: {rest[:200]!r}" if rest else ""


def _send(connection: socket.socket, segments: list[bytes]) -> None:
    for segment in segments:
        try:
            connection.sendall(segment)
        except OSError:  # it was closed behind the last answer
            return


def _compare(stream: socket.SocketIO, expected: Expected) -> str:  # type: ignore[valid-type]
    status, headers, body = 100, {}, b""
    while status == 100:
        line = stream.readline()
        if not line:
            return f"the connection ended, {expected} was to come"
        status = int(line.split()[1])
        headers = {}
        while (line := stream.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
    if not expected.head_only:
        body = _read_body(stream, headers)
    if status != expected.status:
        return f"status {status} {body[:300]!r}, {expected} was to come"
    if expected.head_only:
        return ""
    try:
        told = json.loads(body)
    except ValueError:
        return f"not JSON: {body[:300]!r}, {expected} was to come"
    if expected.told is None:
        return "" if "error" in told else f"no error: {told}"
    return "" if told == expected.told else f"{told}, {expected.told} was to come"


def _read_body(stream: socket.SocketIO, headers: dict[bytes, bytes]) -> bytes:  # type: ignore[valid-type]
    if b"content-length" in headers:
        return stream.read(int(headers[b"content-length"]))
    if headers.get(b"transfer-encoding") != b"chunked":
        return stream.read()
    body = b""
    while size := int(stream.readline(), 16):
        body += stream.read(size)
        stream.readline()
    stream.readline()
    return body


def run(port: int, count: int, seed: int, *, most: int = 5) -> tuple[int, list[str]]:
    """Sends at least ``count`` requests. Returns how many, and what went wrong of up to ``most`` conversations."""
    rng, sent, wrong = random.Random(seed), 0, []
    while sent < count and len(wrong) < most:
        conversation = draw(rng)
        segments = cut(rng, bytes(conversation.sent))
        sent += len(conversation.expected)
        if what := converse(port, conversation, segments):
            wrong.append(f"{what}\n  {bytes(conversation.sent[:1000])!r} in {len(segments)} segments")
    return sent, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    with serving() as port:
        sent, wrong = run(port, options.count, options.seed)
    print(
        f"{sent} requests in {time.monotonic() - began:.0f} s, {len(wrong)} conversations went wrong", *wrong, sep="\n"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
