"""Links do to connections what they say, a seed makes the same faults, and a short campaign leaves everything whole."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import httpx
import pytest

from tests.chaos.campaign import Plan, campaign
from tests.chaos.clock import Offset
from tests.chaos.faults import REFUSED, Event, events
from tests.chaos.fleet import Sizes
from tests.chaos.http_damage import Damage
from tests.chaos.ledger import Ledger
from tests.chaos.limits import limited
from tests.chaos.link import Fault, Link, Weather
from tests.chaos.refusals import REFUSALS
from tests.chaos.stores import Stores
from tests.stack import PATIENCE, clean_environment


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


def test_objects_are_found_in_a_connection_however_it_is_cut_up() -> None:
    """Heads and bodies of answers to GET, and nothing of listings, errors, or answers to HEAD and PUT."""
    asked = [b"GET /b/one", b"HEAD /b/one", b"PUT /b/two", b"GET /b?list-type=2", b"GET /b/none", b"GET /b/two"]
    kinds = [b"", b"", b"", b"application/xml", b"application/xml", b""]
    statuses = [b"200 OK", b"200 OK", b"200 OK", b"200 OK", b"404 None", b"206 Part"]
    bodies = [b"first", b"", b"", b"<list/>", b"<error/>", b"second"]
    said = [len(body) if line != b"HEAD /b/one" else 5 for line, body in zip(asked, bodies, strict=True)]
    requests = b"".join(
        line + b" HTTP/1.1\r\nContent-Length: " + (b"3\r\n\r\nput" if line[:3] == b"PUT" else b"0\r\n\r\n")
        for line in asked
    )
    answers = b"".join(
        b"HTTP/1.1 %s\r\nContent-Type: %s\r\ncontent-length: %d\r\n\r\n%s" % parts
        for parts in zip(statuses, kinds, said, bodies, strict=True)
    )
    wanted = [answers.index(b"first"), answers.index(b"second")]
    for size in (1, 7, 100, len(answers)):
        damage = Damage()
        for at in range(0, len(requests), size):
            damage.request(requests[at : at + size])
        found = [at + where for at in range(0, len(answers), size) for where in damage.answer(answers[at : at + size])]
        # A piece that ends with a head has no byte of the body to change.
        assert [at for at in found if answers[at : at + 1] in (b"f", b"s")] == found
        assert found == (wanted if size == len(answers) else [at for at in wanted if at in found])


def test_a_clock_that_is_moved_while_its_process_runs(tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text(
        "import sys, time\nfor line in sys.stdin:\n    print(time.time(), time.monotonic(), flush=True)\n"
    )
    offset = Offset(tmp_path / "clock")
    env = clean_environment({"CHAOS_CLOCK": str(tmp_path / "clock"), "CHAOS_MODULE": "asked"})
    env["PYTHONPATH"] += f":{tmp_path}"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.clock"],
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for seconds in (0.0, 3600.0, -60.0):
            offset.seconds = seconds
            before = time.time(), time.monotonic()
            process.stdin.write("now\n")
            process.stdin.flush()
            wall, steady = map(float, process.stdout.readline().split())
            after = time.time(), time.monotonic()
            assert before[0] <= wall - seconds <= after[0]
            assert before[1] <= steady <= after[1]
        process.stdin.close()


_HUNGRY = """
import sys
with open(sys.argv[1], "wb", buffering=0) as file:
    for line in sys.stdin:
        try:
            file.write(bytes(100_000)) if line == "disk\\n" else bytearray(500_000_000)
            print("had", flush=True)
        except (OSError, MemoryError) as error:
            print(type(error).__name__, flush=True)
"""


def test_a_process_that_is_out_of_disk_or_memory_for_a_while(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HUNGRY, str(tmp_path / "file")],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def asked(what: str) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{what}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        for what, error in (("disk", "OSError"), ("memory", "MemoryError")):
            assert asked(what) == "had"
            with limited(process.pid, what, 4096.0):
                assert asked(what) == error
            assert asked(what) == "had"
        process.stdin.close()
    with limited(process.pid, "disk", 0.0):
        pass  # it is gone, and so is its limit


def test_a_seed_makes_the_same_faults() -> None:
    processes, links = ["gateway", "127.0.0.1:1"], ["gateway-redis", "gateway-s3", "gateway-127.0.0.1:1"]
    first = list(islice(events(3, processes, links), 600))
    assert first == list(islice(events(3, processes, links), 600))
    assert first != list(islice(events(4, processes, links), 600))
    assert {event.kind for event in first} == {
        *("kill", "term", "twice", "hang up", "freeze", "link", "refuses", "disk", "memory", "clock", "renew", "roll")
    }
    assert {event.code for event in first if event.kind == "refuses"} == set(REFUSED) < set(REFUSALS)
    assert {event.fault.weather for event in first} == set(Weather)
    ours = (Weather.ANSWERS, Weather.DAMAGED)
    assert all(event.what.endswith("-s3") for event in first if event.fault.weather in ours)


def broken(directory: Path, plan: Plan) -> Ledger:
    """What a campaign leaves, on stores of its own; it has found nothing wrong."""
    with Stores(directory / "data") as stores:
        ledger = campaign(stores, directory, plan)
    assert ledger.breaches == [], ledger.summary()
    assert ledger.parts["streams"]["chat whole"] > 0
    assert ledger.histories()["operations"] > 20
    return ledger


@pytest.mark.timeout(600)
def test_a_short_campaign_leaves_everything_whole(tmp_path: Path) -> None:
    """Damaged objects, a clock that jumps, a store that is silent, another that refuses, a gateway that stops."""
    parts = frozenset({"sessions", "swaps", "responses", "feedback", "steered jobs"})
    sizes = Sizes(engines=1, gateways=2)
    faults = (
        Event(1.0, "link", "gateway-s3", 0.7, Fault(Weather.DAMAGED, 1.0)),
        Event(0.9, "clock", "gateway", 0.9, amount=2.0),
        Event(1.5, "link", "gateway-s3", 2.1, Fault(Weather.SILENT)),
        Event(0.8, "refuses", "redis", 1.0, code="READONLY"),
        Event(0.9, "term", "gateway", 1.1),
    )
    plan = Plan(0.0, 75, streams=1, jobs=0, sizes=sizes, parts=parts, questions=1, pace=3.0, sequence=faults)
    ledger = broken(tmp_path, plan)
    assert list(ledger.faults) == [event.label for event in faults]


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_campaign_with_traffic_and_jobs_of_every_kind(tmp_path: Path) -> None:
    ledger = broken(tmp_path, Plan(30.0, seed=1, streams=1, sizes=Sizes(engines=2, gateways=2)))
    assert ledger.faults.total() >= 3
    assert ledger.parts["compared jobs"]["succeeded"] >= 1
