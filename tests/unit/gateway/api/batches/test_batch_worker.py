"""Running batches: what is retried, shared, handed over and left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import openai
import pytest
from pydantic import ValidationError
from starlette.types import Receive, Scope
from starlette.types import Send as Answers

from services.common.errors import Unavailable
from services.common.pb import engine_pb2
from services.gateway.api.batches import internal_client, worker
from services.gateway.api.batches.runner import BatchRun
from services.gateway.core.batch_queue import BatchSpec
from services.gateway.settings import GatewaySettings
from tests.stack import PATIENCE
from tests.unit.gateway.batch_client import BODY, CHAT, OPTIONS, Batches, connected, jsonl, line
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.fake_engine import Behaviour, FakeEngine, Send, fails, hangs, says


def test_cancelling_keeps_what_has_run(batches: Batches) -> None:
    engine = batches.running.engine

    async def first_three(_: FakeEngine, request: engine_pb2.GenerateRequest, send: Send) -> None:
        await (says("Hello") if request.sampling.seed < 3 else hangs)(engine, request, send)

    engine.behaviour = first_three
    batch = batches.submit(*(line(str(i), {**BODY, "seed": i}) for i in range(30)))
    batches.wait(batch.id, lambda found: found.completed == 3)
    assert batches.client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = batches.wait(batch.id)
    assert batch.status == "cancelled"
    assert None not in (batch.cancelling_at, batch.cancelled_at)
    assert batches.read(batch.output_file_id).keys() == {"0", "1", "2"}
    errors = batches.read(batch.error_file_id)
    assert errors.keys() == {str(i) for i in range(3, 30)}
    assert {entry["error"]["code"] for entry in errors.values()} == {"batch_cancelled"}
    assert {entry["response"] for entry in errors.values()} == {None}
    assert not engine.running
    assert batches.client.batches.cancel(batch.id).status == "cancelled"
    done = batches.run(line("a"))
    with pytest.raises(openai.ConflictError, match="completed"):
        batches.client.batches.cancel(done.id)


def test_the_window_passes(batches: Batches) -> None:
    mine = batches.running.batches.records[batches.run(line("a")).id].spec.owner
    batches.running.engine.behaviour = hangs
    file = batches.upload(jsonl(line("a"), line("b")))
    spec = BatchSpec(owner=mine, input_file_id=file, endpoint=CHAT, window_seconds=1)
    batch = batches.wait(batches.running.run(batches.running.batches.submit(spec)).id)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    assert batch.output_file_id is None
    errors = batches.read(batch.error_file_id)
    assert {key: entry["error"]["code"] for key, entry in errors.items()} == {
        "a": "batch_expired",
        "b": "batch_expired",
    }


@pytest.mark.parametrize("days", [-2, 2])
def test_the_window_is_measured_by_one_clock(batches: Batches, days: int) -> None:
    """A gateway whose clock is off neither ends a batch too soon nor too late."""
    batches.running.batches.clock_off = 86_400.0 * days
    assert batches.run(line("a")).status == "completed"
    test_the_window_passes(batches)


def test_busy_is_tried_again(batches: Batches) -> None:
    refused: list[int] = []

    async def sometimes(engine: FakeEngine, request: engine_pb2.GenerateRequest, send: Send) -> None:
        if request.sampling.seed not in refused:
            refused.append(request.sampling.seed)
            error = engine_pb2.Error(code=engine_pb2.ERROR_CODE_OVERLOADED, message="full")
            reason = engine_pb2.FINISH_REASON_ERROR
            await send(engine_pb2.Update(request_id=request.request_id, finish_reason=reason, error=error))
        else:
            await says("Hello")(engine, request, send)

    batches.running.engine.behaviour = sometimes
    batch = batches.run(*(line(str(i), {**BODY, "seed": i}) for i in range(3)))
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 0)
    assert sorted(refused) == [0, 1, 2]


async def test_a_retry_after_is_waited_for_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the answer says: a batch that waits for a day is as good as lost."""
    monkeypatch.setattr(internal_client, "_LONGEST_RETRY_AFTER", 0.5)
    statuses = [503, 200]

    async def busy_once(scope: Scope, receive: Receive, send: Answers) -> None:
        head = [(b"retry-after", b"86400")]
        await send({"type": "http.response.start", "status": statuses.pop(0), "headers": head})
        await send({"type": "http.response.body", "body": b"{}"})

    caller = internal_client.Caller(busy_once, priority=0, endpoints={}, has_room=lambda: True)  # type: ignore[arg-type]
    answer = await asyncio.wait_for(caller.call(CHAT, {}, owner="me", request_id="r"), PATIENCE)
    assert (answer.status, statuses) == (200, [])


