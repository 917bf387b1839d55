"""Readers wake a few at a time, in the order in which something came for them."""

from __future__ import annotations

import asyncio

from services.common.pb import engine_pb2
from services.gateway.engines.update_queue import FairWaker, UpdateQueue

COUNT = 50


def update() -> engine_pb2.Update:
    return engine_pb2.Update(request_id="r", token_ids=[1])


async def waiting(turns: FairWaker, order: list[int], number: int) -> tuple[UpdateQueue, asyncio.Task[None]]:
    """A reader that has had its first update and waits for the next."""
    inbox = UpdateQueue(turns)
    inbox.put(0, update())

    async def read() -> None:
        await inbox.get()
        await inbox.get()
        order.append(number)

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    return inbox, task


async def test_the_loop_goes_round_between_a_few_readers() -> None:
    turns, order = FairWaker(at_once=3), list[int]()
    readers = [await waiting(turns, order, number) for number in range(COUNT)]
    for inbox, _ in readers:
        inbox.put(0, update())
    seen = []
    while len(order) < COUNT:
        await asyncio.sleep(0)
        seen.append(len(order))
    assert order == list(range(COUNT))
    assert max(after - before for before, after in zip([0, *seen], seen, strict=False)) == 3
    assert len(seen) <= COUNT // 3 + 4


async def test_who_has_had_nothing_goes_ahead() -> None:
    turns, order = FairWaker(at_once=1), list[int]()
    readers = [await waiting(turns, order, number) for number in range(COUNT)]
    new = UpdateQueue(turns)
    first = asyncio.create_task(new.get())
    await asyncio.sleep(0)
    for inbox, _ in readers:
        inbox.put(0, update())
    new.put(0, update())
    await first
    assert len(order) <= 3


async def test_a_reader_that_leaves_holds_nobody_up() -> None:
    turns, order = FairWaker(at_once=1), list[int]()
    readers = [await waiting(turns, order, number) for number in range(3)]
    for inbox, _ in readers:
        inbox.put(0, update())
    readers[1][1].cancel()
    await asyncio.wait([task for _, task in readers])
    assert order == [0, 2]
    inbox, task = await waiting(turns, order, 3)
    inbox.put(0, update())
    await task
    assert order == [0, 2, 3]
