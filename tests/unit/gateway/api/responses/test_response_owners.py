"""Stored responses belong to the API key that made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from services.common.security.api_keys import Scope
from tests.unit.gateway.conftest import MODEL, Starter
from tests.unit.gateway.key_file import NO_REDIS, Keys


def test_each_key_sees_its_own(tmp_path: Path, start: Starter) -> None:
    keys = Keys(tmp_path / "keys.json")
    secrets = [keys.add(name, Scope.INFERENCE) for name in ("one", "two")]
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS)
    mine, theirs = (
        openai.OpenAI(
            base_url=f"{running.url}/v1",
            api_key=secret,
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=False),
        )
        for secret in secrets
    )
    made = mine.responses.create(model=MODEL, input="hi")
    assert mine.responses.retrieve(made.id).output_text == made.output_text
    assert mine.responses.create(model=MODEL, input="go on", previous_response_id=made.id).output_text
    for call in (theirs.responses.retrieve, theirs.responses.delete, theirs.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError):
        theirs.responses.input_items.list(made.id)
    with pytest.raises(openai.NotFoundError):
        theirs.responses.create(model=MODEL, input="go on", previous_response_id=made.id)
    item = {"type": "item_reference", "id": made.output[0].id}
    turns: Any = [{"role": "user", "content": "hi"}, item, {"role": "user", "content": "go on"}]
    assert mine.responses.create(model=MODEL, input=turns).output_text
    with pytest.raises(openai.NotFoundError, match=item["id"]):
        theirs.responses.create(model=MODEL, input=turns)
    mine.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        mine.responses.retrieve(made.id)
