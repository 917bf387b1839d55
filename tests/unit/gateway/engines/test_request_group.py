"""The choices of one prompt: which engines they go to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from services.common.pb import engine_pb2
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.engines.load_balancing import Affinity, route_of
from services.gateway.engines.pool import EnginePool
from services.gateway.settings import GatewaySettings
from tests.stack import PATIENCE
from tests.unit.gateway.fake_engine import FakeEngine, fails


@pytest.fixture
async def pool(engines: list[FakeEngine]) -> AsyncIterator[EnginePool]:
    listed = ",".join(f"127.0.0.1:{engine.port}" for engine in engines)
    made = EnginePool(GatewaySettings(engines=listed, status_interval_seconds=0.05), GatewayMetrics())
    made.start()
    async with asyncio.timeout(PATIENCE):
        for client in made.clients:
            while True:
                if client.ready:
                    break
                await asyncio.sleep(0.005)
    yield made
    await made.stop()


async def answered(pool: EnginePool, prompts: list[list[int]], choices: int) -> None:
    """All choices of these prompts, of which each has tokens."""
    requests = [
        engine_pb2.GenerateRequest(
            request_id=f"{number}-{choice}",
            prompt_token_ids=prompt,
            sampling=engine_pb2.SamplingParams(max_tokens=100),
            adapter=engine_pb2.AdapterRef(attached=True),
        )
        for number, prompt in enumerate(prompts)
        for choice in range(choices)
    ]
    tokens: Counter[int] = Counter()
    async with pool.request_group(requests, Affinity(), prompts=prompts) as group:
        async for index, update in group:
            tokens[index] += len(update.token_ids)
    assert set(tokens) == set(range(len(requests)))
    assert min(tokens.values()) > 0


def routed(pool: EnginePool, by: str) -> float:
    return pool._metrics.routed.labels(by)._value.get()


def shares(engines: list[FakeEngine]) -> dict[str, list[int]]:
    """How many choices of each prompt every engine was asked for, most first."""
    counts = [Counter(request.request_id.split("-")[0] for request in engine.requests) for engine in engines]
    prompts = {name for count in counts for name in count}
    return {name: sorted((count[name] for count in counts if count[name]), reverse=True) for name in prompts}


async def test_choices_of_a_prompt_are_together(engines: list[FakeEngine], pool: EnginePool) -> None:
    await answered(pool, [[number] * 40 for number in range(4)], choices=16)
    assert shares(engines) == {str(number): [16] for number in range(4)}
    assert routed(pool, "choices") == 4 * 15


async def test_an_engine_that_fails_gets_no_further_choices(engines: list[FakeEngine], pool: EnginePool) -> None:
    """What only its first request was to try."""
    await answered(pool, [[7] * 40], choices=2)
    chosen = next(engine for engine in engines if engine.requests)
    client = next(one for one in pool.clients if one.address.endswith(f":{chosen.port}"))
    asked = engine_pb2.GenerateRequest(prompt_token_ids=[7] * 40, adapter=engine_pb2.AdapterRef(attached=True))
    route = route_of(asked, [7] * 40, Affinity())
    for _ in range(20):
        client.breaker.failed()
    assert not client.breaker.admits
    assert not pool.joined(client, route)
    others = [one for one in pool.clients if one is not client]
    assert all(pool.joined(one, route) for one in others)


async def test_many_choices_are_shared_out(engines: list[FakeEngine], pool: EnginePool) -> None:
    """Nobody waits for one engine while others have nothing to do."""
    await answered(pool, [[7] * 40], choices=48)
    assert shares(engines) == {"0": [16, 16, 16]}


async def test_choices_that_an_engine_refuses_go_elsewhere(engines: list[FakeEngine], pool: EnginePool) -> None:
    engines[0].behaviour = engines[1].behaviour = fails(engine_pb2.ERROR_CODE_OVERLOADED, "64 requests wait already")
    await answered(pool, [[number] * 40 for number in range(3)], choices=5)
    assert len(engines[2].requests) == 15
