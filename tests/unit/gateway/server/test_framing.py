"""One answer to each request, whatever its head says, and no body read as a request."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from backports import zstd
from starlette.applications import Starlette

from services.common.security.api_keys import Scope
from services.gateway.api.surfaces import API
from services.gateway.server.http_protocol import HttpProtocol
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.key_file import NO_REDIS, Keys
from tests.unit.gateway.raw_exchanges import run, serving

BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
UPGRADES = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: aGVsbG8=\r\n",
    b"connection: keep-alive, upgrade\r\nupgrade: foo/2\r\n",
)


def test_drawn_exchanges() -> None:
    """The same with 100,000: `python -m tests.unit.gateway.raw_exchanges 100000`."""
    with serving() as port:
        sent, wrong = run(port, 1500, seed=26)
    assert sent >= 1500
    assert not wrong, wrong[0]


def talk(running: Running, *segments: bytes, pause: float = 0.0) -> bytes:
    """All that the gateway says over one connection, which it is asked to close."""
    with socket.create_connection(("127.0.0.1", httpx.URL(running.url).port or 0), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for segment in segments:
            connection.sendall(segment)
            time.sleep(pause)
        with connection.makefile("rb") as stream:
            return stream.read()


LAST = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://x/livez", b"200"),
        (b"HTTP://other:80/livez?a=b", b"200"),
        (b"http://x", b"404"),
        (b"http://x?a=/b", b"404"),
        (b"https://[::1]:8420", b"404"),
        (b"/?a=http://x", b"404"),
        (b"*", b"404"),
    ],
)
@pytest.mark.parametrize("upgrade", [b"", UPGRADES[0]])
def test_targets_may_be_whole_addresses(start: Starter, target: bytes, status: bytes, upgrade: bytes) -> None:
    """As a proxy is asked, with a path or without: RFC 9112, 3.2.2."""
    method = b"OPTIONS" if target == b"*" else b"GET"
    head = method + b" " + target + b" HTTP/1.1\r\nHost: x\r\n" + upgrade
    answers = talk(start(), head + b"\r\n" + LAST)
    assert answers.count(b"HTTP/1.1 ") == 2
    assert answers[9:12] == status, answers


@pytest.mark.sampled
@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("cuts", ["whole", "head and body", "bytes"])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_upgrade_is_answered_as_it_stands(running: Running, upgrade: bytes, cuts: str, chunked: bool) -> None:
    size = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(BODY)
    head = CHAT + upgrade + size + b"\r\n\r\n"
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
    sent = {"whole": [head + body], "head and body": [head, body], "bytes": [bytes([b]) for b in head + body]}[cuts]
    heard = talk(running, *sent, LAST, pause=0.05 if cuts == "head and body" else 0)
    assert heard.count(b"HTTP/1.1 ") == 2
    assert heard.startswith(b"HTTP/1.1 200")
    assert b'"object":"chat.completion"' in heard
    assert b'"version"' in heard


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("method", [b"POST", b"GET"])
def test_a_body_is_never_a_request(running: Running, upgrade: bytes, method: bytes) -> None:
    inner = b"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: smuggled\r\n\r\n"
    head = method + b" /v1/models HTTP/1.1\r\nHost: x\r\n" + upgrade + b"Content-Length: %d\r\n\r\n" % len(inner)
    heard = talk(running, head, inner, LAST, pause=0.05)
    assert heard.count(b"HTTP/1.1 ") == 2
    assert b"smuggled" not in heard


def test_trailers_are_no_headers(running: Running) -> None:
    head = CHAT + b"Transfer-Encoding: chunked\r\n\r\n"
    body = b"%x\r\n%s\r\n0\r\nX-Request-Id: from-a-trailer\r\n\r\n" % (len(BODY), BODY)
    heard = talk(running, head + body + LAST)
    assert heard.startswith(b"HTTP/1.1 200")
    assert b"from-a-trailer" not in heard


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_no_chunks(running: Running, stream: bool) -> None:
    body = json.dumps({**json.loads(BODY), "stream": stream}).encode()
    head = CHAT.replace(b"1.1", b"1.0").replace(b"Host: x\r\n", b"") + b"Content-Length: %d\r\n\r\n" % len(body)
    told, _, answer = talk(running, head + body).partition(b"\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in told.lower()
    if stream:
        assert answer.startswith(b"data: {")
        assert answer.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(answer)["object"] == "chat.completion"


def test_head_is_answered_wherever_get_is(running: Running, http: httpx.Client) -> None:
    for permission in (permission for routes in API for permission in routes.permissions):
        method, path = permission.route.split(" ")
        if method != "GET" or "follow" in path:
            continue
        path = path.replace("{rest:path}", "none").replace(":path}", "}").replace("{", "").replace("}", "")
        got, head = http.get(path), http.head(path)
        assert head.status_code == got.status_code, path
        assert head.content == b""
        assert head.headers.get("content-type") == got.headers.get("content-type"), path


def test_head_is_counted_by_its_route(running: Running, http: httpx.Client) -> None:
    http.head("/v1/models")
    text = http.get("/metrics").text
    assert 'temper_gateway_requests_total{method="HEAD",route="/v1/models",status="200"}' in text


def test_head_of_a_stream_ends(running: Running, http: httpx.Client) -> None:
    body = {"adapter": "a", "examples": [{"prompt": "p", "completion": "c"}]}
    job = http.post("/v1/train/sft", json=body).json()["id"]
    head = http.head(f"/v1/train/jobs/{job}/events")
    assert (head.status_code, head.content) == (200, b"")


def _raw_deflate(data: bytes) -> bytes:
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflate.compress(data) + deflate.flush()


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZIP", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", _raw_deflate),
    "zstd": ("zstd", zstd.compress),
    "two": ("gzip, zstd", lambda data: zstd.compress(gzip.compress(data))),
    "identity": ("identity", lambda data: data),
}


@pytest.mark.parametrize("name", CODINGS)
def test_coded_bodies_are_read(http: httpx.Client, name: str) -> None:
    coding, code = CODINGS[name]
    headers = {"content-type": "application/json", "content-encoding": coding}
    answer = http.post("/v1/chat/completions", content=code(BODY), headers=headers)
    assert answer.status_code == 200, answer.text
    assert 'route="/v1/chat/completions",status="200"' in http.get("/metrics").text


@pytest.mark.parametrize("name", ["gzip", "deflate", "raw deflate", "zstd", "two"])
def test_a_bomb_is_too_large_and_goes_no_further(running: Running, http: httpx.Client, name: str) -> None:
    coding, code = CODINGS[name]
    bomb = code(bytes(running.inference.settings.max_body_bytes + 1))
    assert len(bomb) < 100_000
    headers = {"content-type": "application/json", "content-encoding": coding}
    answer = http.post("/v1/chat/completions", content=bomb, headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "payload_too_large"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_other_codings_are_refused_by_name(http: httpx.Client, path: str) -> None:
    for coding, named in (("br", "'br'"), ("gzip, compress", "'compress'"), ("gzip, gzip, gzip, gzip", "more than 3")):
        answer = http.post(path, content=b"x", headers={"content-encoding": coding})
        assert answer.status_code == 415
        assert named in answer.json()["error"]["message"]
        assert "gzip" in answer.headers["accept-encoding"]


@pytest.mark.parametrize(
    "broken",
    [b"abc", gzip.compress(BODY)[:-4], gzip.compress(BODY) + b"more"],
    ids=["not gzip", "cut off", "more behind"],  # without them, the time of compression would be part of a test's name
)
def test_bodies_that_do_not_decode_are_refused(http: httpx.Client, broken: bytes) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = http.post("/v1/chat/completions", content=broken, headers=headers)
    assert answer.status_code == 400
    assert "content-encoding" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_byte_order_mark_is_accepted(http: httpx.Client, path: str) -> None:
    headers = {"content-type": "application/json"}
    answer = http.post(path, content=b"\xef\xbb\xbf" + BODY, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    keys = Keys(tmp_path / "keys.json")
    keys.add("someone", Scope.INFERENCE)
    return keys


def test_a_refusal_before_100_continue_ends_the_connection(start: Starter, keys: Keys) -> None:
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS)
    head = CHAT + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    heard = talk(running, head)  # without a body, as the client has not been asked for it
    assert heard.startswith(b"HTTP/1.1 401")
    assert b"\r\nconnection: close\r\n" in heard


def test_a_large_upload_that_is_refused_early_reads_the_refusal(start: Starter, keys: Keys) -> None:
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS)
    size = 8 * 2**20
    heard = talk(running, CHAT + b"Content-Length: %d\r\n\r\n" % size, bytes(size))
    assert heard.startswith(b"HTTP/1.1 401")


def test_the_answer_before_a_broken_request_comes_whole(running: Running) -> None:
    body = json.dumps({**json.loads(BODY), "stream": True}).encode()
    heard = talk(running, CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"nonsense\r\n\r\n")
    answer, _, refusal = heard.partition(b"data: [DONE]\n\n")
    assert b"HTTP/1.1 400" not in answer
    assert refusal.count(b"HTTP/1.1 400") == 1


@pytest.fixture
def hasty() -> Iterator[int]:
    """The port of a server that does not wait long for a head."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    protocol = type("Hasty", (HttpProtocol,), {"head_timeout": 0.2})
    config = uvicorn.Config(
        Starlette(), http=protocol, ws="none", log_config=None, access_log=False, lifespan="off", timeout_keep_alive=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize(("sent", "status"), [(b"GET / HTTP/1.1\r\nHost", b"HTTP/1.1 408"), (b"", b""), (b"\r\n", b"")])
def test_a_head_that_does_not_end_is_not_waited_for(hasty: int, sent: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hasty), timeout=10) as connection:
        connection.sendall(sent)
        with connection.makefile("rb") as stream:
            assert stream.read()[:12] == status
