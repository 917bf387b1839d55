"""Files and batches against the whole system, through the real openai client."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from cli.main import app
from tests.stack import Stack

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "batches.md"
CHAT = "/v1/chat/completions"


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def submit(client: openai.OpenAI, bodies: dict[str, dict[str, Any]], endpoint: str = CHAT) -> openai.types.Batch:
    lines = [{"custom_id": key, "method": "POST", "url": endpoint, "body": body} for key, body in bodies.items()]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    assert client.files.content(file.id).read() == content
    return client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
        metadata={"test": "conformance"},
    )


def ended(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    deadline = time.monotonic() + 60
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
    return batch


def read(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    assert file_id is not None
    entries = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    found = {entry["custom_id"]: entry for entry in entries}
    assert len(found) == len(entries)
    return found


def test_answers_are_those_of_plain_requests(client: openai.OpenAI, stack: Stack) -> None:
    bodies = {
        f"sum-{i}": {
            "model": stack.served_model_name,
            "messages": [{"role": "user", "content": f"What is {i} plus 7?"}],
            "temperature": 0,
            "max_tokens": 8,
        }
        for i in range(4)
    }
    bad = {"model": "no-such-model", "messages": [{"role": "user", "content": "hi"}]}
    batch = ended(client, submit(client, {**bodies, "bad": bad}).id)
    assert batch.status == "completed"
    assert batch.metadata == {"test": "conformance"}
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (5, 4, 1)
    output = read(client, batch.output_file_id)
    assert output.keys() == bodies.keys()
    for key, body in bodies.items():
        completion = openai.types.chat.ChatCompletion.model_validate(output[key]["response"]["body"])
        plain = client.chat.completions.create(**body)
        assert completion.choices[0].message.content == plain.choices[0].message.content
        assert completion.usage is not None
        assert plain.usage is not None
        assert completion.usage.completion_tokens == plain.usage.completion_tokens
    refused = read(client, batch.error_file_id)["bad"]["response"]
    assert (refused["status_code"], refused["body"]["error"]["code"]) == (404, "model_not_found")
    assert batch.id in [found.id for found in client.batches.list(limit=5)]
    for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        assert client.files.delete(file_id or "").deleted


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/embeddings", {"input": "Once"}, "list"),
        ("/v1/responses", {"input": "What is 12 plus 7?", "max_output_tokens": 16}, "response"),
    ],
)
def test_every_endpoint(client: openai.OpenAI, stack: Stack, endpoint: str, body: dict[str, Any], kind: str) -> None:
    batch = ended(client, submit(client, {"a": {"model": stack.served_model_name, **body}}, endpoint).id)
    assert batch.status == "completed"
    answer = read(client, batch.output_file_id)["a"]["response"]
    assert (answer["status_code"], answer["body"]["object"]) == (200, kind)


def test_cancel(client: openai.OpenAI, stack: Stack) -> None:
    long = {"model": stack.served_model_name, "prompt": "Once", "max_tokens": 400, "ignore_eos": True}
    batch = submit(client, {f"long-{i}": {**long, "seed": i} for i in range(200)}, "/v1/completions")
    while client.batches.retrieve(batch.id).status == "validating":
        time.sleep(0.05)
    began = time.monotonic()
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    assert time.monotonic() - began < 15
    assert batch.status == "cancelled"
    assert batch.request_counts is not None
    assert batch.request_counts.completed < 200
    assert batch.request_counts.completed + batch.request_counts.failed == 200
    refused = read(client, batch.error_file_id)
    assert {entry["error"]["code"] for entry in refused.values()} == {"batch_cancelled"}


@pytest.mark.thorough
def test_the_guide_runs_as_written(stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = GUIDE.read_text()
    program = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[0]
    ((name, lines),) = re.findall(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF$", text, re.DOTALL | re.MULTILINE)
    (command,) = re.findall(r"^temper (batch submit .+)$", text, re.MULTILINE)
    exec(program.replace("http://localhost:8420", stack.url), {})
    printed = capsys.readouterr().out
    assert printed.startswith("completed {")
    assert printed.count("question-") == 10
    (tmp_path / name).write_text(lines)
    words = [str(tmp_path / word) if word.endswith(".jsonl") else word for word in command.split()]
    result = CliRunner().invoke(app, [*words, "--url", stack.url])
    assert result.exit_code == 0, result.output
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {answer["custom_id"]: answer["response"]["status_code"] for answer in answers} == {
        "first": 200,
        "second": 200,
    }


def test_a_file_of_bad_lines(client: openai.OpenAI) -> None:
    file = client.files.create(file=("requests.jsonl", b'{"custom_id": "a"}\nnonsense\n'), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    batch = ended(client, batch.id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data or []] == [
        (1, "missing_required_parameter"),
        (2, "invalid_json_line"),
    ]
