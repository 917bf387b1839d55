"""A process whose threads have died does not go on as if nothing had happened."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.pod import serve


def pod(**dead: bool) -> tuple[Any, Any]:
    engine = SimpleNamespace(
        loop=SimpleNamespace(alive="loop" not in dead), adapters=SimpleNamespace(alive="adapters" not in dead)
    )
    return engine, SimpleNamespace(alive="trainer" not in dead)


@pytest.mark.parametrize(
    ("who", "says"),
    [("loop", "engine loop died"), ("trainer", "trainer's thread died"), ("adapters", "loads adapters")],
)
async def test_what_has_died_is_named(who: str, says: str) -> None:
    ill = await asyncio.wait_for(
        serve._watch(asyncio.Event(), lambda: serve._dead_thread(*pod(**{who: True})), False, 0), 5
    )
    assert says in ill


async def test_a_healthy_process_waits_to_be_asked() -> None:
    stop = asyncio.Event()
    watching = asyncio.create_task(serve._watch(stop, lambda: serve._dead_thread(*pod()), False, 0))
    await asyncio.sleep(0.05)
    assert not watching.done()
    stop.set()
    assert await asyncio.wait_for(watching, 5) == ""
