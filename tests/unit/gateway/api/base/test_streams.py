"""Event streams as they are on the wire: while they wait, when they fail, and when nobody reads them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator

import httpx
import pytest

from services.common.errors import Unavailable
from services.common.pb import engine_pb2
from services.gateway.api.base.serving import StartedEvents, error_event
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import Behaviour, FakeEngine, fails, hangs, says

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
ROUTE = "/v1/chat/completions"


def after(seconds: float, then: Behaviour) -> Behaviour:
    """Waits first."""

    async def behave(engine, request, send) -> None:
        await asyncio.sleep(seconds)
        await then(engine, request, send)

    return behave


def when(event: asyncio.Event, then: Behaviour) -> Behaviour:
    """Waits until a test says so."""

    async def behave(engine, request, send) -> None:
        await event.wait()
        await then(engine, request, send)

    return behave


async def set_(event: asyncio.Event) -> None:
    event.set()


def send(running: Running, body: dict[str, object], *, receive_buffer: int = 0) -> socket.socket:
    return running.send(ROUTE, body, receive_buffer=receive_buffer)


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    found = b""
    while mark not in found:
        part = connection.recv(65536)
        assert part, f"the connection ended without {mark!r}: {found!r}"
        found += part
    return found


def test_a_stream_that_waits_shows_that_it_lives(start: Starter) -> None:
    tokens_come = asyncio.Event()
    engine = FakeEngine(behaviour=when(tokens_come, says("ab")), attached="bot@1")
    running = start(engine, stream_start_seconds=0.1, keep_alive_seconds=0.15)
    with send(running, CHAT) as connection:
        head = read_until(connection, b": keep-alive\n\n")  # before the first token
        read_until(connection, b": keep-alive\n\n")
        status, _, rest = head.partition(b"\r\n")
        assert status == b"HTTP/1.1 200 OK"
        headers = dict(line.split(b": ", 1) for line in rest.split(b"\r\n\r\n")[0].split(b"\r\n"))
        assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
        assert headers[b"cache-control"] == b"no-cache"
        assert headers[b"x-accel-buffering"] == b"no"
        assert b"x-temper-adapter" not in headers, "nobody knew yet which version answers"
        running.run(set_(tokens_come))
        body = read_until(connection, b"data: [DONE]\n\n")
    assert b'"adapter":"bot@1"' in body


def test_a_stream_that_begins_soon_has_its_version_in_the_head(start: Starter) -> None:
    running = start(FakeEngine(behaviour=after(0.1, says("ab")), attached="bot@1"), stream_start_seconds=60)
    answer = httpx.post(running.url + ROUTE, json=CHAT, timeout=PATIENCE)
    assert answer.headers["x-temper-adapter"] == "bot@1"
    assert ": keep-alive" not in answer.text


FAILING = fails(engine_pb2.ERROR_CODE_MODEL_NOT_FOUND, "there is no adapter of this name")


def test_what_fails_early_is_an_answer(start: Starter) -> None:
    running = start(FakeEngine(behaviour=FAILING), stream_start_seconds=60)
    answer = httpx.post(running.url + ROUTE, json=CHAT, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_what_fails_late_is_an_event(start: Starter) -> None:
    let_go = asyncio.Event()
    running = start(FakeEngine(behaviour=when(let_go, FAILING)), stream_start_seconds=0.2)
    with httpx.stream("POST", running.url + ROUTE, json=CHAT, timeout=PATIENCE) as answer:
        assert answer.status_code == 200
        running.run(set_(let_go))
        text = answer.read().decode()
    comment, event, nothing = text.split("\n\n")
    assert (comment, nothing) == (": keep-alive", "")
    error = json.loads(event.removeprefix("data: "))["error"]
    assert error == {
        "message": "there is no adapter of this name",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_a_response_that_fails_late_says_so_in_its_own_events(start: Starter) -> None:
    let_go = asyncio.Event()
    running = start(FakeEngine(behaviour=when(let_go, FAILING)), stream_start_seconds=0.1)
    body = {"model": MODEL, "input": "hi", "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/responses", json=body, timeout=PATIENCE) as answer:
        assert answer.status_code == 200
        running.run(set_(let_go))
        text = answer.read().decode()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2]
    assert "no adapter of this name" in events[-1]["response"]["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_while_they_wait_for_an_engine(start: Starter, stream: bool) -> None:
    running = start(engine_retry_seconds=30, stream_start_seconds=0.1)
    running.run(running.engine.stop())
    running.wait_for(lambda: not running.inference.engines.ready)
    with send(running, CHAT | {"stream": stream, "n": 2}):
        running.wait_for(lambda: bool(running.inference.engines._waiters))
        time.sleep(0.3)  # a stream has begun by then
        assert running.inference.admission.in_flight == 2
    running.wait_for(lambda: running.inference.admission.in_flight == 0)
    running.wait_for(lambda: not running.inference.engines._waiters)
    running.run(running.engine.start(running.engine.port))
    running.wait_for(lambda: running.inference.engines.ready)
    assert not running.engine.requests, "nothing of it is sent later"


def test_a_client_that_leaves_a_stream_that_waits(start: Starter) -> None:
    running = start(FakeEngine(behaviour=hangs), stream_start_seconds=0.05)
    with send(running, CHAT | {"n": 3}) as connection:
        read_until(connection, b": keep-alive\n\n")
        assert len(running.engine.running) == 3
    running.wait_for(lambda: len(running.engine.aborts) == 3)
    running.wait_for(lambda: running.inference.admission.in_flight == 0)


def test_a_client_that_leaves_while_its_prompt_is_tokenized(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start(offload_chars=0)
    codec = running.inference.engines.served.codec
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    tokenize = codec.encode_chat

    def encode(*args, **kwargs):
        begun.set()
        assert go_on.wait(PATIENCE)
        try:
            return tokenize(*args, **kwargs)
        finally:
            ended.set()

    monkeypatch.setattr(codec, "encode_chat", encode)
    with send(running, CHAT):
        assert begun.wait(PATIENCE)
        assert running.inference.admission.in_flight == 1
    running.wait_for(lambda: running.inference.admission.in_flight == 0)  # while it is tokenized
    go_on.set()
    assert ended.wait(PATIENCE)
    time.sleep(0.1)
    assert not running.engine.requests


LONG = CHAT | {"max_tokens": 60_000, "return_token_ids": True}


def test_a_client_that_reads_nothing_is_cut_off(start: Starter) -> None:
    engine = FakeEngine(behaviour=says([120] * 50_000, per_update=500, pause=0.02), max_model_len=10**6)
    running = start(engine, write_timeout_seconds=0.4, send_buffer=16384)
    with send(running, LONG, receive_buffer=4096) as connection:
        running.wait_for(lambda: bool(engine.aborts))
        assert len(engine.aborts) == 1
        running.wait_for(lambda: running.inference.admission.in_flight == 0)
        # What the kernel had taken is still there, and then nothing: the connection was cut, not ended.
        rest = b""
        while part := connection.recv(65536):
            rest += part
        assert b"[DONE]" not in rest
        assert not rest.endswith(b"0\r\n\r\n")


def test_a_client_that_reads_slowly_is_not_cut_off(start: Starter) -> None:
    # Many times what can be read until then: a stream that has ended would look like one that was cut off.
    engine = FakeEngine(behaviour=says([120] * 800_000, per_update=500, pause=0.01), max_model_len=10**6)
    running = start(engine, write_timeout_seconds=2.0, send_buffer=16384)
    with send(running, LONG | {"max_tokens": 900_000}, receive_buffer=4096) as connection:
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            assert connection.recv(4096)
            time.sleep(0.02)
        assert not engine.aborts
        assert running.inference.admission.in_flight == 1


def test_a_stream_has_an_end_even_if_it_is_read_ever_so_slowly(start: Starter) -> None:
    engine = FakeEngine(behaviour=says([120] * 50_000, per_update=500), max_model_len=10**6)
    running = start(engine, request_timeout_seconds=0.5, write_timeout_seconds=0.6, send_buffer=16384)
    with send(running, LONG, receive_buffer=4096) as connection:
        running.wait_for(lambda: running.inference.admission.in_flight > 0)
        until = time.monotonic() + 60
        while running.inference.admission.in_flight:
            assert time.monotonic() < until, "its place is given back"
            connection.recv(1024)
            time.sleep(0.02)


async def _one(closed: list[int]) -> AsyncGenerator[bytes, None]:
    try:
        yield b"one"
        await asyncio.Event().wait()
    finally:
        closed.append(1)


@pytest.mark.parametrize("reads", [0, 1])
async def test_events_are_closed_however_much_was_read(reads: int) -> None:
    closed: list[int] = []
    events = StartedEvents(_one(closed), error_event)
    assert await events.started(PATIENCE)
    for _ in range(reads):
        assert await anext(events) == b"one"
    await events.aclose()
    assert closed == [1]
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_a_reader_that_is_cancelled_does_not_keep_events_open() -> None:
    async def never() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    events = StartedEvents(never(), error_event)
    assert not await events.started(0.0)
    reader = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    await asyncio.wait_for(events.aclose(), PATIENCE)


async def test_nothing_follows_a_failure() -> None:
    async def breaks() -> AsyncGenerator[bytes, None]:
        yield b"one"
        raise Unavailable("gone")

    events = StartedEvents(breaks(), error_event)
    found = [item async for item in events]
    assert found[0] == b"one"
    assert json.loads(found[1].removeprefix(b"data: "))["error"]["code"] == "unavailable"
    assert len(found) == 2
