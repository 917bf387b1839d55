"""/v1/messages/batches through Anthropic's own client, on stores in memory and an engine that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse

from services.common.pb import engine_pb2
from services.common.security.api_keys import Scope
from services.gateway.core.batch_queue import Batch, BatchSpec
from tests.stack import PATIENCE
from tests.unit.gateway.batch_client import OPTIONS
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine, Send, fails, hangs, says
from tests.unit.gateway.key_file import NO_REDIS, Keys

PARAMS: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
ROUTE = "/v1/messages/batches"


def asks(custom_id: str, **params: Any) -> Any:
    return {"custom_id": custom_id, "params": {**PARAMS, **params}}


class Messages:
    """A gateway that runs batches, and Anthropic's client."""

    def __init__(self, running: Running, key: str = "none") -> None:
        self.running = running
        plain = anthropic.DefaultHttpxClient(verify=False)
        self.client = anthropic.Anthropic(base_url=running.url, api_key=key, max_retries=0, http_client=plain)
        self.batches = self.client.messages.batches

    def wait(self, batch_id: str, until: Callable[[Batch], bool] = lambda batch: batch.ended) -> MessageBatch:
        self.running.wait_for(lambda: until(self.running.batches.records[batch_id]))
        return self.batches.retrieve(batch_id)

    def run(self, *requests: Any) -> MessageBatch:
        return self.wait(self.batches.create(requests=requests).id)

    def results(self, batch_id: str) -> dict[str, MessageBatchIndividualResponse]:
        found = list(self.batches.results(batch_id))
        assert len({result.custom_id for result in found}) == len(found)
        return {result.custom_id: result for result in found}

    def files(self) -> list[str]:
        """What there is in the store of files."""
        return [key for key in self.running.store.objects if key.startswith("files/")]


@pytest.fixture(scope="module")
def _gateway() -> Iterator[Messages]:
    running = Running([FakeEngine()], **OPTIONS)
    running.start()
    yield Messages(running)
    running.stop()


@pytest.fixture
def messages(_gateway: Messages) -> Iterator[Messages]:
    _gateway.running.engine.behaviour = says("Hello")
    _gateway.running.engine.requests.clear()
    yield _gateway
    _gateway.running.wait_for(lambda: _gateway.running.inference.admission.in_flight == 0)


def counts(batch: MessageBatch) -> tuple[int, int, int, int, int]:
    told = batch.request_counts
    return told.processing, told.succeeded, told.errored, told.canceled, told.expired


def test_life_of_a_batch(messages: Messages) -> None:
    asked = [asks(f"request-{i}", system=f"You are {i}.") for i in range(20)]
    asked.insert(3, asks("bad", temperature=9))
    asked.insert(5, {"custom_id": "nonsense", "params": {**PARAMS, "messages": 5}})
    began = messages.batches.create(requests=asked)
    assert (began.type, began.processing_status, counts(began)) == ("message_batch", "in_progress", (22, 0, 0, 0, 0))
    assert (began.ended_at, began.results_url, began.archived_at, began.cancel_initiated_at) == (None,) * 4
    assert (began.expires_at - began.created_at).total_seconds() == 86400
    batch = messages.wait(began.id)
    assert (batch.processing_status, counts(batch)) == ("ended", (0, 20, 2, 0, 0))
    assert batch.ended_at is not None
    assert batch.ended_at >= batch.created_at
    results = messages.results(batch.id)
    assert results.keys() == {request["custom_id"] for request in asked}
    succeeded = results["request-7"].result
    assert succeeded.type == "succeeded"
    assert succeeded.message.content[0].text == "Hello"
    assert succeeded.message.usage.output_tokens > 0
    for custom_id, param in (("bad", "temperature"), ("nonsense", "messages")):
        refused = results[custom_id].result
        assert refused.type == "errored"
        assert refused.error.type == "error"
        assert refused.error.error.type == "invalid_request_error"
        assert param in refused.error.error.message
    assert {request.priority for request in messages.running.engine.requests} == {100}, "behind those of users"
    assert messages.client.beta.messages.batches.retrieve(batch.id).processing_status == "ended"
    left = messages.files()
    assert len({key.split("/")[2] for key in left}) == 1, "the results; what was asked is gone"
    assert not [key for key in messages.running.store.objects if key.startswith("batches/")]


