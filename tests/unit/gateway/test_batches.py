"""/v1/batches and the gateway that runs them, on stores in memory and an engine that says what it is told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from services.common.pb import engine_pb2
from services.gateway.core.batch_queue import Batch, BatchSpec
from services.gateway.core.file_store import FileStore, NewFile, new_file_id
from services.gateway.settings import GatewaySettings
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.fake_engine import Behaviour, FakeEngine, Send, fails, hangs, says

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


def line(custom_id: str, body: dict[str, Any] | None = None, *, url: str = CHAT, **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or BODY, **more}


def jsonl(*lines: Any) -> bytes:
    return b"".join(entry if isinstance(entry, bytes) else json.dumps(entry).encode() + b"\n" for entry in lines)


class Batches:
    """A gateway that runs batches, and a client."""

    def __init__(self, running: Running, client: openai.OpenAI) -> None:
        self.running = running
        self.client = client

    def upload(self, content: bytes) -> str:
        return self.client.files.create(file=("in.jsonl", content), purpose="batch").id

    def submit(self, *lines: Any, endpoint: str = CHAT, **options: Any) -> openai.types.Batch:
        file = self.upload(jsonl(*lines))
        return self.client.batches.create(
            input_file_id=file,
            endpoint=endpoint,  # type: ignore[arg-type]
            completion_window="24h",
            **options,
        )

    def wait(self, batch_id: str, until: Callable[[Batch], bool] = lambda batch: batch.ended) -> openai.types.Batch:
        records = self.running.batches.records
        self.running.wait_for(lambda: until(records[batch_id]))
        return self.client.batches.retrieve(batch_id)

    def run(self, *lines: Any, **options: Any) -> openai.types.Batch:
        return self.wait(self.submit(*lines, **options).id)

    def read(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """Lines of a file by custom_id, each once."""
        if file_id is None:
            return {}
        entries = [json.loads(text) for text in self.client.files.content(file_id).text.splitlines()]
        assert len({entry["custom_id"] for entry in entries}) == len(entries)
        return {entry["custom_id"]: entry for entry in entries}


def connected(running: Running) -> Batches:
    plain = openai.DefaultHttpxClient(verify=False)
    return Batches(
        running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, http_client=plain)
    )


OPTIONS = {"batch_workers": 2, "batch_concurrency": 4, "batch_heartbeat_seconds": 0.05, "batch_max_requests": 1000}


@pytest.fixture(scope="module")
def _gateway() -> Iterator[Batches]:
    running = Running([FakeEngine()], **OPTIONS)
    running.start()
    yield connected(running)
    running.stop()


@pytest.fixture
def batches(_gateway: Batches) -> Iterator[Batches]:
    _gateway.running.engine.behaviour = says("Hello")
    _gateway.running.engine.requests.clear()
    yield _gateway
    _gateway.running.wait_for(lambda: _gateway.running.gateway.admission.taken == 0)


def test_life_of_a_batch(batches: Batches) -> None:
    lines = [line(f"request-{i}", {**BODY, "seed": i}) for i in range(20)]
    lines.insert(3, line("bad", {**BODY, "temperature": 9}))
    lines.insert(5, line("urgent", {**BODY, "priority": -5}))
    submitted = batches.submit(*lines, metadata={"night": "1"})
    assert submitted.status in ("validating", "in_progress")
    assert submitted.expires_at == submitted.created_at + 86400
    batch = batches.wait(submitted.id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (22, 21, 1)
    assert batch.metadata == {"night": "1"}
    assert batch.errors is None
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    output, errors = batches.read(batch.output_file_id), batches.read(batch.error_file_id)
    assert output.keys() == {"urgent", *(f"request-{i}" for i in range(20))}
    answer = output["request-7"]
    assert answer["id"].startswith("batch_req_")
    assert answer["error"] is None
    assert answer["response"]["status_code"] == 200
    assert answer["response"]["request_id"]
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
    refused = errors["bad"]["response"]
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["param"] == "temperature"
    files = {file.id: file for file in batches.client.files.list(purpose="batch_output")}
    assert files[batch.output_file_id].filename == f"{batch.id}_output.jsonl"
    priorities = sorted(request.priority for request in batches.running.engine.requests)
    assert priorities == [-5] + [100] * 20
    assert not [key for key in batches.running.store.objects if key.startswith("batches/")]
    assert batches.client.batches.retrieve(batch.id) == batch
    metrics = httpx.get(f"{batches.running.url}/metrics", verify=False).text
    assert 'temper_gateway_batches_total{outcome="completed"} 1.0' in metrics
    assert 'temper_gateway_batch_requests_total{status="200"} 21.0' in metrics
    assert 'temper_gateway_batch_requests_total{status="400"} 1.0' in metrics


def test_text_completions_and_empty_lines(batches: Batches) -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 8}
    url = "/v1/completions"
    mark = b"\xef\xbb\xbf"  # an editor of Windows begins a file with it
    other = json.dumps(line("b", body | {"prompt": "h\u2028i\x85"}, url=url), ensure_ascii=False).encode() + b"\n"
    batch = batches.run(mark, line("a", body, url=url), b"\n", b"  \r\n", other, endpoint=url)
    output = batches.read(batch.output_file_id)
    assert {key: entry["response"]["body"]["choices"][0]["text"] for key, entry in output.items()} == {
        "a": "Hello",
        "b": "Hello",
    }
    assert batch.error_file_id is None


def test_what_a_batch_makes_belongs_to_its_owner(batches: Batches) -> None:
    url = "/v1/responses"
    batch = batches.submit(line("a", {"model": "tiny", "input": "hi", "max_output_tokens": 8}, url=url), endpoint=url)
    mine = batches.wait(batch.id)
    theirs = BatchSpec(owner="key-of-another", input_file_id="", endpoint=url)
    files = FileStore(batches.running.store)  # type: ignore[arg-type]
    new = NewFile(theirs.owner, new_file_id(), "in.jsonl", "batch", 1)
    content = jsonl(line("a", {"model": "tiny", "input": "hi", "max_output_tokens": 8}, url=url))
    theirs = theirs.model_copy(update={"input_file_id": files.create(new, [content]).id})
    record = batches.running.run(batches.running.batches.submit(theirs))
    batches.running.wait_for(lambda: batches.running.batches.records[record.id].ended)
    output = batches.running.batches.records[record.id].output_file_id
    answer = json.loads(files.piece(theirs.owner, files.get(theirs.owner, output or ""), 0))["response"]["body"]
    with pytest.raises(openai.NotFoundError):
        batches.client.responses.retrieve(answer["id"])
    own = batches.read(mine.output_file_id)["a"]["response"]["body"]
    assert batches.client.responses.retrieve(own["id"]).status == own["status"]


def test_files_of_results_expire(batches: Batches) -> None:
    expiry = {"anchor": "created_at", "seconds": 7200}
    batch = batches.run(line("a"), extra_body={"output_expires_after": expiry})
    file = batches.client.files.retrieve(batch.output_file_id or "")
    assert file.expires_at == file.created_at + 7200


@pytest.mark.parametrize(
    ("content", "number", "code", "param"),
    [
        (b"", None, None, None),
        (b"\n\n", None, "empty_file", None),
        (b"{", 1, "invalid_json_line", None),
        (b'{"a": "\xff"}', 1, "invalid_json_line", None),
        (b"[" * 100_000, 1, "invalid_json_line", None),
        (b"[1]", 1, "invalid_json_line", None),
        (jsonl(line("a"), line("b"), line("a")), 3, "duplicate_custom_id", "custom_id"),
        (jsonl(b"\n", line("")), 2, "invalid_custom_id", "custom_id"),
        (jsonl({**line("a"), "custom_id": 5}), 1, "invalid_custom_id", "custom_id"),
        (jsonl(line("x" * 513)), 1, "invalid_custom_id", "custom_id"),
        (jsonl({**line("a"), "method": "GET"}), 1, "invalid_method", "method"),
        (jsonl(line("a", url="/v1/completions")), 1, "mismatched_url", "url"),
        (jsonl(line("a", url="/v1/files")), 1, "mismatched_url", "url"),
        (jsonl({**line("a"), "body": []}), 1, "invalid_body", "body"),
        (jsonl({**line("a"), "body": {**BODY, "stream": True}}), 1, "invalid_body", "body.stream"),
        (jsonl({"custom_id": "a"}), 1, "missing_required_parameter", "method"),
        (jsonl(line("a", extra=1)), 1, "unknown_parameter", "extra"),
        (jsonl(*(line(str(i)) for i in range(1001))), 1001, "too_many_requests", None),
    ],
)
def test_a_bad_file_fails_before_anything_runs(
    batches: Batches, content: bytes, number: int | None, code: str | None, param: str | None
) -> None:
    if not content:
        with pytest.raises(openai.BadRequestError, match="empty"):
            batches.upload(content)
        return
    batch = batches.run(content)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    (error,) = batch.errors.data or []
    assert (error.line, error.code, error.param) == (number, code, param)
    assert error.message
    assert batch.output_file_id is None
    assert batches.running.engine.requests == []


def test_at_most_a_hundred_errors_are_told(batches: Batches) -> None:
    batch = batches.run(b"x\n" * 300)
    assert [error.line for error in batch.errors.data] == list(range(1, 101))  # type: ignore[union-attr]


def test_refusals(batches: Batches) -> None:
    file = batches.upload(jsonl(line("a")))
    url = f"{batches.running.url}/v1/batches"
    good = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"endpoint": "/v1/models"}, 400, "endpoint"),
        ({"input_file_id": "file-x"}, 404, "input_file_id"),
        ({"metadata": {"k": 1}}, 400, "metadata.k"),
        ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
        ({"surprise": 1}, 400, "surprise"),
    ]
    for change, status, param in cases:
        response = httpx.post(url, json={**good, **change}, verify=False)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    output = batches.run(line("a")).output_file_id
    with pytest.raises(openai.BadRequestError, match="purpose"):
        batches.client.batches.create(input_file_id=output or "", endpoint=CHAT, completion_window="24h")
    for path in ("batch_x", "batch_" + "0" * 26):
        assert httpx.get(f"{url}/{path}", verify=False).status_code == 404
        assert httpx.post(f"{url}/{path}/cancel", verify=False).status_code == 404


def test_pages_and_idempotency(running: Running, client: openai.OpenAI) -> None:
    batches = Batches(running, client)  # which runs none
    file = batches.upload(jsonl(line("a")))

    def create(key: str, file_id: str = file) -> openai.types.Batch:
        headers = {"idempotency-key": key}
        return client.batches.create(
            input_file_id=file_id, endpoint=CHAT, completion_window="24h", extra_headers=headers
        )

    first = create("k")
    assert create("k").id == first.id
    with pytest.raises(openai.ConflictError):
        create("k", batches.upload(jsonl(line("b"))))
    ids = [first.id, *(create(f"k{i}").id for i in range(4))]
    assert [batch.id for batch in client.batches.list(limit=2)] == ids[::-1]
    page = client.batches.list(limit=1, after=ids[1])
    assert ([batch.id for batch in page.data], page.has_more) == ([ids[0]], False)
    assert client.batches.cancel(first.id).status == "cancelled"
    assert client.batches.cancel(first.id).status == "cancelled"


def test_unfinished_batches_have_a_limit(start: Starter) -> None:
    running = start(batch_workers=0, batch_max_unfinished=2)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        batches = Batches(running, client)
        first, second = (batches.submit(line("a")) for _ in range(2))
        with pytest.raises(openai.RateLimitError, match="2 batches have not ended") as refused:
            batches.submit(line("a"))
        assert refused.value.response.headers["retry-after"] == "30"
        client.batches.cancel(first.id)
        third = batches.submit(line("a"))
        assert {batch.id for batch in client.batches.list() if batch.status == "validating"} == {second.id, third.id}


def test_an_owner_sees_its_own_batches_only(running: Running, client: openai.OpenAI) -> None:
    spec = BatchSpec(owner="key-of-another", input_file_id="file-x", endpoint=CHAT)
    theirs = running.run(running.batches.submit(spec))
    mine = Batches(running, client).submit(line("a"))
    assert [batch.id for batch in client.batches.list()] == [mine.id]
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(theirs.id)


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
    users = [running.gateway.admission.reserve(1) for _ in range(2)]
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
    assert running.run(running.app.state.batch_worker.tidy()) == 1
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


def test_a_stopping_gateway_hands_over_at_once(start: Starter) -> None:
    first = connected(start(**OPTIONS))
    engine = first.running.engine

    async def first_five(_: FakeEngine, request: engine_pb2.GenerateRequest, send: Send) -> None:
        await (says("first") if request.sampling.seed < 5 else hangs)(engine, request, send)

    engine.behaviour = first_five
    lines = [line(str(i), {**BODY, "seed": i}) for i in range(20)]
    batch = first.submit(*lines)
    first.running.wait_for(lambda: any(int(r.sampling.seed) >= 5 for r in engine.requests))
    first.running.wait_for(lambda: len(engine.running) == OPTIONS["batch_concurrency"])
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
