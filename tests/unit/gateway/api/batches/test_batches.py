"""/v1/batches and the gateway that runs them, on stores in memory and an engine that says what it is told."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from services.gateway.core.batch_queue import BatchSpec
from services.gateway.core.file_store import FileStore, NewFile, new_file_id
from tests.stack import PATIENCE
from tests.unit.gateway.batch_client import BODY, CHAT, Batches, jsonl, line
from tests.unit.gateway.conftest import Running, Starter


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
    metrics = httpx.get(f"{batches.running.url}/metrics", verify=False, timeout=PATIENCE).text
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
        (b'{"custom_id": "a", "body": {"model": "a", "model": "b"}}', 1, "repeated_key", "body.model"),
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
        response = httpx.post(url, json={**good, **change}, verify=False, timeout=PATIENCE)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    output = batches.run(line("a")).output_file_id
    with pytest.raises(openai.BadRequestError, match="purpose"):
        batches.client.batches.create(input_file_id=output or "", endpoint=CHAT, completion_window="24h")
    for path in ("batch_x", "batch_" + "0" * 26):
        assert httpx.get(f"{url}/{path}", verify=False, timeout=PATIENCE).status_code == 404
        assert httpx.post(f"{url}/{path}/cancel", verify=False, timeout=PATIENCE).status_code == 404


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
