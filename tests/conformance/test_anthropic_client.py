"""What programs written for Anthropic's API expect, against the whole system, through the real anthropic client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.stack import Stack

USER = [{"role": "user", "content": "What is 12 plus 7?"}]
TOOL = {
    "name": "add",
    "description": "adds two numbers",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


@pytest.fixture
def client(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def body(stack: Stack) -> dict[str, Any]:
    """A message that is answered the same every time."""
    greedy = {"temperature": 0}
    return {"model": stack.served_model_name, "max_tokens": 24, "messages": USER, "extra_body": greedy}


def test_it_answers_what_the_chat_answers(client: anthropic.Anthropic, body: dict[str, Any], stack: Stack) -> None:
    message = client.messages.create(**body, system="Be brief.")
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as chat:
        turns = [{"role": "system", "content": "Be brief."}, *USER]
        same = chat.chat.completions.create(model=body["model"], messages=turns, max_tokens=24, temperature=0)
    assert message.type == "message"
    assert [block.text for block in message.content] == [same.choices[0].message.content]
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == same.usage.prompt_tokens
    assert message.usage.output_tokens == same.usage.completion_tokens
    assert message.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[same.choices[0].finish_reason]


def test_stream_equals_plain(client: anthropic.Anthropic, body: dict[str, Any]) -> None:
    plain = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == plain.content[0].text
    assert final.stop_reason == plain.stop_reason
    assert final.usage.output_tokens == plain.usage.output_tokens
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == (
        plain.usage.input_tokens + plain.usage.cache_read_input_tokens
    )


def test_a_stop_sequence_is_named(client: anthropic.Anthropic, body: dict[str, Any]) -> None:
    whole = client.messages.create(**body).content[0].text
    middle = len(whole) // 2
    stop = whole[middle : middle + 2]
    message = client.messages.create(**body, stop_sequences=["\x00never", stop])
    assert "".join(block.text for block in message.content) == whole[: whole.find(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_tools_and_thinking_there_and_back(client: anthropic.Anthropic, body: dict[str, Any]) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 12, "b": 7}}
    thought = {"type": "thinking", "thinking": "I add them.", "signature": ""}
    back = [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "19"}]}]
    messages = [*USER, {"role": "assistant", "content": [thought, call]}, {"role": "user", "content": back}]
    body |= {"messages": messages, "tools": [TOOL], "thinking": {"type": "adaptive"}}
    message = client.messages.create(**body)
    assert message.content[0].type == "thinking", "the prompt ends in an open <think>"
    assert message.usage.output_tokens_details.thinking_tokens > 0
    again = [*messages, {"role": "assistant", "content": [message.content[0], {"type": "text", "text": "19"}]}, *USER]
    longer = client.messages.create(**body | {"messages": again})
    assert longer.usage.cache_read_input_tokens + longer.usage.input_tokens > (
        message.usage.cache_read_input_tokens + message.usage.input_tokens
    )


def test_count_tokens_is_what_usage_says(client: anthropic.Anthropic, body: dict[str, Any]) -> None:
    prompt = {field: body[field] for field in ("model", "messages")} | {"system": "Be brief.", "tools": [TOOL]}
    usage = client.messages.create(**prompt, max_tokens=4).usage
    count = client.messages.count_tokens(**prompt).input_tokens
    assert count == usage.input_tokens + usage.cache_read_input_tokens
    assert count > client.messages.count_tokens(model=body["model"], messages=USER).input_tokens


def test_errors_are_the_clients_exceptions(client: anthropic.Anthropic, body: dict[str, Any]) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**body | {"model": "nobody"})
    assert (missing.value.type, missing.value.error_code) == ("not_found_error", "model_not_found")
    with pytest.raises(anthropic.NotFoundError), client.messages.stream(**body | {"model": "nobody@3"}) as stream:
        stream.until_done()
    picture = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    with pytest.raises(anthropic.BadRequestError) as image:
        client.messages.create(**body | {"messages": [{"role": "user", "content": [picture]}]})
    assert image.value.details.param == "messages[0].content[0].type"
    with pytest.raises(anthropic.BadRequestError) as long:
        client.messages.create(**body | {"messages": [{"role": "user", "content": "x y " * 100_000}]})
    assert long.value.error_code == "context_length_exceeded"


def test_models(client: anthropic.Anthropic, stack: Stack) -> None:
    models = list(client.models.list())
    assert models[0].id == stack.served_model_name
    assert client.models.retrieve(models[0].id).display_name == models[0].id


def test_tokens_there_and_back(stack: Stack) -> None:
    text = "The quick brown fox, naïve 🙂, jumps over<|im_end|>"
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert len(found["token_strs"]) == found["count"] == len(found["tokens"])
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
        completion = {"model": stack.served_model_name, "prompt": text, "max_tokens": 1, "return_token_ids": True}
        assert http.post("/v1/completions", json=completion).json()["prompt_token_ids"] == found["tokens"]
        chat = http.post("/tokenize", json={"messages": USER}).json()
        body = {"model": stack.served_model_name, "messages": USER, "max_tokens": 1, "return_token_ids": True}
        assert http.post("/v1/chat/completions", json=body).json()["prompt_token_ids"] == chat["tokens"]
