"""Anthropic's messages through the real anthropic client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from pydantic import TypeAdapter

from services.common.pb import engine_pb2
from services.gateway.protocol.messages.response import MessageAnswer, MessageEvent
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine, Send, says

ROUTE = "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "messages": USER}
WEATHER = {
    "name": "weather",
    "description": "tells the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
CALL = (
    "Sure.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
THINK = {"type": "enabled", "budget_tokens": 32}
EVENTS: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)


def ask(claude: anthropic.Anthropic, body: dict[str, Any], *, stream: bool) -> Any:
    """The whole message, streamed or in one piece."""
    if not stream:
        return claude.messages.create(**body)
    with claude.messages.stream(**body) as events:
        return events.get_final_message()


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each checked to have the type as its name and to be what the client's types say."""
    found = []
    for text in answer.text.split("\n\n")[:-1]:
        name, data = text.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        MessageEvent.model_validate(payload, strict=True)
        if payload["type"] not in ("ping", "error"):
            EVENTS.validate_python(payload, strict=True)
        found.append(payload)
    return found


def test_plain_answer(running: Running, claude: anthropic.Anthropic, http: httpx.Client) -> None:
    running.engine.attached = "bot@3"
    running.engine.cached_tokens = 5
    raw = claude.messages.with_raw_response.create(**BODY)
    message = raw.parse()
    assert message.content == [anthropic.types.TextBlock(type="text", text="Hello, world")]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert raw.headers["x-temper-adapter"] == message.model_extra["adapter"] == "bot@3"
    assert message._request_id == raw.headers["x-request-id"]
    request = running.engine.requests[0]
    assert request.request_id == message.id
    assert request.sampling.max_tokens == 64
    prompt = running.engine.codec.encode_chat(USER)
    assert list(request.prompt_token_ids) == prompt
    assert message.usage.input_tokens == len(prompt) - 5
    assert message.usage.cache_read_input_tokens == 5
    assert message.usage.output_tokens == 13
    MessageAnswer.model_validate(http.post(ROUTE, json=BODY).json(), strict=True)


def test_stream_equals_plain(running: Running, claude: anthropic.Anthropic) -> None:
    text = "naïve 🙂 日本語 — done"
    running.engine.behaviour = says(text)
    running.engine.cached_tokens = 2
    plain = claude.messages.create(**BODY)
    with claude.messages.stream(**BODY) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert final.content[0].text == plain.content[0].text == text
    assert final.usage == plain.usage
    assert (final.stop_reason, final.model) == (plain.stop_reason, plain.model)


def test_events_are_those_of_the_clients_types(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says("let me see\n</think>\n\n" + CALL)
    body = BODY | {"stream": True, "thinking": THINK, "tools": [WEATHER], "max_tokens": 400}
    answer = http.post(ROUTE, json=body | {"thinking": {"type": "adaptive"}})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["thinking", "text", "tool_use"]
    assert [start["index"] for start in starts] == [0, 1, 2]
    open_block = None
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                open_block = event["index"]
            case "content_block_delta":
                assert event["index"] == open_block
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case "message_delta":
                assert open_block is None
    deltas = {event["delta"]["type"] for event in events if event["type"] == "content_block_delta"}
    assert deltas == {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}


@pytest.mark.parametrize("stream", [False, True])
def test_thinking(running: Running, claude: anthropic.Anthropic, stream: bool) -> None:
    running.engine.behaviour = says("let me see\n</think>\n\nforty two")
    body = BODY | {"thinking": {"type": "adaptive"}}
    message = ask(claude, body, stream=stream)
    thinking, text = message.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "let me see", "forty two")
    assert len(thinking.signature) == 64
    assert message.usage.output_tokens_details.thinking_tokens > 5
    hidden = claude.messages.create(**BODY, thinking={"type": "adaptive", "display": "omitted"}).content
    assert (hidden[0].thinking, hidden[0].signature, hidden[1].text) == ("", thinking.signature, "forty two")
    running.engine.behaviour = says("again")
    claude.messages.create(**BODY | {"messages": [*USER, {"role": "assistant", "content": message.content}, *USER]})
    again = running.engine.codec.decode(list(running.engine.requests[-1].prompt_token_ids), skip_special=False)
    assert "forty two" in again


@pytest.mark.parametrize("stream", [False, True])
def test_tools_there_and_back(running: Running, claude: anthropic.Anthropic, stream: bool) -> None:
    running.engine.behaviour = says(CALL)
    body = BODY | {"tools": [WEATHER], "max_tokens": 300}
    message = ask(claude, body, stream=stream)
    text, call = message.content
    assert text.text == "Sure."
    assert (call.name, call.input) == ("weather", {"city": "Paris", "days": 3})
    assert call.id.startswith("toolu_")
    assert message.stop_reason == "tool_use"
    prompt = running.engine.codec.decode(list(running.engine.requests[-1].prompt_token_ids))
    assert '"parameters": {"type": "object"' in prompt
    running.engine.behaviour = says("sunny")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sun"}]}
    back = [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**body | {"messages": back}).content[0].text == "sunny"
    prompt = running.engine.codec.decode(list(running.engine.requests[-1].prompt_token_ids), skip_special=False)
    assert (
        'Sure.<tool_call>{"city": "Paris", "days": 3}</tool_call><|im_end|>\n<|im_start|>tool\nsun<|im_end|>' in prompt
    )


