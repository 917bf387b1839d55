"""The collector of cycles leaves streams alone, and does its work when there are none."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress

from services.gateway.server.shutdown import QuietCollector


class _Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.other: _Node | None = None


def _old_cycle() -> weakref.ref[_Node]:
    """Two objects that only know each other and have survived a look at the young ones."""
    one, two = _Node(), _Node()
    one.other, two.other = two, one
    gc.collect(0)
    return weakref.ref(one)


async def _gone(reference: weakref.ref[_Node]) -> bool:
    for _ in range(500):
        if reference() is None:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_cycles_go_when_nobody_is_served_and_when_that_is_overdue() -> None:
    busy = True
    before = gc.get_threshold()
    collector = QuietCollector(lambda: busy, pause_seconds=0.02, overdue_seconds=600, look_seconds=0.01)
    task = asyncio.create_task(collector.run())
    await asyncio.sleep(0.05)
    assert gc.get_threshold()[1:] == (10**9, 10**9), "no collection of old objects by itself"
    old = _old_cycle()
    await asyncio.sleep(0.1)
    assert old() is not None
    assert collector.collections == 0, "somebody is served"
    busy = False
    assert await _gone(old)
    busy = True
    collector._overdue = 0.1
    assert await _gone(_old_cycle()), "overdue"
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