def test_too_late_is_tried_again_but_not_for_ever(batches: Batches) -> None:
    late = engine_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    batches.running.engine.behaviour = fails(late, "too late")
    batch = batches.run(line("a"))
    assert batches.read(batch.error_file_id)["a"]["response"]["status_code"] == 504
    assert len(batches.running.engine.requests) == 5


def test_half_of_the_gateway_is_for_users(start: Starter) -> None:
    batches = connected(start(**OPTIONS, max_in_flight=4))
    running = batches.running
    let_go = asyncio.Event()
    running.engine.behaviour = says_after(let_go, "Hello")
    users = [running.inference.admission.reserve(1) for _ in range(2)]
    batch = batches.submit(*(line(str(i)) for i in range(8)))
    batches.wait(batch.id, lambda found: found.status == "in_progress")
    time.sleep(0.5)
    assert running.engine.requests == []
    users[0].release()
    running.wait_for(lambda: len(running.engine.requests) > 0)
    running.run(_set(let_go))
    users[1].release()
    done = batches.wait(batch.id)
    assert done.request_counts is not None
    assert done.request_counts.completed == 8


def test_what_is_left_behind_is_removed(batches: Batches) -> None:
    running = batches.running
    running.engine.behaviour = hangs
    batch = batches.submit(line("a"))
    running.wait_for(lambda: len(running.engine.running) == 1)
    ended = "batch_" + "0" * 26
    for batch_id in (ended, batch.id):
        running.store.put(f"batches/{batch_id}/000000", b"")
    assert running.run(running.app.state.tidying.once()) == {"forge": 0, "tinker": 0, "batches": 1}
    assert [key for key in running.store.objects if key.startswith("batches/")] == [f"batches/{batch.id}/000000"]
    batches.client.batches.cancel(batch.id)
    batches.wait(batch.id)


def test_never_more_at_a_time_than_the_setting(batches: Batches) -> None:
    most = 0

    async def counted(engine: FakeEngine, request: engine_pb2.GenerateRequest, send: Send) -> None:
        nonlocal most
        most = max(most, len(engine.running))
        await asyncio.sleep(0.01)
        await says("Hello")(engine, request, send)

    batches.running.engine.behaviour = counted
    several = [batches.submit(*(line(str(i)) for i in range(20))).id for _ in range(2)]
    assert {batches.wait(batch_id).status for batch_id in several} == {"completed"}
    assert most == OPTIONS["batch_concurrency"]


def test_the_input_is_deleted_meanwhile(running: Running, client: openai.OpenAI, start: Starter) -> None:
    mine = connected(start(**OPTIONS))
    waiting = Batches(running, client).submit(line("a"))  # nothing runs it here
    mine.running.batches.records[waiting.id] = running.batches.records[waiting.id]
    batch = mine.wait(waiting.id)
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == ["input_file_gone"]  # type: ignore[union-attr]


def test_stores_away_is_a_clear_answer(running: Running, client: openai.OpenAI) -> None:
    batches = Batches(running, client)
    batch = batches.submit(line("a"))
    running.batches.down = True
    for call in (lambda: batches.submit(line("a")), lambda: client.batches.retrieve(batch.id), client.batches.list):
        with pytest.raises(openai.InternalServerError) as caught:
            call()
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"]


def says_after(event: asyncio.Event, text: str) -> Behaviour:
    """Answers once the event is set."""

    async def behave(engine: FakeEngine, request: engine_pb2.GenerateRequest, send: Send) -> None:
        await event.wait()
        await says(text)(engine, request, send)

    return behave


