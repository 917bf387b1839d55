"""Conversations against the whole system, through the real openai client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.stack import Stack


def test_a_conversation_from_end_to_end(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        greedy: dict[str, Any] = {"model": stack.served_model_name, "temperature": 0, "max_output_tokens": 24}
        made = client.conversations.create(metadata={"suite": "conformance"})
        asked = client.responses.create(**greedy, input="What is 12 plus 7?", conversation=made.id)
        assert asked.conversation is not None
        assert asked.conversation.id == made.id
        again = client.responses.create(**greedy, input="And 5 more?", conversation=made.id)
        chained = client.responses.create(**greedy, input="And 5 more?", previous_response_id=asked.id)
        assert again.output_text == chained.output_text, "both say the same of what came before"
        assert again.usage is not None
        assert chained.usage is not None
        assert again.usage.input_tokens == chained.usage.input_tokens
        items = list(client.conversations.items.list(made.id, order="asc", limit=1))
        assert [getattr(item, "role", None) for item in items] == ["user", "assistant"] * 2
        added = client.conversations.items.create(made.id, items=[{"role": "user", "content": "Thank you."}])
        item_id = added.first_id
        assert client.conversations.items.retrieve(item_id, conversation_id=made.id).id == item_id
        client.conversations.items.delete(item_id, conversation_id=made.id)
        assert len(list(client.conversations.items.list(made.id))) == 4
        assert client.conversations.update(made.id, metadata={}).metadata == {}
        assert client.conversations.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(made.id)
