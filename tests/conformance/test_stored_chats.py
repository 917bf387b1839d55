"""Chats that are kept, against the whole system, through the real openai client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.stack import Stack


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_store_retrieve_list_update_delete(client: openai.OpenAI, stack: Stack) -> None:
    chats = client.chat.completions
    body: dict[str, Any] = {
        "model": stack.served_model_name,
        "messages": [{"role": "user", "content": "What is 12 plus 7?"}],
        "max_tokens": 16,
        "temperature": 0,
        "metadata": {"suite": "stored-chats"},
    }
    chats.create(**body)  # is not kept
    whole = chats.create(**body, store=True)
    assert chats.retrieve(whole.id) == whole
    with chats.create(**body, store=True, stream=True) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chats.retrieve(chunks[0].id).choices[0].message.content == text == whole.choices[0].message.content
    mine = chats.list(metadata={"suite": "stored-chats"}, limit=1)
    assert [chat.id for chat in mine] == [whole.id, chunks[0].id]
    assert [chat.id for chat in chats.list(metadata={"suite": "stored-chats"}, order="desc")] == [
        chunks[0].id,
        whole.id,
    ]
    (message,) = chats.messages.list(whole.id)
    assert (message.role, message.content) == ("user", "What is 12 plus 7?")
    chats.update(whole.id, metadata={"suite": "done"})
    assert [chat.id for chat in chats.list(metadata={"suite": "done"})] == [whole.id]
    for chat_id in (whole.id, chunks[0].id):
        assert chats.delete(chat_id).deleted
        with pytest.raises(openai.NotFoundError):
            chats.retrieve(chat_id)
