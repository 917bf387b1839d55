"""Links do to connections what they say, a seed makes the same faults, and a short campaign leaves everything whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import httpx
import pytest

from tests.chaos.campaign import Plan, campaign
from tests.chaos.faults import events
from tests.chaos.fleet import Sizes
from tests.chaos.link import Fault, Link, Weather
from tests.stack import PATIENCE, Stack


@asynccontextmanager
async def echo_behind_a_link() -> AsyncIterator[Link]:
    """A server that sends back what it gets, and a link to it."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1024):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = Link("here-there", *server.sockets[0].getsockname()[:2])
    await link.start()
    try:
        yield link
    finally:
        await link.stop()
        server.close()


async def said(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    return await asyncio.wait_for(reader.readexactly(len(data)), PATIENCE)


async def test_a_link_delays_and_narrows() -> None:
    async with echo_behind_a_link() as link:
        ends = await asyncio.open_connection("127.0.0.1", link.port)
        assert await said(*ends, b"fair") == b"fair"
        for fault, size, least in ((Fault(Weather.SLOW, 0.1), 4, 0.2), (Fault(Weather.NARROW, 1000.0), 100, 0.2)):
            link.become(fault)
            began = time.monotonic()
            assert await said(*ends, b"x" * size) == b"x" * size
            assert time.monotonic() - began >= least
        ends[1].close()


async def test_a_silent_link_keeps_what_it_has_until_the_weather_changes() -> None:
    async with echo_behind_a_link() as link:
        link.become(Fault(Weather.SILENT))
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(b"kept")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        link.become(Fault())
        assert await asyncio.wait_for(reader.readexactly(4), PATIENCE) == b"kept"
        writer.close()


async def test_a_link_cuts_what_is_there_and_what_comes() -> None:
    async with echo_behind_a_link() as link:
        ends = await asyncio.open_connection("127.0.0.1", link.port)
        assert await said(*ends, b"fair") == b"fair"
        link.become(Fault(Weather.RESET))
        for reader, writer in (ends, await asyncio.open_connection("127.0.0.1", link.port)):
            with pytest.raises(ConnectionError):
                await said(reader, writer, b"x")
            writer.close()


async def test_a_link_answers_in_the_place_of_a_server() -> None:
    async with echo_behind_a_link() as link:
        link.become(Fault(Weather.ANSWERS, 503.0))
        async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as client:
            answer = await client.get(f"http://127.0.0.1:{link.port}/bucket/key")
        assert (answer.status_code, "InternalError" in answer.text) == (503, True)


def test_a_seed_makes_the_same_faults() -> None:
    processes, links = ["gateway", "127.0.0.1:1"], ["gateway-redis", "gateway-s3", "gateway-127.0.0.1:1"]
    first = list(islice(events(3, processes, links), 200))
    assert first == list(islice(events(3, processes, links), 200))
    assert first != list(islice(events(4, processes, links), 200))
    assert {event.kind for event in first} == {"kill", "term", "freeze", "link"}
    assert {event.fault.weather for event in first} == set(Weather)
    assert all(event.what.endswith("-s3") for event in first if event.fault.weather is Weather.ANSWERS)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_short_campaign_leaves_everything_whole(tmp_path: Path) -> None:
    plan = Plan(20.0, seed=1, streams=2, jobs=1, sizes=Sizes(engines=2, gateways=2))
    with Stack(tmp_path / "data", env={"TEMPER_TRAINER": "false"}) as stack:
        ledger = campaign(stack, tmp_path, plan)
    assert ledger.breaches == [], ledger.summary()
    assert ledger.faults.total() >= 3
    assert ledger.ends["whole"] > 0
    assert ledger.jobs["succeeded"] >= 1
