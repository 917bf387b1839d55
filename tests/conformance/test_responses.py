"""What programs written for OpenAI's Responses API expect, against the whole system, through the real openai client."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.stack import Stack

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "responses.md"
TIMER = {
    "type": "function",
    "name": "set_timer",
    "description": "Set a timer.",
    "parameters": {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]},
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 48}


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model(stack: Stack) -> str:
    return stack.served_model_name


def test_create_and_retrieve(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.create(model=model, input="What is 12 plus 7?", metadata={"test": "yes"}, **GREEDY)
    assert (answer.status, answer.output_text) == ("completed", "19")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What is 12 plus 7?"}], temperature=0, max_tokens=48
    )
    assert chat.choices[0].message.content == answer.output_text
    assert chat.usage.prompt_tokens == answer.usage.input_tokens
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=model, input="And?", previous_response_id=answer.id)


def test_stream(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "input": "What is 12 plus 7?", "instructions": "Be short.", **GREEDY}
    with client.responses.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text == client.responses.create(**options).output_text
    assert client.responses.retrieve(final.id).output_text == text


def test_tools_and_conversation(client: openai.OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input="Set a timer for 89 minutes.", tools=[TIMER], **GREEDY) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        first = stream.get_final_response()
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "set_timer", {"minutes": 89})
    assert "".join(deltas) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "The timer is set."}
    second = client.responses.create(
        model=model, input=[result], previous_response_id=first.id, tools=[TIMER], **GREEDY
    )
    items = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    assert (items[1].id, items[1].arguments) == (call.id, call.arguments)
    again = client.responses.create(
        model=model,
        input=[{"role": "user", "content": "Set a timer for 89 minutes."}, call, result],
        tools=[TIMER],
        **GREEDY,
    )
    assert again.usage.input_tokens == second.usage.input_tokens
    assert again.output_text == second.output_text


@pytest.mark.thorough
def test_thinking(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.create(
        model=model,
        input="What is 12 plus 7?",
        temperature=0,
        max_output_tokens=120,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    thought = answer.output[0]
    assert thought.type == "reasoning"
    assert thought.content[0].text
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert "think>" not in answer.output_text
    onwards = client.responses.create(
        model=model, input=[*answer.output, {"role": "user", "content": "And 3?"}], **GREEDY
    )
    assert onwards.status in ("completed", "incomplete")


def test_cut_off(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.create(model=model, input="What is 12 plus 7?", temperature=0, max_output_tokens=1)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_background(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.create(model=model, input="What is 12 plus 7?", background=True, **GREEDY)
    assert answer.status in ("queued", "in_progress")
    assert _ended(client, answer.id).output_text == "19"
    # Every token but the end: it goes on until it is cancelled.
    endless = client.responses.create(
        model=model, input="Count.", background=True, extra_body={"logit_bias": _never_ends(client, model)}
    )
    assert client.responses.cancel(endless.id).status == "cancelled"
    assert client.responses.retrieve(endless.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(client.responses.create(model=model, input="Hi", **GREEDY).id)


def _ended(client: openai.OpenAI, response_id: str) -> Any:
    deadline = time.monotonic() + 30
    while (answer := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer


def _never_ends(client: openai.OpenAI, model: str) -> dict[str, float]:
    """A bias against the token that ends an answer."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is 12 plus 7?"}],
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    return {str(answer.choices[0].model_extra["token_ids"][-1]): -100.0}


def test_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model="nobody", input="hi")
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as hosted:
        client.responses.create(model=model, input="hi", tools=[{"type": "web_search"}])
    assert hosted.value.param == "tools[0].type"
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(model=model, input="hi", max_output_tokens=10**7)
    assert (long.value.code, "max_output_tokens" in long.value.message) == ("context_length_exceeded", True)


@pytest.mark.thorough
def test_the_guide_runs(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) == 9
    text = "\n".join(blocks).replace("http://127.0.0.1:8420", stack.url).replace("qwen3.5", stack.served_model_name)
    exec(compile(text, str(GUIDE), "exec"), {})
    printed = capsys.readouterr().out
    assert "19" in printed
    assert "completed 34" in printed
    assert "['reasoning', 'message']" in printed
    assert "[('files', 'list')]" in printed
    assert re.search(r"\['line \d{1,3}: [a-z ]{1,20}'\]", printed)
