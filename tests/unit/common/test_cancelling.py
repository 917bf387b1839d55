"""A task that is cancelled ends, also where a library drops the first cancellation."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from services.common.shutdown import cancel_and_wait


async def test_a_dropped_cancellation_is_sent_again() -> None:
    dropped = 0

    async def polls() -> None:
        nonlocal dropped
        while True:
            if dropped:
                await asyncio.sleep(3600)
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
            dropped += 1

    task = asyncio.create_task(polls())
    await asyncio.sleep(0)
    await cancel_and_wait(task, again_seconds=0.01)
    assert (task.cancelled(), dropped) == (True, 1)


async def test_a_task_that_cleans_up_is_waited_for() -> None:
    cleaned = False

    async def works() -> None:
        nonlocal cleaned
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
            cleaned = True

    task = asyncio.create_task(works())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert cleaned


async def test_a_task_that_has_failed_is_over() -> None:
    async def fails() -> None:
        raise ValueError

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert task.done()
