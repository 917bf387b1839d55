"""Anthropic's message batches against the whole system, through the real anthropic client."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types.messages import MessageBatch

from tests.stack import Stack

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "batches.md"


@pytest.fixture
def client(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ended(client: anthropic.Anthropic, batch_id: str) -> MessageBatch:
    deadline = time.monotonic() + 60
    while (batch := client.messages.batches.retrieve(batch_id)).processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
    return batch


def test_results_are_those_of_plain_messages(client: anthropic.Anthropic, stack: Stack) -> None:
    params: dict[str, Any] = {"model": stack.served_model_name, "max_tokens": 8, "temperature": 0}
    asked: list[Any] = [
        {
            "custom_id": f"sum-{i}",
            "params": {**params, "messages": [{"role": "user", "content": f"What is {i} plus 7?"}]},
        }
        for i in range(3)
    ]
    bad: Any = {"custom_id": "bad", "params": {**asked[0]["params"], "model": "no-such-model"}}
    batch = ended(client, client.messages.batches.create(requests=[*asked, bad]).id)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (3, 1)
    results = {result.custom_id: result.result for result in client.messages.batches.results(batch.id)}
    assert results.keys() == {"sum-0", "sum-1", "sum-2", "bad"}
    for request in asked:
        result = results[request["custom_id"]]
        assert result.type == "succeeded"
        plain = dict(request["params"])
        greedy = {"temperature": plain.pop("temperature")}
        message = client.messages.create(**plain, extra_body=greedy)
        assert result.message.content == message.content
        assert result.message.stop_reason == message.stop_reason
        assert result.message.usage.output_tokens == message.usage.output_tokens
    refused = results["bad"]
    assert refused.type == "errored"
    assert refused.error.error.type == "not_found_error"
    assert batch.id in [found.id for found in client.messages.batches.list(limit=5)]
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_cancel(client: anthropic.Anthropic, stack: Stack) -> None:
    long: Any = {
        "model": stack.served_model_name,
        "max_tokens": 400,
        "messages": [{"role": "user", "content": "Count to a hundred."}],
        "thinking": {"type": "enabled", "budget_tokens": 399},
    }
    batch = client.messages.batches.create(requests=[{"custom_id": f"n-{i}", "params": long} for i in range(200)])
    began = time.monotonic()
    assert client.messages.batches.cancel(batch.id).cancel_initiated_at is not None
    batch = ended(client, batch.id)
    assert time.monotonic() - began < 15
    counts = batch.request_counts
    assert counts.canceled > 0
    assert counts.canceled + counts.succeeded == 200
    types = [result.result.type for result in client.messages.batches.results(batch.id)]
    assert (types.count("canceled"), types.count("succeeded")) == (counts.canceled, counts.succeeded)


@pytest.mark.thorough
def test_the_guide_runs_as_written(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(
        r"^```python\n(import time\n\nimport anthropic.*?)^```$", GUIDE.read_text(), re.DOTALL | re.M
    )
    exec(program.replace("http://localhost:8420", stack.url), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 10
    assert {line.split()[0] for line in printed} == {f"question-{number}" for number in range(10)}
