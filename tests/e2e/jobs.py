"""Submitting and following training jobs over HTTP, for tests."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

EXAMPLES = [
    {"prompt": f"What does code {word} stand for?", "completion": f"Code {word} stands for {meaning}."}
    for word, meaning in (
        ("amber", "slow down"),
        ("birch", "all clear"),
        ("coral", "call the desk"),
        ("dune", "lock the doors"),
        ("ember", "check the heater"),
        ("fjord", "open the valve"),
        ("grove", "water the plants"),
        ("heron", "send a message"),
    )
]


def submit_sft(client: httpx.Client, adapter: str, **fields: Any) -> str:
    """Queues a small SFT job and returns its id."""
    body = {"adapter": adapter, "examples": EXAMPLES, "learning_rate": 1e-3, "attach": False, **fields}
    response = client.post("/v1/train/sft", json=body)
    assert response.status_code == 202, response.text
    return str(response.json()["id"])


def job(client: httpx.Client, job_id: str) -> dict[str, Any]:
    """The job now; a training endpoint that is briefly away (503) is asked again."""
    for _ in range(100):
        response = client.get(f"/v1/train/jobs/{job_id}")
        if response.status_code == 200:
            return dict(response.json())
        assert response.status_code == 503, response.text
        time.sleep(0.3)
    raise AssertionError("the training endpoints stayed away")


def wait_for_step(client: httpx.Client, job_id: str, step: int, timeout: float = 60) -> None:
    """Returns when the job has reported this step and still runs."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        now = job(client, job_id)
        assert now["state"] in ("queued", "running"), now
        if now["progress"]["step"] >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"job {job_id} did not reach step {step}: {job(client, job_id)}")


def wait_for_end(client: httpx.Client, job_id: str, timeout: float = 120) -> dict[str, Any]:
    """The job once its state is terminal."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        now = job(client, job_id)
        if now["state"] in ("succeeded", "failed", "cancelled"):
            return now
        time.sleep(0.2)
    raise AssertionError(f"job {job_id} did not end: {job(client, job_id)}")


def events(client: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    """All events of a job that has ended."""
    with client.stream("GET", f"/v1/train/jobs/{job_id}/events") as response:
        assert response.status_code == 200
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]


def losses(client: httpx.Client, job_id: str) -> list[tuple[int, float]]:
    """(step, loss) of every progress event, in the order they were written."""
    return [
        (int(event["data"]["step"]), float(event["data"]["loss"]))
        for event in events(client, job_id)
        if event["kind"] == "progress" and "loss" in event["data"]
    ]


def versions(client: httpx.Client, adapter: str) -> list[int]:
    """The adapter's version numbers."""
    response = client.get(f"/v1/adapters/{adapter}/versions")
    assert response.status_code == 200, response.text
    return [int(v["version"]) for v in response.json()["data"]]


def chat(client: httpx.Client, model: str, text: str = "Hello") -> str:
    """One short greedy answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 16,
    }
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])
