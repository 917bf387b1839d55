"""Samples of Tinker's wire over a real Valkey: any gateway tells how one stands, also after the one that ran it."""

from __future__ import annotations

import asyncio

import pytest
import redis

from services.common.errors import InvalidRequest, Unavailable
from services.common.settings import CommonSettings
from services.gateway.api.training.tinker import samples
from services.gateway.api.training.tinker.samples import Samples


async def test_another_gateway_tells_how_a_sample_stands(settings: CommonSettings, raw: redis.Redis) -> None:
    here, there = Samples(settings), Samples(settings)
    go = asyncio.Event()

    async def drawn() -> bytes:
        await go.wait()
        return b"\x00\xff"

    async def refused() -> bytes:
        raise InvalidRequest("too long")

    async def away() -> bytes:
        raise Unavailable("no engine")

    try:
        await here.begin("a", drawn)
        assert (await there.outcome("a", 0)).state == "running"
        waiting = asyncio.create_task(there.outcome("a", 30))
        go.set()
        found = await waiting
        assert (found.state, found.answer) == ("done", b"\x00\xff")
        await here.begin("b", refused)
        assert await here.outcome("b", 30) == await there.outcome("b", 30)
        told = await there.outcome("b", 30)
        assert (told.state, told.message, told.user) == ("failed", "too long", True)
        await here.begin("c", away)
        assert (await there.outcome("c", 30)).state == "lost"
        assert (await there.outcome("nobody's", 30)).state == "lost"
        go.clear()
        await here.begin("d", drawn)
        assert 0 < raw.ttl(samples._key("d")) <= samples._RUNNING_SECONDS, "a gateway that dies is noticed soon"
        await here.stop()
        assert (await there.outcome("d", 30)).state == "lost"
    finally:
        await there.stop()


async def test_what_runs_is_told_again_and_again(
    settings: CommonSettings, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "_RUNNING_SECONDS", 1)
    here = Samples(settings)
    here.start()
    go = asyncio.Event()

    async def drawn() -> bytes:
        await go.wait()
        return b"x"

    try:
        await here.begin("a", drawn)
        await asyncio.sleep(1.5)
        assert raw.exists(samples._key("a"))
        go.set()
        assert (await here.outcome("a", 30)).answer == b"x"
        await asyncio.sleep(0.5)
        assert raw.ttl(samples._key("a")) > 60, "an answer keeps its time"
    finally:
        await here.stop()