def test_a_batch_outlives_its_stores(batches: Batches) -> None:
    running = batches.running
    let_go = asyncio.Event()
    running.engine.behaviour = says_after(let_go, "Hello")
    batch = batches.submit(*(line(str(i)) for i in range(12)))
    running.wait_for(lambda: len(running.engine.running) == OPTIONS["batch_concurrency"])
    running.store.down = running.batches.down = True
    running.run(_set(let_go))
    running.wait_for(lambda: len(running.engine.requests) == 12 and not running.engine.running)
    running.store.down = running.batches.down = False
    batch = batches.wait(batch.id)
    assert batch.status == "completed"
    assert len(batches.read(batch.output_file_id)) == 12


def test_a_batch_outlives_what_its_gateway_lacks(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    """More often than it may crash (3 times)."""
    run, lacking = BatchRun.run, iter(range(4))

    async def lacks(self: BatchRun) -> Any:
        if next(lacking, None) is not None:
            raise RuntimeError("can't start new thread")
        return await run(self)

    monkeypatch.setattr(BatchRun, "run", lacks)
    monkeypatch.setattr(worker, "_SCARCE_SECONDS", 0.01)
    assert batches.run(line("a")).status == "completed"


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_a_part_of_an_owner_that_was_thought_dead_counts(batches: Batches) -> None:
    running = batches.running
    let_go = asyncio.Event()
    running.engine.behaviour = says_after(let_go, "ours")
    batch = batches.submit(*(line(str(i)) for i in range(3)))
    running.wait_for(lambda: len(running.engine.running) == 3)
    theirs = b'{"custom_id":"1","response":{"status_code":200,"body":"theirs"},"error":null}'
    running.store.put(f"batches/{batch.id}/000000", b"2 o " + theirs + b"\n")
    running.run(_set(let_go))
    batch = batches.wait(batch.id)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (3, 3)
    output = batches.read(batch.output_file_id)
    assert output.keys() == {"0", "1", "2"}
    assert output["1"]["response"]["body"] == "theirs"


def test_a_lease_must_outlive_its_heartbeats() -> None:
    with pytest.raises(ValidationError, match="two heartbeats"):
        GatewaySettings(batch_heartbeat_seconds=20, batch_reclaim_seconds=30)


@pytest.mark.parametrize("away", [False, True])  # the store, until the results of the first are being stored
def test_a_stopping_gateway_hands_over_at_once(start: Starter, monkeypatch: pytest.MonkeyPatch, away: bool) -> None:
    first = connected(start(**OPTIONS))
    engine = first.running.engine

    async def first_five(_: FakeEngine, request: engine_pb2.GenerateRequest, send: Send) -> None:
        await (says("first") if request.sampling.seed < 5 else hangs)(engine, request, send)

    engine.behaviour = first_five
    lines = [line(str(i), {**BODY, "seed": i}) for i in range(20)]
    store, refused = first.running.store, threading.Event()

    def put(key: str, data: bytes, **options: bool) -> str:
        if away and key.startswith("batches/") and engine.running:
            refused.set()
            raise Unavailable("no space is left")
        return stored(key, data, **options)

    stored = store.put
    monkeypatch.setattr(store, "put", put)
    batch = first.submit(*lines)
    first.running.wait_for(lambda: any(int(r.sampling.seed) >= 5 for r in engine.requests))
    first.running.wait_for(lambda: len(engine.running) == OPTIONS["batch_concurrency"])
    assert not away or refused.wait(PATIENCE)
    first.running.stop()
    record = first.running.batches.records[batch.id]
    assert record.state == "queued"
    assert record.status == "in_progress"
    assert record.completed == 5

    second = Running([FakeEngine(behaviour=says("second"))], **OPTIONS)
    second.store = first.running.store
    second.batches = first.running.batches
    second.start()
    try:
        other = connected(second)
        done = other.wait(batch.id)
        output = other.read(done.output_file_id)
        texts = [output[str(i)]["response"]["body"]["choices"][0]["message"]["content"] for i in range(20)]
        assert texts == ["first"] * 5 + ["second"] * 15
    finally:
        second.stop()
