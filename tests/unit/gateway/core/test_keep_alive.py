"""Comments that keep a silent stream open, where the client takes none of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

import pytest
from starlette.types import Message

from services.gateway.core import sse
from services.gateway.core.sse import KEEP_ALIVE, EventStream


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def test_a_comment_that_waits_for_its_client_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    tick = sse._Ticker._tick

    def counted(ticker: sse._Ticker) -> None:
        nonlocal looks
        looks += 1
        tick(ticker)

    monkeypatch.setattr(sse._Ticker, "_tick", counted)
    end, readable, sent = asyncio.Event(), asyncio.Event(), list[bytes]()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"first"
        await end.wait()

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        if sent[-1] == KEEP_ALIVE:
            await readable.wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    response = asyncio.create_task(EventStream(events(), keep_alive=0.02)({"type": "http"}, receive, send))
    began = time.monotonic()
    await until(lambda: looks >= 10)
    assert looks <= 2 + (time.monotonic() - began) / 0.02, "one each 0.02 s"
    assert sent.count(KEEP_ALIVE) == 1
    readable.set()
    await until(lambda: sent.count(KEEP_ALIVE) >= 2)
    end.set()
    await response
    assert (sent[1], sent[-1]) == (b"first", b"")
