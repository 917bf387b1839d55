"""What stands before the handlers besides the key: limits, deadlines, bodies, origins."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr, ValidationError

from services.common.pb import engine_pb2
from services.common.security.api_keys import KeyLimits, Scope
from services.gateway.settings import GatewaySettings
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import fails, hangs, says
from tests.unit.gateway.key_file import CHAT, NO_REDIS, Keys, error_of


def limited(tmp_path: Path, start: Starter, **limits: int) -> tuple[Running, httpx.Client]:
    """A gateway, and a client with a key that has these limits."""
    keys = Keys(tmp_path / "keys.json")
    keys.add("me", Scope.INFERENCE, limits=KeyLimits(**limits))
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS)
    return running, httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False, headers=keys.bearer("me"))


def test_tokens_a_minute(tmp_path: Path, start: Starter) -> None:
    running, http = limited(tmp_path, start, tokens_per_minute=100)
    prompt = {"model": MODEL, "prompt": "abcdefghij"}
    with http:
        # Reserved are 10 + 40 tokens, used 10 + 6.
        running.engine.behaviour = says("hello")
        for used in (16, 32):
            answer = http.post("/v1/completions", json=prompt | {"max_tokens": 40})
            assert answer.json()["usage"]["total_tokens"] == 16
            assert abs(int(answer.headers["x-ratelimit-remaining-tokens"]) - (100 - used - 34)) <= 1
        error = error_of(http.post("/v1/completions", json=prompt | {"max_tokens": 70}), 429)
        assert "100 tokens a minute" in error["message"]
        too_much = error_of(http.post("/v1/completions", json=prompt | {"max_tokens": 91}), 400)
        assert (too_much["param"], too_much["code"]) == ("max_tokens", "invalid_request")
        # The prompt of several choices counts once: 10 + 3 * 15 fit into 68, 3 * 25 would not.
        assert http.post("/v1/completions", json=prompt | {"max_tokens": 15, "n": 3}).status_code == 200
        assert http.post("/v1/completions", json=prompt | {"max_tokens": 25, "n": 3}).status_code == 429

        # What an engine refuses costs nothing; a stream that its client leaves costs what it got.
        running.engine.behaviour = fails(engine_pb2.ERROR_CODE_INVALID_REQUEST, "no")
        before = int(http.get("/v1/models").headers["x-ratelimit-remaining-tokens"])
        assert http.post("/v1/completions", json=prompt | {"max_tokens": 20}).status_code == 400
        assert int(http.get("/v1/models").headers["x-ratelimit-remaining-tokens"]) >= before
        running.engine.behaviour = says("hello", pause=0.2)
        before = int(http.get("/v1/models").headers["x-ratelimit-remaining-tokens"])
        body = prompt | {"max_tokens": 20, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            next(stream.iter_lines())
        running.wait_for(lambda: not running.engine.running)
        left = int(http.get("/v1/models").headers["x-ratelimit-remaining-tokens"])
        assert before - 13 <= left <= before - 10


def test_requests_at_a_time(tmp_path: Path, start: Starter) -> None:
    running, http = limited(tmp_path, start, concurrent_requests=2)
    running.engine.behaviour = hangs
    with http:
        route, key = "/v1/chat/completions", http.headers["authorization"]
        with (
            running.send(route, CHAT, headers={"authorization": key}),
            running.send(route, CHAT, headers={"authorization": key}),
        ):
            running.wait_for(lambda: len(running.engine.running) == 2)
            answer = http.post(route, json=CHAT)
            assert "2 requests at a time" in error_of(answer, 429)["message"]
            assert answer.headers["retry-after"] == "1"
        running.wait_for(lambda: http.get("/v1/models").status_code == 200)


def test_a_full_gateway_reads_no_body(start: Starter) -> None:
    running = start(max_in_flight=1)
    reservation = running.inference.admission.reserve(1)
    try:
        answer = _answer_to_head(running, "/v1/chat/completions", "content-length: 9000000")
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"overloaded" in answer
        with httpx.Client(base_url=running.url, verify=False, timeout=PATIENCE) as http:
            assert http.get("/v1/models").status_code == 200
    finally:
        reservation.release()


def _answer_to_head(running: Running, path: str, *headers: str, body: bytes = b"") -> bytes:
    """What comes back to a request whose body never ends, until the connection is closed."""
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *headers]
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        received = b""
        while part := connection.recv(65536):
            received += part
    return received


def test_bodies_in_memory(start: Starter) -> None:
    running = start(max_body_bytes=4000, max_bodies_bytes=5000, body_timeout_seconds=3.0)
    host, port = running.url.removeprefix("http://").split(":")
    with (
        httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http,
        socket.create_connection((host, int(port)), timeout=10) as slow,
    ):
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        slow.sendall(f"{head}content-length: 4000\r\n\r\n{{".encode())
        running.wait_for(lambda: http.post("/v1/chat/completions", content=b" " * 1500).status_code == 503)
        answer = http.post("/v1/chat/completions", content=b" " * 1500)
        assert error_of(answer, 503)["code"] == "overloaded"
        assert answer.headers["retry-after"] == "1"
        answer = http.post("/v1/chat/completions", content=iter([b" " * 500] * 3))
        assert error_of(answer, 503)["code"] == "overloaded", "chunked bodies are counted as they come"
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200, "there is room for a small one"
        received = b""
        while part := slow.recv(65536):
            received += part
        assert received.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in received
        assert http.post("/v1/chat/completions", content=b" " * 3000).status_code == 400, "the place is free again"


def test_multipart_is_no_way_around_the_body_limit(start: Starter) -> None:
    running = start(max_body_bytes=2048)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        for path in ("/v1/chat/completions", "/v1/train/sft"):
            assert error_of(http.post(path, content=b" " * 3000, headers=headers), 413)


def test_deadline(running: Running, http: httpx.Client) -> None:
    def deadline(**headers: str) -> float:
        running.engine.requests.clear()
        before = time.time()
        assert http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
        request = running.engine.requests[0]
        # In both forms: an engine of an earlier release knows the first only.
        sent = request.deadline_unix_ms - request.timeout_ms
        assert before * 1000 - 1 <= sent <= time.time() * 1000
        return request.deadline_unix_ms / 1000 - before

    name = "x-request-timeout-seconds"
    assert 599 < deadline() < 605
    assert 4.9 < deadline(**{name: "5"}) < 6
    assert 599 < deadline(**{name: "5000"}) < 605, "the gateway's own limit caps it"
    assert 599 < deadline(**{"x-stainless-read-timeout": "5", "x-stainless-timeout": "5"}) < 605, "of one byte's wait"
    for wrong in ("0", "-1", "soon", "nan", "inf", ""):
        error = error_of(http.post("/v1/chat/completions", json=CHAT, headers={name: wrong}), 400)
        assert error["param"] == name

    running.engine.behaviour = hangs  # and does not keep to its deadline: then the gateway's own ends it
    began = time.monotonic()
    error = error_of(http.post("/v1/chat/completions", json=CHAT, headers={name: "0.1"}), 504)
    assert error["code"] == "deadline_exceeded"
    assert 2.0 < time.monotonic() - began < 60
    with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}, headers={name: "0.1"}) as stream:
        stream.read()
        # Its headers are sent by then (TEMPER_STREAM_START_SECONDS).
        assert stream.status_code == 200
        last = stream.text.strip().splitlines()[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    error = error_of(http.post("/v1/chat/completions", json=CHAT, headers={name: "0.0000001"}), 504)
    assert error["code"] == "deadline_exceeded"


def test_messages_and_prompt_tokens(start: Starter) -> None:
    running = start(max_messages=2, max_prompt_tokens=20)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        many = CHAT | {"messages": CHAT["messages"] * 3}  # type: ignore[operator]
        assert error_of(http.post("/v1/chat/completions", json=many), 400)["param"] == "messages"
        for path, body in (
            ("completions", {"model": MODEL, "prompt": "x" * 21}),
            ("completions", {"model": MODEL, "prompt": ["x", "x" * 21]}),
            ("chat/completions", CHAT | {"messages": [{"role": "user", "content": "x" * 30}]}),
        ):
            error = error_of(http.post(f"/v1/{path}", json=body), 400)
            assert error["code"] == "context_length_exceeded"
            assert "20" in error["message"]
        assert not running.engine.requests
        assert http.post("/v1/completions", json={"model": MODEL, "prompt": "x" * 20}).status_code == 200


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}


def test_origins_are_closed(http: httpx.Client) -> None:
    answer = http.options("/v1/chat/completions", headers={"origin": "https://evil.example", **PREFLIGHT})
    assert answer.status_code == 405
    answer = http.post("/v1/chat/completions", json=CHAT, headers={"origin": "https://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_origins_that_are_opened(tmp_path: Path, start: Starter) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.add("page", Scope.INFERENCE)
    origins = "https://chat.example.com, http://localhost:3000"
    running = start(cors_allow_origins=origins, api_keys_file=str(keys.path), redis_url=NO_REDIS)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        for origin in ("https://chat.example.com", "http://localhost:3000"):
            answer = http.options("/v1/chat/completions", headers={"origin": origin, **PREFLIGHT})
            assert answer.status_code == 200, "a preflight has no key"
            assert answer.headers["access-control-allow-origin"] == origin
            assert "access-control-allow-credentials" not in answer.headers
            answer = http.post("/v1/chat/completions", json=CHAT, headers={"origin": origin})
            assert answer.status_code == 401
            assert answer.headers["access-control-allow-origin"] == origin, "a page may read why it was refused"
            answer = http.post("/v1/chat/completions", json=CHAT, headers={"origin": origin, **keys.bearer("page")})
            assert answer.status_code == 200
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        for origin in (
            "https://evil.example",
            "https://chat.example.com.evil.example",
            "http://chat.example.com",
            "null",
        ):
            answer = http.options("/v1/chat/completions", headers={"origin": origin, **PREFLIGHT})
            assert answer.status_code == 400
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origins", ["*", "chat.example.com", "https://a.example/", "https://a.example,*", "https://A.x"]
)
def test_origins_that_mean_nothing(origins: str) -> None:
    with pytest.raises(ValidationError, match="is no origin"):
        GatewaySettings(cors_allow_origins=origins)


def test_everybody_may_do_everything_without_keys(http: httpx.Client) -> None:
    for headers in ({}, {"authorization": "Bearer none"}, {"x-api-key": "anything"}):
        assert http.get("/v1/train/jobs", headers=headers).status_code == 200
        answer = http.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


def test_redis_password_is_no_part_of_a_reason(
    tmp_path: Path, start: Starter, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.add("me", Scope.INFERENCE, limits=KeyLimits(requests_per_minute=5))
    running = start(api_keys_file=str(keys.path), redis_url=SecretStr("redis://:hunter2@127.0.0.1:1/0"))
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        assert http.get("/v1/models", headers=keys.bearer("me")).status_code == 200
    running.stop()  # a line of a slow request that is written while pytest reads lands on top of the first one
    out, err = capfd.readouterr()
    assert "counted by each gateway alone" in out
    assert "hunter2" not in out + err


@pytest.mark.parametrize(
    "name",
    ["authorization", "x-api-key", "content-type", "idempotency-key", "x-session-id", "x-request-timeout-seconds"],
)
def test_a_header_that_says_two_things_is_refused(http: httpx.Client, name: str) -> None:
    for path in ("/v1/completions", "/v1/batches"):
        answer = http.post(path, content=b"{}", headers=[(name, "7"), (name.upper(), "8")])
        error = error_of(answer, 400)
        assert (error["param"], "send one" in error["message"]) == (name, True)
    if name == "x-session-id":
        body = {"model": MODEL, "prompt": "a", "max_tokens": 4}
        assert http.post("/v1/completions", json=body, headers=[(name, "7"), (name, "7")]).status_code == 200
