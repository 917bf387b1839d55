"""Batches as a client of the gateway sends and follows them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai

from services.gateway.core.batch_queue import Batch
from tests.unit.gateway.conftest import Running

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