def test_a_result_is_what_the_message_would_have_been(messages: Messages) -> None:
    answer = messages.client.messages.create(**PARAMS)
    result = messages.results(messages.run(asks("a")).id)["a"].result
    assert result.type == "succeeded"
    same = {"content", "stop_reason", "stop_sequence", "model", "role", "type", "usage"}
    assert result.message.model_dump(include=same) == answer.model_dump(include=same)


def test_the_url_of_the_results_is_where_the_client_came_from(messages: Messages) -> None:
    batch = messages.run(asks("a"))
    route = f"{ROUTE}/{batch.id}"
    assert batch.results_url == f"{messages.running.url}{route}/results"
    with httpx.Client(base_url=messages.running.url, verify=False, timeout=PATIENCE) as http:
        headers = {"host": "models.internal", "x-forwarded-proto": "https"}
        assert http.get(route, headers=headers).json()["results_url"] == f"https://models.internal{route}/results"
        results = http.get(batch.results_url or "")
    assert results.headers["content-type"].startswith("application/x-jsonl")
    (line,) = results.text.splitlines()
    assert json.loads(line)["custom_id"] == "a"


@pytest.mark.parametrize(
    ("requests", "param"),
    [
        ([], "requests"),
        ([asks("")], "requests[0].custom_id"),
        ([asks("a b")], "requests[0].custom_id"),
        ([asks("x" * 65)], "requests[0].custom_id"),
        ([asks("a"), asks("b"), asks("a")], "requests[2].custom_id"),
        ([asks("a"), asks("b", stream=True)], "requests[1].params.stream"),
        ([{"custom_id": "a"}], "requests[0].params"),
        ([{"custom_id": "a", "params": []}], "requests[0].params"),
        ([{**asks("a"), "method": "POST"}], "requests[0].method"),
        ([asks(f"{i}") for i in range(1001)], "requests"),
    ],
)
def test_a_bad_batch_is_refused_as_a_whole(messages: Messages, requests: list[Any], param: str) -> None:
    before = dict(messages.running.store.objects)
    with pytest.raises(anthropic.BadRequestError) as caught:
        messages.batches.create(requests=requests)
    body: Any = caught.value.body
    assert (body["error"]["type"], body["error"]["details"]["param"]) == ("invalid_request_error", param)
    assert messages.running.store.objects == before


def test_pages_go_both_ways(start: Starter) -> None:
    messages = Messages(start())  # nothing runs here
    ids = [messages.batches.create(requests=[asks("a")]).id for _ in range(5)][::-1]
    listed = messages.batches.list(limit=2)
    assert ([batch.id for batch in listed.data], listed.has_more) == (ids[:2], True)
    assert [batch.id for batch in messages.batches.list(limit=2)] == ids, "the client turns the pages"
    before = messages.batches.list(limit=2, before_id=ids[4])
    assert ([batch.id for batch in before.data], before.has_more) == (ids[2:4], True)
    assert (before.first_id, before.last_id) == (ids[2], ids[3])
    before = messages.batches.list(limit=2, before_id=ids[2])
    assert ([batch.id for batch in before.data], before.has_more) == (ids[:2], False)
    assert messages.batches.list(before_id=ids[0]).data == []
    after = messages.batches.list(limit=9, after_id=ids[3])
    assert ([batch.id for batch in after.data], after.has_more) == (ids[4:], False)
    for cursor in ({"after_id": "msgbatch_x"}, {"before_id": "msgbatch_x"}):
        with pytest.raises(anthropic.NotFoundError):
            messages.batches.list(**cursor)
    for wrong in ({"after_id": ids[0], "before_id": ids[1]}, {"limit": 0}, {"limit": 1001}):
        with pytest.raises(anthropic.BadRequestError):
            messages.batches.list(**wrong)  # type: ignore[arg-type]


