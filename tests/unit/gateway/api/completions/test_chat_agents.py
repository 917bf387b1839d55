"""What agents and frameworks send to /v1/chat/completions beside the plain form."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from services.gateway.protocol.chat_response import ChatCompletion, ChatCompletionChunk
from tests.unit.gateway.conftest import MODEL, Running

ROUTE = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
ASK: dict[str, Any] = {"model": MODEL, "messages": [USER]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
EPHEMERAL = {"type": "ephemeral", "ttl": "5m", "scope": "org"}


@pytest.fixture
def running(roomy: Running) -> Running:
    return roomy


def prompt(running: Running) -> str:
    """What the model read last."""
    return running.engine.codec.decode(list(running.engine.requests[-1].prompt_token_ids), skip_special=False)


def completion(http: httpx.Client, **change: Any) -> httpx.Response:
    answer = http.post(ROUTE, json=ASK | change)
    assert answer.status_code == 200, answer.text
    ChatCompletion.model_validate(answer.json())
    return answer


SYSTEM = {"role": "system", "content": "You are brief."}
DEVELOPER = {"role": "developer", "content": "Today is Monday."}
MARK = "<system-reminder>\nToday is Monday.\n</system-reminder>"
CALL = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "weather"}}] * 2}
TOOL = {"role": "tool", "tool_call_id": "a", "content": "is a"}


@pytest.mark.parametrize(
    ("messages", "read"),
    [
        ([SYSTEM, SYSTEM | {"content": "Today is Monday."}, USER], "system\nYou are brief.\n\nToday is Monday."),
        ([SYSTEM, DEVELOPER, USER], "system\nYou are brief.\n\nToday is Monday."),
        ([DEVELOPER, SYSTEM, USER], "system\nToday is Monday.\n\nYou are brief."),
        ([SYSTEM, USER, DEVELOPER], f"user\nhi\n\n{MARK}"),
        ([USER, {"role": "assistant", "content": "a"}, DEVELOPER, USER], f"user\n{MARK}\n\nhi"),
        ([USER, {"role": "assistant", "content": "a"}, DEVELOPER], f"user\n{MARK}"),
        ([USER, CALL, TOOL, DEVELOPER, TOOL], f"tool\nis a\n\n{MARK}<|im_end|>\n<|im_start|>tool\nis a"),
        ([USER, CALL, DEVELOPER, TOOL, TOOL], f"tool\n{MARK}\n\nis a<|im_end|>\n<|im_start|>tool\nis a"),
        ([USER, DEVELOPER, {"role": "assistant", "content": "I"}], f"user\nhi\n\n{MARK}"),
    ],
)
def test_instructions_anywhere(running: Running, http: httpx.Client, messages: list[Any], read: str) -> None:
    continued = {"continue_final_message": True} if messages[-1].get("content") == "I" else {}
    completion(http, messages=messages, **continued)
    assert f"<|im_start|>{read}<|im_end|>" in prompt(running)
    assert prompt(running).count("Monday") == 1
    counted = http.post("/tokenize", json={"messages": messages, **continued}).json()
    assert counted["tokens"] == list(running.engine.requests[-1].prompt_token_ids)
    # The same conversation has the same tokens in the Responses API.
    if not continued and all(message.get("tool_calls") is None for message in messages):
        http.post("/v1/responses", json={"model": MODEL, "input": messages})
        assert list(running.engine.requests[-1].prompt_token_ids) == counted["tokens"]


def test_marks_of_caches(running: Running, http: httpx.Client) -> None:
    plain = [SYSTEM, USER, {**CALL, "content": "so"}, TOOL, TOOL]
    part = {"type": "text", "cache_control": EPHEMERAL, "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}
    marked = [{**turn, "content": [{**part, "text": turn["content"]}], "cache_control": EPHEMERAL} for turn in plain]
    marked[2]["tool_calls"] = [call | {"cache_control": EPHEMERAL} for call in CALL["tool_calls"]]
    tool = {**WEATHER, "cache_control": EPHEMERAL, "function": {**WEATHER["function"], "cache_control": EPHEMERAL}}
    completion(http, messages=plain, tools=[WEATHER])
    right = list(running.engine.requests[-1].prompt_token_ids)
    completion(
        http,
        messages=marked,
        tools=[tool],
        cache_control=EPHEMERAL,
        prompt_cache_options={"mode": "implicit", "ttl": "30m"},
        prompt_cache_retention="24h",
        prompt_cache_key="k",
        safety_identifier="s",
    )
    assert list(running.engine.requests[-1].prompt_token_ids) == right


@pytest.mark.parametrize("value", ["low", "medium", "high", None])
def test_verbosity(running: Running, client: openai.OpenAI, value: Any) -> None:
    assert client.chat.completions.create(**ASK, verbosity=value).choices[0].message.content == "Hello, world"


@pytest.mark.parametrize("tier", ["auto", "default", "flex", "priority", "scale", "fast"])
def test_the_answer_says_its_tier(running: Running, client: openai.OpenAI, tier: Any) -> None:
    assert client.chat.completions.create(**ASK, service_tier=tier).service_tier == "default"
    first = next(iter(client.chat.completions.create(**ASK, service_tier=tier, stream=True)))
    assert first.service_tier == "default"


def test_hosted_tools(running: Running, http: httpx.Client) -> None:
    tools = [{"type": "web_search_preview", "search_context_size": "low"}, WEATHER, {"type": "file_search"}]
    answer = completion(http, tools=tools)
    assert answer.headers["x-temper-left-out-tools"] == "web_search_preview, file_search"
    assert answer.json()["left_out_tools"] == ["web_search_preview", "file_search"]
    assert "web_search" not in prompt(running)
    with http.stream("POST", ROUTE, json=ASK | {"tools": tools, "stream": True}) as streamed:
        assert streamed.headers["x-temper-left-out-tools"] == "web_search_preview, file_search"
        lines = [line.removeprefix("data: ") for line in streamed.iter_lines() if line.startswith("data: {")]
    chunks = [ChatCompletionChunk.model_validate_json(line) for line in lines]
    told = [chunk.left_out_tools for chunk in chunks]
    assert told == [["web_search_preview", "file_search"], *[None] * (len(told) - 1)]
    assert "left_out_tools" not in completion(http, tools=[WEATHER]).json()
    for change, param in (
        ({"tools": tools[:1]}, "tools[0].type"),
        ({"tools": [{"type": "frobnicate"}, WEATHER]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [*tools[:1], WEATHER, WEATHER]}, "tools[2].function.name"),
    ):
        refused = http.post(ROUTE, json=ASK | change)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_the_form_of_huggingface_hub(running: Running, http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    completion(http, response_format={"type": "json_object", "value": schema})
    assert json.loads(running.engine.requests[-1].sampling.constraint.json_schema) == schema
    for kind, more in (("text", {}), ("json_schema", {"json_schema": {"name": "a", "schema": schema}})):
        refused = http.post(ROUTE, json=ASK | {"response_format": {"type": kind, "value": schema, **more}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format.value")
    broken = {"type": "json_object", "value": {"properties": {str(n): {} for n in range(5000)}}}
    refused = http.post(ROUTE, json=ASK | {"response_format": broken})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format.value")


def test_the_greatest_effort(running: Running, http: httpx.Client) -> None:
    budgets = []
    for effort in ("xhigh", "max"):
        completion(http, reasoning_effort=effort)
        budgets.append(running.engine.requests[-1].sampling.thinking.budget)
    assert budgets[0] == budgets[1] > 0