def test_a_call_that_is_cut_off(running: Running, claude: anthropic.Anthropic) -> None:
    running.engine.behaviour = says(CALL)
    body = BODY | {"tools": [WEATHER], "max_tokens": len(running.engine.codec.encode(CALL[: CALL.index("3\n")]))}
    message = claude.messages.create(**body)
    with claude.messages.stream(**body) as events:
        streamed = events.get_final_message()
    assert message.content[1].input == streamed.content[1].input == {"city": "Paris"}
    assert message.stop_reason == streamed.stop_reason == "max_tokens"


def test_disable_parallel_tool_use(running: Running, claude: anthropic.Anthropic) -> None:
    running.engine.behaviour = says(CALL + "\n" + CALL.removeprefix("Sure.\n\n"), pause=0.0005)
    body = BODY | {"tools": [WEATHER], "max_tokens": 400}
    assert [block.type for block in claude.messages.create(**body).content] == ["text", "tool_use", "tool_use"]
    one = claude.messages.create(**body, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["text", "tool_use"]
    assert one.stop_reason == "tool_use"
    shown = claude.messages.create(**body, tool_choice={"type": "none"})
    assert [block.type for block in shown.content] == ["text"]
    assert shown.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequence_says_which(running: Running, claude: anthropic.Anthropic, stream: bool) -> None:
    running.engine.behaviour = says("one two END three", pause=0.001)
    body = BODY | {"stop_sequences": ["zzz", "END", "EN"]}
    message = ask(claude, body, stream=stream)
    assert message.content[0].text == "one two "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "EN")


def test_token_limits(running: Running, claude: anthropic.Anthropic) -> None:
    running.engine.behaviour = says("x" * 600, per_update=50)
    short = claude.messages.create(**BODY | {"max_tokens": 7})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 7)
    long = claude.messages.create(**BODY | {"max_tokens": 32000})
    assert long.stop_reason == "model_context_window_exceeded"
    assert long.usage.input_tokens + long.usage.output_tokens == running.engine.max_model_len


def test_sampling_fields_reach_the_engine(running: Running, claude: anthropic.Anthropic) -> None:
    claude.messages.create(
        model="bot@2",
        max_tokens=7,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        metadata={"user_id": "u"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        thinking={"type": "disabled"},
        speed="standard",
        output_config={"effort": "low"},
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 40},
    )
    request = running.engine.requests[0]
    assert (request.sampling.top_k, request.sampling.max_tokens) == (40, 7)
    assert request.sampling.temperature == pytest.approx(0.5)
    assert request.adapter.named == engine_pb2.NamedAdapter(name="bot", version=2)
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}]
    assert list(request.prompt_token_ids) == running.engine.codec.encode_chat(turns)


def test_count_tokens_is_what_the_message_has(running: Running, claude: anthropic.Anthropic) -> None:
    running.engine.cached_tokens = 3
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}}
    messages = [
        *USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "is_error": True}]},
    ]
    for change in ({}, {"messages": messages, "tools": [WEATHER]}, {"thinking": {"type": "adaptive"}, "system": "s"}):
        body = {"model": MODEL, "messages": USER} | change
        usage = claude.messages.create(**body, max_tokens=5).usage
        count = claude.messages.count_tokens(**body)
        assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        assert count.input_tokens == len(running.engine.requests[-1].prompt_token_ids)


def test_long_prompts_are_tokenized_in_a_thread(start: Starter) -> None:
    running = start(offload_chars=0)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        count = http.post(f"{ROUTE}/count_tokens", json={"model": MODEL, "messages": USER})
    assert count.json() == {"input_tokens": len(running.engine.codec.encode_chat(USER))}


def test_a_client_that_leaves(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says("x" * 400, pause=0.02)
    with http.stream("POST", ROUTE, json=BODY | {"stream": True, "max_tokens": 300}) as answer:
        next(answer.iter_lines())
    running.wait_for(lambda: bool(running.engine.aborts))
    assert running.engine.aborts == [(running.engine.requests[0].request_id, 0)]


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_own_loop_runs_tools(running: Running, claude: anthropic.Anthropic, stream: bool) -> None:
    asked: list[tuple[str, int]] = []

    @anthropic.beta_tool
    def weather(city: str, days: int) -> str:
        """Tells the weather.

        Args:
            city: where.
            days: how many.
        """
        asked.append((city, days))
        return "sunny"

    async def call_then_say(engine: FakeEngine, request: engine_pb2.GenerateRequest, send: Send) -> None:
        prompt = engine.codec.decode(list(request.prompt_token_ids))
        await says("It is sunny." if "tool\nsunny" in prompt else CALL)(engine, request, send)

    running.engine.behaviour = call_then_say
    runner = claude.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, tools=[weather], messages=USER, stream=stream
    )
    final = [part.get_final_message() if stream else part for part in runner][-1]
    assert asked == [("Paris", 3)]
    assert final.content[0].text == "It is sunny."
    assert len(running.engine.requests) == 2