def test_cancelling_keeps_what_has_run(messages: Messages) -> None:
    engine = messages.running.engine

    async def first_three(_: FakeEngine, request: engine_pb2.GenerateRequest, send: Send) -> None:
        await (says("Hello") if request.sampling.top_k < 4 else hangs)(engine, request, send)

    engine.behaviour = first_three
    batch = messages.batches.create(requests=[asks(str(i), top_k=i + 1) for i in range(30)])
    messages.wait(batch.id, lambda found: found.completed == 3)
    with pytest.raises(anthropic.ConflictError, match="cancel it"):
        messages.batches.delete(batch.id)
    asked = messages.batches.cancel(batch.id)
    assert asked.processing_status in ("canceling", "ended")
    assert asked.cancel_initiated_at is not None
    batch = messages.wait(batch.id)
    assert (batch.processing_status, counts(batch)) == ("ended", (0, 3, 0, 27, 0))
    types = {custom_id: result.result.type for custom_id, result in messages.results(batch.id).items()}
    assert types == {str(i): "succeeded" if i < 3 else "canceled" for i in range(30)}
    assert messages.batches.cancel(batch.id).processing_status == "ended"
    done = messages.run(asks("a", top_k=1))
    with pytest.raises(anthropic.ConflictError, match="completed"):
        messages.batches.cancel(done.id)


def test_one_that_had_not_begun_has_results_too(start: Starter) -> None:
    messages = Messages(start())  # nothing runs here
    batch = messages.batches.create(requests=[asks(str(i)) for i in range(7)])
    with pytest.raises(anthropic.NotFoundError, match="no results yet"):
        messages.client.get(f"{ROUTE}/{batch.id}/results", cast_to=httpx.Response)
    batch = messages.batches.cancel(batch.id)
    assert (batch.processing_status, counts(batch)) == ("ended", (0, 0, 0, 7, 0))
    assert batch.cancel_initiated_at == batch.ended_at
    results = messages.results(batch.id)
    assert {custom_id: result.result.type for custom_id, result in results.items()} == {
        str(i): "canceled" for i in range(7)
    }


def test_the_window_passes(messages: Messages) -> None:
    records, queue = messages.running.batches.records, messages.running.batches
    done = records[messages.run(asks("a")).id]
    messages.running.engine.behaviour = hangs
    waiting = messages.batches.create(requests=[asks("a"), asks("b")])
    spec = records[waiting.id].spec.model_copy(update={"window_seconds": 1})
    batch = messages.wait(messages.running.run(queue.submit(spec)).id)
    assert (batch.processing_status, counts(batch)) == ("ended", (0, 0, 0, 0, 2))
    assert {result.result.type for result in messages.results(batch.id).values()} == {"expired"}
    assert done.spec.owner == spec.owner
    messages.batches.cancel(waiting.id)
    messages.wait(waiting.id)


def test_a_batch_that_failed_has_errors_for_results(start: Starter) -> None:
    messages = Messages(start())
    batch = messages.batches.create(requests=[asks("a"), asks("b")])
    messages.running.batches.records[batch.id] = messages.running.batches.records[batch.id].model_copy(
        update={"state": "failed", "finished_at": 1.0, "completed": 1}
    )
    batch = messages.batches.retrieve(batch.id)
    assert (batch.processing_status, counts(batch)) == ("ended", (0, 0, 2, 0, 0))
    for result in messages.results(batch.id).values():
        assert result.result.type == "errored"
        assert result.result.error.error.type == "api_error"


def test_deleting_removes_everything(messages: Messages) -> None:
    before = messages.files()
    batch = messages.run(asks("a"))
    assert len(messages.files()) > len(before)
    deleted = messages.batches.delete(batch.id)
    assert (deleted.id, deleted.type) == (batch.id, "message_batch_deleted")
    assert messages.files() == before
    for call in (messages.batches.retrieve, messages.batches.cancel, messages.batches.delete):
        with pytest.raises(anthropic.NotFoundError):
            call(batch.id)


def test_an_idempotency_key(start: Starter) -> None:
    messages = Messages(start())
    once = {"extra_headers": {"Idempotency-Key": "night-1"}}
    first = messages.batches.create(requests=[asks("a")], **once)  # type: ignore[arg-type]
    files = messages.files()
    assert messages.batches.create(requests=[asks("a")], **once).id == first.id  # type: ignore[arg-type]
    assert messages.files() == files
    with pytest.raises(anthropic.ConflictError):
        messages.batches.create(requests=[asks("b")], **once)  # type: ignore[arg-type]
    messages.batches.cancel(first.id)
    messages.batches.delete(first.id)
    assert messages.batches.create(requests=[asks("b")], **once).id != first.id  # type: ignore[arg-type]


