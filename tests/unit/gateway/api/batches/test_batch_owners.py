"""Files and batches belong to the API key that made them, and a batch runs as its key."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import openai
import pytest

from services.common.security.api_keys import Scope
from tests.unit.gateway.batch_client import OPTIONS, Batches, line
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.key_file import NO_REDIS, Keys


def as_key(running: Running, secret: str) -> Batches:
    plain = openai.DefaultHttpxClient(verify=False)
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key=secret, max_retries=0, http_client=plain)
    return Batches(running, client)


def test_each_key_sees_its_own(tmp_path: Path, start: Starter) -> None:
    keys = Keys(tmp_path / "keys.json")
    secrets = [keys.add(name, Scope.INFERENCE) for name in ("one", "two")]
    trainer = keys.add("trainer", Scope.TRAIN)
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS, api_keys_poll_seconds=0.05, **OPTIONS)
    mine, theirs = (as_key(running, secret) for secret in secrets)
    batch = mine.run(line("a"))
    assert batch.status == "completed"
    answer = mine.read(batch.output_file_id)["a"]["response"]
    assert answer["body"]["choices"][0]["message"]["content"] == "Hello, w"
    assert running.batches.records[batch.id].spec.owner == keys.entries["one"].id
    files = (batch.input_file_id, batch.output_file_id or "")
    assert {file.id for file in mine.client.files.list()} == set(files)
    assert theirs.client.files.list().data == []
    assert theirs.client.batches.list().data == []
    for file_id in files:
        for call in (theirs.client.files.retrieve, theirs.client.files.content, theirs.client.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file_id)
    for call in (theirs.client.batches.retrieve, theirs.client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    with pytest.raises(openai.NotFoundError):
        theirs.client.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )
    with pytest.raises(openai.PermissionDeniedError):
        as_key(running, trainer).client.batches.list()
    assert as_key(running, trainer).client.files.list().data == []
    # The key is revoked: what it submitted runs no more.
    waiting = mine.upload(b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{}}')
    keys.change("one", revoked_at=datetime.now(UTC))
    running.wait_for(lambda: _refused(mine))
    record = running.run(
        running.batches.submit(running.batches.records[batch.id].spec.model_copy(update={"input_file_id": waiting}))
    )
    running.wait_for(lambda: running.batches.records[record.id].ended)
    ended = running.batches.records[record.id]
    assert (ended.completed, ended.failed) == (0, 1)


def _refused(batches: Batches) -> bool:
    try:
        batches.client.files.list()
    except openai.AuthenticationError:
        return True
    return False
