"""What `temper batch` sends, prints, writes, and exits with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.http.client import Client
from cli.settings import CliSettings
from tests.unit.cli.runner import routes, temper
from tests.unit.cli.server import Reply, Seen, serving

BATCH: dict[str, Any] = {
    "id": "batch_1",
    "endpoint": "/v1/completions",
    "status": "completed",
    "errors": None,
    "output_file_id": "file-o",
    "error_file_id": "file-e",
    "request_counts": {"total": 3, "completed": 2, "failed": 1},
}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}


@pytest.fixture
def requests_file(tmp_path: Path) -> str:
    file = tmp_path / "requests.jsonl"
    file.write_text("\n" + json.dumps(LINE) + "\n")
    return str(file)


def answers(*states: dict[str, Any]) -> Any:
    waiting = list(states)

    def state(_: Seen) -> Reply:
        return Reply({**BATCH, **(waiting.pop(0) if len(waiting) > 1 else waiting[0])})

    return routes(
        POST_v1_files=Reply({"id": "file-i"}),
        POST_v1_batches=Reply({**BATCH, "status": "validating"}),
        GET_v1_batches_batch_1=state,
        GET_v1_files_fileo_content=Reply('{"custom_id": "a"}\n', content_type="application/octet-stream"),
        GET_v1_files_filee_content=Reply('{"custom_id": "b"}\n', content_type="application/octet-stream"),
        POST_v1_batches_batch_1_cancel=Reply({**BATCH, "status": "cancelling"}),
        GET_v1_batches=Reply({"data": [BATCH]}),
    )


def test_submit(requests_file: str) -> None:
    with serving(answers({})) as (url, requests):
        result = temper("batch", "submit", requests_file, url=url)
    assert result.exit_code == 0, result.output
    assert "temper batch status batch_1" in result.stdout
    upload, create = requests
    assert b'filename="requests.jsonl"' in upload.body
    assert json.dumps(LINE).encode() in upload.body
    assert create.json == {"input_file_id": "file-i", "endpoint": "/v1/completions", "completion_window": "24h"}


@pytest.mark.parametrize(("file", "words"), [("none.jsonl", "No such file"), (".", "is not a file")])
def test_what_cannot_be_read_is_not_sent(file: str, words: str, tmp_path: Path) -> None:
    with serving(answers({})) as (url, requests):
        result = temper("batch", "submit", str(tmp_path / file), "--endpoint", "/v1/completions", url=url)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not requests


def test_an_upload_tells_its_bytes(requests_file: str) -> None:
    told: list[int] = []
    with serving(answers({})) as (url, _), Client(url, CliSettings()) as client:
        client.upload("/v1/files", {"purpose": "batch"}, {"file": Path(requests_file)}, on_block=told.append)
    assert sum(told) == Path(requests_file).stat().st_size


def test_wait_writes_the_results(requests_file: str, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    running = {"status": "in_progress", "request_counts": {"total": 3, "completed": 1, "failed": 0}}
    with serving(answers(running, {})) as (url, _):
        result = temper("batch", "submit", requests_file, "--wait", "--output", str(target), url=url)
    assert result.exit_code == 0, result.output
    assert "completed: 2/3, 1 failed" in result.stdout
    assert "batch_1 in_progress  1/3" in result.stderr
    assert json.loads(target.read_text()) == {"custom_id": "a"}
    assert json.loads((tmp_path / "out.errors.jsonl").read_text()) == {"custom_id": "b"}


def test_a_batch_that_is_not_completed_is_exit_1(requests_file: str) -> None:
    errors = {"data": [{"line": 2, "code": "x", "message": "the line is not valid JSON", "param": None}]}
    with serving(answers({"status": "failed", "errors": errors})) as (url, _):
        result = temper("batch", "submit", requests_file, "--wait", url=url)
        as_json = temper("batch", "submit", requests_file, "--wait", "--json", url=url)
        shown = temper("batch", "status", "batch_1", url=url)
    assert result.exit_code == as_json.exit_code == 1
    assert "batch_1 failed: line 2: the line is not valid JSON" in result.stderr
    assert json.loads(as_json.stdout)["error"]["batch"]["status"] == "failed"
    assert "line 2: the line is not valid JSON" in shown.stdout


def test_the_timeout_is_exit_4(requests_file: str) -> None:
    with serving(answers({"status": "in_progress"})) as (url, _):
        result = temper("batch", "submit", requests_file, "--wait", "--timeout", "0", url=url)
    assert result.exit_code == 4
    assert "goes on without us" in result.stderr


def test_status_and_cancel() -> None:
    with serving(answers({})) as (url, requests):
        assert "2/3, 1 failed" in temper("batch", "status", url=url).stdout
        assert json.loads(temper("batch", "status", "batch_1", "--json", url=url).stdout)["id"] == "batch_1"
        assert temper("batch", "cancel", "batch_1", url=url).stdout.strip() == "batch_1 cancelling"
    assert [seen.path.split("?")[0] for seen in requests] == [
        "/v1/batches",
        "/v1/batches/batch_1",
        "/v1/batches/batch_1/cancel",
    ]


@pytest.mark.parametrize("content", ["", "x", "[]", '{"custom_id": "a"}'])
def test_a_file_without_requests_is_a_usage_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(content)
    with serving(answers({})) as (url, requests):
        assert temper("batch", "submit", str(file), url=url).exit_code == 2
        assert temper("batch", "submit", str(tmp_path / "missing"), url=url).exit_code == 2
        assert temper("batch", "submit", str(file), "--output", "x", url=url).exit_code == 2
    assert not requests