def test_both_apis_have_one_limit_and_separate_lists(start: Starter) -> None:
    messages = Messages(start(batch_max_unfinished=2))
    mine = messages.batches.create(requests=[asks("a")])
    owner = messages.running.batches.records[mine.id].spec.owner
    spec = BatchSpec(owner=owner, input_file_id="file-x", endpoint="/v1/completions")
    theirs = messages.running.run(messages.running.batches.submit(spec))
    with pytest.raises(anthropic.RateLimitError) as caught:
        messages.batches.create(requests=[asks("b")])
    assert caught.value.response.headers["retry-after"] == "30"
    assert [batch.id for batch in messages.batches.list()] == [mine.id]
    with pytest.raises(anthropic.NotFoundError):
        messages.batches.retrieve(theirs.id)
    with httpx.Client(base_url=messages.running.url, verify=False, timeout=PATIENCE) as http:
        assert [batch["id"] for batch in http.get("/v1/batches").json()["data"]] == [theirs.id]
        assert http.get(f"/v1/batches/{mine.id}").status_code == 404
        assert http.post(f"/v1/batches/{mine.id}/cancel").status_code == 404
        assert http.get("/v1/files").json()["data"] == []
        assert http.get(f"/v1/files/{messages.running.batches.records[mine.id].spec.input_file_id}").status_code == 404
        body = {"input_file_id": "file-x", "endpoint": "/v1/messages", "completion_window": "24h"}
        assert http.post("/v1/batches", json=body).json()["error"]["param"] == "endpoint"


def test_each_key_sees_its_own(tmp_path: Path, start: Starter) -> None:
    keys = Keys(tmp_path / "keys.json")
    secrets = [keys.add(name, Scope.INFERENCE) for name in ("one", "two")]
    trainer = keys.add("trainer", Scope.TRAIN)
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS, **OPTIONS)
    mine, theirs = (Messages(running, secret) for secret in secrets)
    batch = mine.run(asks("a"))
    assert mine.results(batch.id)["a"].result.type == "succeeded"
    assert theirs.batches.list().data == []
    for call in (theirs.batches.retrieve, theirs.batches.cancel, theirs.batches.delete, theirs.batches.results):
        with pytest.raises(anthropic.NotFoundError):
            call(batch.id)
    with pytest.raises(anthropic.PermissionDeniedError):
        Messages(running, trainer).batches.list()


def test_stores_away_is_a_clear_answer(running: Running) -> None:
    messages = Messages(running)
    batch = messages.batches.create(requests=[asks("a")])
    running.store.down = True
    with pytest.raises(anthropic.InternalServerError) as caught:
        messages.batches.create(requests=[asks("a")])
    assert caught.value.status_code == 503
    running.store.down, running.batches.down = False, True
    for call in (messages.batches.retrieve, messages.batches.cancel, messages.batches.delete):
        with pytest.raises(anthropic.InternalServerError) as caught:
            call(batch.id)
        assert caught.value.response.headers["retry-after"]


def test_a_broken_engine_is_an_error_of_the_request(messages: Messages) -> None:
    messages.running.engine.behaviour = fails(engine_pb2.ERROR_CODE_INTERNAL, "broken")
    result = messages.results(messages.run(asks("a")).id)["a"].result
    assert result.type == "errored"
    assert result.error.error.type == "api_error"


def test_results_of_a_gateway_that_died_count(messages: Messages) -> None:
    running = messages.running
    running.engine.behaviour = hangs
    batch = messages.batches.create(requests=[asks(str(i)) for i in range(4)])
    running.wait_for(lambda: len(running.engine.running) == 4)
    theirs = b'{"custom_id":"%d","result":{"type":"%s"}}'
    parts = [
        b"1 o " + theirs % (0, b"succeeded"),
        b"2 e " + theirs % (1, b"errored"),
        b"3 x " + theirs % (2, b"expired"),
    ]
    running.store.put(f"batches/{batch.id}/000000", b"".join(part + b"\n" for part in parts))
    messages.batches.cancel(batch.id)
    batch = messages.wait(batch.id)
    assert counts(batch) == (0, 1, 1, 1, 1)
    types = {custom_id: result.result.type for custom_id, result in messages.results(batch.id).items()}
    assert types == {"0": "succeeded", "1": "errored", "2": "expired", "3": "canceled"}
