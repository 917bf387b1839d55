"""Engines that come and go, fail and recover."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from services.common.errors import Overloaded, TemperError, Unavailable
from services.common.pb import engine_pb2
from services.gateway.core.addresses import EngineTarget
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.engines.circuit_breaker import BreakerState
from services.gateway.engines.client import EngineClient
from services.gateway.engines.discovery import Discovery, resolve
from services.gateway.engines.load_balancing import TOKENS_PER_REQUEST, Affinity, route_of
from services.gateway.engines.pool import EnginePool
from services.gateway.engines.prefix_index import joined
from services.gateway.settings import GatewaySettings
from tests.unit.gateway.conftest import MODEL
from tests.unit.gateway.fake_engine import FakeEngine, dies, fails, hangs, says

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ROUTE = "/v1/chat/completions"
_numbers = itertools.count()


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


def request(tokens: list[int] | None = None) -> engine_pb2.GenerateRequest:
    return engine_pb2.GenerateRequest(
        request_id=f"r{next(_numbers)}",
        prompt_token_ids=tokens or [1, 2, 3],
        sampling=engine_pb2.SamplingParams(max_tokens=100),
        adapter=engine_pb2.AdapterRef(attached=True),
    )


async def run(pool: EnginePool, sent: engine_pb2.GenerateRequest, affinity: Affinity | None = None) -> list[int]:
    """The tokens of a request."""
    tokens: list[int] = []
    async with pool.request_group([sent], affinity) as group:
        async for _, update in group:
            tokens += update.token_ids
    return tokens


class Names:
    """A resolver whose answers the test decides."""

    def __init__(self) -> None:
        self.found: set[str] | Exception = set()
        self.asked = 0

    async def __call__(self, host: str, port: int) -> set[str]:
        self.asked += 1
        assert (host, port) == ("engines.test", 50051)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.fixture
def names() -> Names:
    return Names()


Maker = Callable[..., EnginePool]


@pytest.fixture
async def make(names: Names) -> AsyncIterator[Maker]:
    pools: list[EnginePool] = []

    def begin(engines: list[FakeEngine] | None = None, **settings: object) -> EnginePool:
        listed = "dns:///engines.test:50051" if engines is None else ",".join(map(address, engines))
        values: dict[str, object] = {"engines": listed, "engines_dns_seconds": 0.02, "status_interval_seconds": 0.05}
        pool = EnginePool(GatewaySettings(**{**values, **settings}), GatewayMetrics(), names)  # type: ignore[arg-type]
        pools.append(pool)
        pool.start()
        return pool

    yield begin
    for pool in pools:
        await pool.stop()


def address(engine: FakeEngine) -> str:
    return f"127.0.0.1:{engine.port}"


def ready(pool: EnginePool) -> set[str]:
    return {client.address for client in pool.clients if client.ready}


def client_of(pool: EnginePool, engine: FakeEngine) -> EngineClient:
    return next(client for client in pool.clients if client.address == address(engine))


# -- discovery


async def test_engines_of_a_name_come_and_go(engines: list[FakeEngine], names: Names, make: Maker) -> None:
    pool = make(engine_retry_seconds=0.2)
    assert not pool.clients
    first, second, third = engines
    names.found = {address(first)}
    await until(lambda: ready(pool) == {address(first)})
    names.found = {address(first), address(second)}
    await until(lambda: len(ready(pool)) == 2)

    first.behaviour = says("x" * 40, pause=0.05)
    second.draining = True
    await until(lambda: ready(pool) == {address(first)})
    stays = asyncio.create_task(run(pool, request()))
    await until(lambda: first.running)
    second.draining = False
    names.found = {address(second), address(third)}
    await until(lambda: ready(pool) == {address(second), address(third)})
    for number in range(6):
        assert await run(pool, request([number] * 5))
    assert len(first.requests) == 1, "an engine that left gets nothing new"
    assert not stays.done()
    assert client_of(pool, first).connected, "what runs there is not cut off"
    assert len(await stays) == 41
    await until(lambda: address(first) not in {client.address for client in pool.clients})
    names.found = {address(first), address(second), address(third)}
    await until(lambda: len(ready(pool)) == 3)


async def test_an_engine_that_is_back_soon_keeps_its_connection(
    engines: list[FakeEngine], names: Names, make: Maker
) -> None:
    pool = make()
    names.found = {address(engine) for engine in engines}
    await until(lambda: len(ready(pool)) == 3)
    client = client_of(pool, engines[0])
    names.found = {address(engines[1])}
    await until(lambda: len(ready(pool)) == 1)
    names.found = {address(engine) for engine in engines}
    await until(lambda: len(ready(pool)) == 3)
    assert client_of(pool, engines[0]) is client


async def test_a_resolver_without_an_answer_takes_no_engine_away(
    engines: list[FakeEngine], names: Names, make: Maker
) -> None:
    pool = make()
    names.found = {address(engine) for engine in engines}
    await until(lambda: len(ready(pool)) == 3)
    silences = (OSError("the name server does not answer"), RuntimeError("can't start new thread"), set[str]())
    for silence in silences:
        names.found = silence
        before = names.asked
        await until(lambda before=before: names.asked > before + 3)  # type: ignore[misc]
        assert len(ready(pool)) == 3


async def test_given_addresses_and_names_go_together(names: Names) -> None:
    told: list[frozenset[str]] = []
    targets = [EngineTarget.parse(text) for text in ("10.0.0.1:5", "dns:///engines.test:50051", "[::1]:6")]
    names.found = {"10.0.0.9:50051"}
    discovery = Discovery(targets, 0.01, told.append, names)
    assert discovery.given == {"10.0.0.1:5", "[::1]:6"}
    running = asyncio.create_task(discovery.run())
    await until(lambda: names.asked > 2)
    running.cancel()
    assert told == [discovery.given | {"10.0.0.9:50051"}], "told once, not each time"


async def test_the_systems_resolver() -> None:
    assert "127.0.0.1:1234" in await resolve("localhost", 1234)
    assert await resolve("127.0.0.1", 5) == {"127.0.0.1:5"}
    with pytest.raises((OSError, UnicodeError)):
        await resolve("no-such-host.invalid", 1)


@pytest.mark.parametrize(
    "wrong", ["engine", "engine:0", "engine:x", ":5", "dns:///name", "dns://server/name:5", "::1:5"]
)
def test_engines_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(ValidationError, match="is not an engine"):
        GatewaySettings(engines=f"127.0.0.1:1,{wrong}")


# -- failures


async def test_an_engine_that_fails_gets_nothing_until_it_has_proved_itself(
    engines: list[FakeEngine], make: Maker
) -> None:
    bad, good = engines[:2]
    pool = make([bad, good], breaker_failures=2, breaker_open_seconds=60)
    await until(lambda: len(ready(pool)) == 2)
    client = client_of(pool, bad)
    bad.behaviour = fails(engine_pb2.ERROR_CODE_INTERNAL, "a kernel failed")
    failures = 0
    for number in itertools.count():
        if client.breaker.state is BreakerState.OPEN:
            break
        try:
            await run(pool, request([number] * 5))
        except TemperError:
            failures += 1
    assert failures == 2
    had = len(bad.requests)
    for number in range(20):
        assert await run(pool, request([number] * 5)), "the other one has them all"
    assert len(bad.requests) == had

    bad.behaviour = hangs
    assert client.breaker.state is BreakerState.OPEN
    client.breaker._open_until = asyncio.get_running_loop().time()  # the pause is over
    assert client.breaker.state is BreakerState.HALF_OPEN
    sent = [asyncio.create_task(run(pool, request([number] * 5))) for number in range(30)]
    await until(lambda: sum(task.done() for task in sent) == 29)
    assert len(bad.requests) == had + 1, "one request is the probe"
    next(task for task in sent if not task.done()).cancel()
    await asyncio.gather(*sent, return_exceptions=True)
    bad.behaviour = says("well again")
    for number in itertools.count():
        if client.breaker.state is BreakerState.CLOSED:
            break
        await run(pool, request([number] * 5))


async def test_when_all_fail_one_is_tried(engines: list[FakeEngine], make: Maker) -> None:
    pool = make(engines, breaker_failures=1, breaker_open_seconds=60)
    await until(lambda: len(ready(pool)) == 3)
    for engine in engines:
        engine.behaviour = fails(engine_pb2.ERROR_CODE_INTERNAL, "a kernel failed")
    for number in range(20):
        with pytest.raises(TemperError, match="a kernel failed"):
            await run(pool, request([number] * 5))
    assert all(client.breaker.state is BreakerState.OPEN for client in pool.clients)
    assert pool.ready
    for engine in engines:
        engine.behaviour = says("ok")
    assert await run(pool, request())
    assert BreakerState.CLOSED in {client.breaker.state for client in pool.clients}


async def test_refusals_do_not_open_a_breaker(engines: list[FakeEngine], make: Maker) -> None:
    pool = make(engines[:1], breaker_failures=1, engine_retry_seconds=0.0)
    await until(lambda: ready(pool))
    for code in (engine_pb2.ERROR_CODE_OVERLOADED, engine_pb2.ERROR_CODE_INVALID_REQUEST):
        engines[0].behaviour = fails(code, "no")
        with pytest.raises(TemperError, match="no"):
            await run(pool, request())
    assert pool.clients[0].breaker.state is BreakerState.CLOSED


async def test_an_engine_without_memory_is_left_alone(engines: list[FakeEngine], make: Maker) -> None:
    bad, good = engines[:2]
    pool = make([bad, good], breaker_failures=2, breaker_open_seconds=60)
    await until(lambda: len(ready(pool)) == 2)
    bad.behaviour = fails(engine_pb2.ERROR_CODE_OVERLOADED, "no memory is left", exhausted=True)
    for number in itertools.count():
        if client_of(pool, bad).breaker.state is BreakerState.OPEN:
            break
        assert await run(pool, request([number] * 5)), "the other one answers meanwhile"
    assert len(bad.requests) == 2
    assert client_of(pool, good).breaker.state is BreakerState.CLOSED


async def test_each_full_engine_is_asked_once(engines: list[FakeEngine], make: Maker) -> None:
    pool = make(engines)
    await until(lambda: len(ready(pool)) == 3)
    for engine in engines:
        engine.behaviour = fails(engine_pb2.ERROR_CODE_OVERLOADED, "64 requests wait already")
    async with asyncio.timeout(60):
        with pytest.raises(Overloaded):
            await run(pool, request())
    assert [len(engine.requests) for engine in engines] == [1, 1, 1]


async def test_attempts_are_bounded(engines: list[FakeEngine], make: Maker) -> None:
    pool = make(engines[:2], engine_attempts=3)
    await until(lambda: len(ready(pool)) == 2)
    for engine in engines:
        engine.behaviour = dies()
    with pytest.raises(Unavailable, match="3 engines were lost"):
        await run(pool, request())
    assert sum(len(engine.requests) for engine in engines) == 3
    assert engines[0].requests, "both were asked"
    assert engines[1].requests


async def test_a_silent_engine_gets_nothing_new(engines: list[FakeEngine], make: Maker, monkeypatch) -> None:
    silent = engines[0]
    pool = make(engines[:2])
    await until(lambda: len(ready(pool)) == 2)
    hold = asyncio.Event()

    silent.behaviour = says("x" * 60, pause=0.02)
    engines[1].draining = True
    await until(lambda: ready(pool) == {address(silent)})
    running = asyncio.create_task(run(pool, request()))
    await until(lambda: silent.running)
    monkeypatch.setattr(pool.clients[0], "_ask_status", _stuck(pool.clients[0], hold))
    engines[1].draining = False
    await until(lambda: ready(pool) == {address(engines[1])})
    assert len(await running) == 61, "what it has goes on"
    hold.set()
    await until(lambda: len(ready(pool)) == 2)


def _stuck(client: EngineClient, hold: asyncio.Event):
    ask = client._ask_status

    async def wait(stub) -> None:
        if not hold.is_set():
            await stub.GetStatus(engine_pb2.GetStatusRequest(), timeout=0)
        await ask(stub)

    return wait


async def test_an_engine_that_sends_another_tokenizer_than_it_announced_is_kept_out(
    engines: list[FakeEngine], make: Maker
) -> None:
    engine, codec = engines[0], engines[0].codec
    engine.codec = SimpleNamespace(digest="0" * 64, files=codec.files)
    pool = make([engine])
    await until(lambda: "announced was 000000000000" in pool.clients[0].last_error)
    assert not ready(pool)
    with pytest.raises(Unavailable, match=f"the tokenizer files have digest {codec.digest[:12]}"):
        _ = pool.served
    engine.codec = codec
    await until(lambda: ready(pool))
    assert pool.served.codec.digest == codec.digest


# -- sessions


async def test_a_session_moves_only_when_its_engine_goes(engines: list[FakeEngine], make: Maker) -> None:
    pool = make(engines, sticky_sessions=2)
    await until(lambda: len(ready(pool)) == 3)
    for number in range(6):
        await run(pool, request([number] * 100), Affinity("s"))
    counts = [len(engine.requests) for engine in engines]
    assert sorted(counts) == [0, 0, 6]
    home = engines[counts.index(6)]
    home.draining = True
    await until(lambda: len(ready(pool)) == 2)
    await run(pool, request(), Affinity("s"))
    moved = next(engine for engine in engines if engine is not home and engine.requests)
    home.draining = False
    await until(lambda: len(ready(pool)) == 3)
    await run(pool, request(), Affinity("s"))
    assert (len(home.requests), len(moved.requests)) == (6, 2), "it stays where it went"
    for name in "abc":
        await run(pool, request(), Affinity(name))
    assert list(pool._sessions) == [("", "b"), ("", "c")]


async def test_an_engine_that_tells_of_less_than_before_has_lost_it(engines: list[FakeEngine], make: Maker) -> None:
    pool = make(engines[:1])
    await until(lambda: ready(pool))
    engine, client = engines[0], client_of(pool, engines[0])
    common, longer = list(range(4 * 64)), list(range(9 * 64))
    chain = route_of(request(), longer, Affinity()).chain
    await run(pool, request(longer))
    engine.cached_tokens = 4 * 64
    await run(pool, request([*common, 1, 2, 3]))
    assert client.prefixes.matched(chain) == 9
    engine.cached_tokens = 0
    for asked in (
        engine_pb2.GenerateRequest(pooling=engine_pb2.POOLING_LAST),
        engine_pb2.GenerateRequest(prompt_logprobs=0),
    ):
        asked.MergeFrom(request([*common, 4, 5, 6]))
        await run(pool, asked)
        assert client.prefixes.matched(chain) == 9, "such a prompt is read whole"
    engine.behaviour = fails(engine_pb2.ERROR_CODE_INVALID_REQUEST, "no")
    with pytest.raises(TemperError):
        await run(pool, request([*common, 7]))
    assert client.prefixes.matched(chain) == 9, "nor does a refusal say anything"
    engine.behaviour = says("x")
    await run(pool, request([*common, 7]))
    assert client.prefixes.matched(chain) == 4


async def test_what_others_sent_to_an_engine_counts_as_soon_as_it_tells(engines: list[FakeEngine], make: Maker) -> None:
    pool = make(engines[:2], status_interval_seconds=60.0)
    await until(lambda: len(ready(pool)) == 2 and engines[0].connected)
    prompt = list(range(9 * 64))
    where = route_of(request(), prompt, Affinity())
    first, second = (client_of(pool, engine) for engine in engines[:2])
    hashes = joined(where.chain)
    engines[0].tell(engine_pb2.EngineFrame(others=engine_pb2.Load(requests=1, prefill_tokens=512), prompts=[hashes]))
    await until(lambda: first.prefixes.matched(where.chain) == 9)
    assert (first.load, second.load) == (3.0, 0.0)
    await run(pool, request(prompt))
    assert len(engines[0].requests) == 1, "it is computed there, and worth the wait"
    engines[0].tell(engine_pb2.EngineFrame(others=engine_pb2.Load(requests=1, prefill_tokens=10**6)))
    await until(lambda: first.load > 1000.0)
    await run(pool, request(prompt))
    assert (len(engines[0].requests), len(engines[1].requests)) == (1, 1), "there is too much before it"
    assert engines[1].requests[0].expected_prefill == len(prompt)
    assert engines[1].requests[0].prefix_hashes == hashes
    engines[0].tell(engine_pb2.EngineFrame(others=engine_pb2.Load()))
    await until(lambda: first.load == 0.0)


async def test_the_load_that_a_status_tells_is_less_its_own(engines: list[FakeEngine], make: Maker) -> None:
    engines[0].status = {"running": 3, "load": engine_pb2.Load(requests=3, prefill_tokens=1024)}
    pool = make(engines[:1])
    await until(lambda: ready(pool))
    assert client_of(pool, engines[0]).load == 3.0 + 1024 / TOKENS_PER_REQUEST
    engines[0].status = {"running": 3, "load": engine_pb2.Load()}
    await until(lambda: client_of(pool, engines[0]).load == 3.0)


async def test_where_an_adapter_is_and_where_it_is_on_its_way(engines: list[FakeEngine], make: Maker) -> None:
    """By what the engine tells, and by what it was sent."""
    engine, pool = engines[0], make(engines[:1])
    await until(lambda: ready(pool))
    asked = request()
    asked.adapter.CopyFrom(engine_pb2.AdapterRef(named=engine_pb2.NamedAdapter(name="bot")))
    where = route_of(asked, [1], Affinity())

    def seen() -> tuple[bool, bool]:
        return (found := client_of(pool, engine).candidate(where)).expects, found.holds

    assert seen() == (False, False)
    engine.status = {"waiting_adapters": ["other", "bot"]}
    await until(lambda: seen() == (True, False))
    engine.status = {"waiting_adapters": ["bot"], "loaded_adapters": ["bot@3"]}
    await until(lambda: seen() == (False, True))
    engine.status = {}
    await until(lambda: seen() == (False, False))
    engine.behaviour = hangs
    sent = asyncio.create_task(run(pool, asked))
    await until(lambda: seen() == (True, False))
    engine.tell(engine_pb2.EngineFrame(updates=[engine_pb2.Update(request_id=asked.request_id, token_ids=[5])]))
    await until(lambda: seen() == (False, True))
    sent.cancel()
    await until(lambda: seen() == (False, False))
