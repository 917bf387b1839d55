"""Logs of a whole Temper, read through its gateway."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.forked import ForkedProcess, command_line
from tests.stack import PATIENCE, Stack, clean_environment


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=PATIENCE) as connection:
        yield connection


def chat(client: httpx.Client, request_id: str) -> str:
    body = {"model": "qwen3.5", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = client.post("/v1/chat/completions", json=body, headers={"x-request-id": request_id})
    return str(answer.raise_for_status().json()["id"])


def test_gateway_and_engine_are_read(client: httpx.Client, stack: Stack) -> None:
    name = f"find-{uuid.uuid4().hex}"
    completion = chat(client, name)
    found = client.get("/v1/logs", params={"request_id": name}).json()
    (line,) = found["data"]
    assert (line["process"], line["message"], line["request_id"]) == ("gateway", "request", name)
    assert line["fields"]["completion_id"] == completion
    assert client.get("/v1/logs", params={"request_id": completion}).json()["data"] == [line]
    _, engine = found["processes"]
    plans = client.get("/v1/logs", params={"process": engine, "text": "memory plan", "level": "info"}).json()["data"]
    assert [plan["process"] for plan in plans] == [engine]
    assert {"message": plans[0]["message"], "level": "info"}.items() <= plans[0].items()
    assert client.get("/v1/logs", params={"process": engine, "request_id": name}).json()["data"] == []

    everything = client.get("/v1/logs", params={"limit": 1000}).text
    secrets = json.loads((stack.data_dir / "secrets.json").read_text())
    assert [name for name, secret in secrets.items() if str(secret) in everything] == []


def test_an_engine_is_asked_for_what_it_could_not_do(client: httpx.Client) -> None:
    """A job runs in the engine's process; its lines have its id, and no request's."""
    body = {
        "adapter": f"logs-{uuid.uuid4().hex[:6]}",
        "attach": False,
        "examples": [{"prompt": "a", "completion": "b"}],
    }
    job = client.post("/v1/train/sft", json=body).raise_for_status().json()["id"]
    with client.stream("GET", f"/v1/train/jobs/{job}/events") as events:
        assert '"succeeded"' in [line for line in events.iter_lines() if line.startswith("data:")][-1]
    lines = client.get("/v1/logs", params={"text": f"job={job}"}).json()["data"]
    assert {line["process"] for line in lines} - {"gateway"}, "the trainer says what it does"
    client.delete(f"/v1/adapters/{body['adapter']}").raise_for_status()


def test_lines_are_followed(client: httpx.Client) -> None:
    name = f"follow-{uuid.uuid4().hex}"
    with client.stream("GET", "/v1/logs", params={"request_id": name, "follow": True}) as answer:
        asking = threading.Thread(target=chat, args=(client, name))
        asking.start()
        line = next(line for line in answer.iter_lines() if line.startswith("data:"))
    asking.join()
    assert json.loads(line.removeprefix("data:"))["request_id"] == name


def test_the_command_reads_a_server(client: httpx.Client, stack: Stack, tmp_path: Path) -> None:
    name = f"command-{uuid.uuid4().hex}"
    chat(client, name)
    output, log = tmp_path / "output", tmp_path / "log"
    environment = clean_environment({"NO_COLOR": "1"})
    arguments = ("logs", "gateway", "--url", stack.url, "--request", name)
    assert ForkedProcess(command_line, *arguments, environment=environment, log=log, output=output).wait(120) == 0
    (line,) = output.read_text().splitlines()
    assert line.startswith("gateway ")
    assert f"info    request request_id={name}" in line
