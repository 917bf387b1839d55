"""A request that nobody waits for is gone at the boundary that its abort reaches, wherever it was by then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from services.engine.observability.status import LoopStatus
from tests.integration.engine.harness import EngineUnderTest, GatewayStream, request

SEATS = 8


class Boundary:
    """Requests that the loop has left directly after each abort, between the same two steps."""

    def __init__(self, engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = engine.engine.loop
        self.left: list[tuple[int, int, int, int]] = []
        """Running, waiting (for an adapter, too), blocks, slots."""
        self.steps: list[int] = []
        desk = self._loop._tracker
        for name in ("abort", "abort_all"):
            monkeypatch.setattr(desk, name, self._noted(getattr(desk, name)))

    def _noted(self, end: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any) -> None:
            before = self._loop._pipeline.steps
            end(*args)
            counts = self._loop._pipeline.scheduler.counts()
            loading = self._loop._tracker.num_loading
            self.left.append((counts.running, counts.waiting + loading, counts.blocks_used, counts.slots_used))
            self.steps.append(self._loop._pipeline.steps - before)

        return noted


async def until(engine: EngineUnderTest, condition: Callable[[LoopStatus], bool]) -> None:
    """The loop's own status, without a call over gRPC in between: prefills are short."""
    async with asyncio.timeout(20):
        while True:
            if condition(engine.engine.loop.status()):
                return
            await asyncio.sleep(0.001)


async def decoding(engine: EngineUnderTest, stream: GatewayStream, patch: pytest.MonkeyPatch) -> list[str]:
    name = await stream.submit(request(max_tokens=400))
    await stream.tokens(name, 3)
    return [name]


async def prefilling(engine: EngineUnderTest, stream: GatewayStream, patch: pytest.MonkeyPatch) -> list[str]:
    # Of 64 tokens a step: eight steps before there is a first token.
    name = await stream.submit(request([3 + i % 90 for i in range(500)]))
    await until(engine, lambda status: status.counts.running == 1)
    assert not stream.answers[name].token_ids
    return [name]


async def queued(engine: EngineUnderTest, stream: GatewayStream, patch: pytest.MonkeyPatch) -> list[str]:
    names = [await stream.submit(request([5, 6 + i], max_tokens=400)) for i in range(SEATS + 3)]
    await until(engine, lambda status: status.counts.running == SEATS and status.counts.waiting == 3)
    return names[::-1]


async def without_adapter(engine: EngineUnderTest, stream: GatewayStream, patch: pytest.MonkeyPatch) -> list[str]:
    patch.setattr(engine.engine.adapters, "pin", lambda choice: None)  # one that is being loaded for ever
    name = await stream.submit(request(adapter="slow@1"))
    await until(engine, lambda status: status.waiting_for_adapters == 1)
    return [name]


@pytest.mark.parametrize("gateway", ["aborts", "dies"])
@pytest.mark.parametrize("place", [decoding, prefilling, queued, without_adapter])
async def test_nothing_is_left_at_the_next_boundary(
    engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch, place: Any, gateway: str
) -> None:
    stream = engine.stream()
    boundary = Boundary(engine, monkeypatch)
    names = await place(engine, stream, monkeypatch)
    if gateway == "aborts":
        for name in names:
            await stream.abort(name)
        await until(engine, lambda _: len(boundary.left) == len(names))
    else:
        await stream.close()
        await until(engine, lambda _: bool(boundary.left))
    assert boundary.left[-1] == (0, 0, 0, 0)
    assert set(boundary.steps) == {0}, "no step in between"
    steps = engine.engine.loop.status().steps
    await engine.until(lambda status: status.running == status.waiting == status.blocks_used == 0)
    assert engine.engine.loop.status().steps <= steps + 1, "and none for it after that"
