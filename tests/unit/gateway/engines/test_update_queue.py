"""What arrives while a handler is busy is joined; what must stand alone does."""

from __future__ import annotations

import asyncio

import pytest

from services.common.pb import engine_pb2
from services.gateway.core.sse import ChunkTemplate, event
from services.gateway.engines.update_queue import FairWaker, StreamBroken, UpdateQueue


def update(token: int, **fields: object) -> engine_pb2.Update:
    return engine_pb2.Update(request_id="r", token_ids=[token], sampling_logprobs=[-float(token)], **fields)


async def test_updates_of_a_request_are_joined_while_they_wait() -> None:
    inbox = UpdateQueue(FairWaker())
    inbox.put(0, update(1, adapter="a@1", cached_tokens=3))
    inbox.put(1, update(7))
    inbox.put(0, update(2))
    inbox.put(0, update(3, finish_reason=engine_pb2.FINISH_REASON_LENGTH))
    index, item = await inbox.get()
    assert (index, item) == (
        0,
        engine_pb2.Update(
            request_id="r",
            token_ids=[1, 2, 3],
            sampling_logprobs=[-1.0, -2.0, -3.0],
            adapter="a@1",
            cached_tokens=3,
            finish_reason=engine_pb2.FINISH_REASON_LENGTH,
        ),
    )
    assert await inbox.get() == (1, update(7))
    inbox.put(1, update(8))
    assert await inbox.get() == (1, update(8))


async def test_errors_and_losses_stay_behind_what_came_before() -> None:
    inbox = UpdateQueue(FairWaker())
    inbox.put(0, update(1))
    failed = engine_pb2.Update(request_id="r", error=engine_pb2.Error(message="no"))
    inbox.put(0, failed)
    inbox.put(1, update(2))
    inbox.put(1, StreamBroken("gone"))
    assert [await inbox.get() for _ in range(4)] == [
        (0, update(1)),
        (0, failed),
        (1, update(2)),
        (1, StreamBroken("gone")),
    ]


async def test_a_reader_waits_until_something_comes_or_the_time_is_up() -> None:
    inbox = UpdateQueue(FairWaker())
    reading = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.put(0, update(1))
    assert await reading == (0, update(1))
    inbox.expire_at(asyncio.get_running_loop().time() + 0.01)
    with pytest.raises(TimeoutError):
        await inbox.get()
    inbox.put(0, update(2))
    assert await inbox.get() == (0, update(2))
    with pytest.raises(TimeoutError):
        await inbox.get()
    inbox.close()


def test_templates_make_the_same_bytes() -> None:
    def chunk(text: object, ids: object) -> dict[str, object]:
        return {"model": 'a "quoted" one', "choices": [{"text": text, "ids": ids, "end": None}]}

    template = ChunkTemplate(lambda text, ids: event(chunk(text, ids)), 2)
    for text, ids in (("ä\n\"'", [1, 2]), ("", []), ("MARK-2", [float("nan")])):
        assert template.fill(text, ids) == event(chunk(text, ids))
    twice = ChunkTemplate(lambda ids, text: event({"first": text, **chunk(text, ids)}), 2)
    assert twice.fill([3], "a") == event({"first": "a", **chunk("a", [3])})
    with pytest.raises(ValueError, match="does not contain each of its values"):
        ChunkTemplate(lambda text, ids: event(chunk(text, 0)), 2)
