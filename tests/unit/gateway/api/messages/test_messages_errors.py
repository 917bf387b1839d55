"""What is wrong with a message is said in Anthropic's form, and names the message's fields."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

from services.common.pb import engine_pb2
from services.gateway.protocol.messages.response import AnthropicErrorBody
from tests.stack import PATIENCE
from tests.unit.gateway.api.messages.test_messages import BODY, ROUTE, USER, WEATHER, events_of
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import dies, fails, hangs


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": []}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": [{}]}]}]},
            "messages[0].content[0].citations",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[1].content[0].id"),
        (
            {
                "messages": [
                    *USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                ]
            },
            "messages[1].content[0]",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": 5}, "system"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "frobnicate_20250101", "name": "f"}]}, "tools[0].type"),
        ({"tools": [WEATHER | {"input_examples": {}}]}, "tools[0].input_examples"),
        ({"tools": [WEATHER | {"frobnicate": 1}]}, "tools[0].frobnicate"),
        ({"tools": [WEATHER | {"cache_control": {"type": "eternal"}}]}, "tools[0].cache_control.type"),
        ({"tools": [WEATHER | {"allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
        (
            {
                "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "tool_choice",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": {"type": "auto"}}, "tool_choice"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 64}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        (
            {"messages": [*USER, {"role": "assistant", "content": "I"}], "thinking": {"type": "adaptive"}},
            "thinking",
        ),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
        ({"context_management": {"edits": [{"type": "frobnicate"}]}}, "context_management.edits[0].type"),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "frobnicate": 1}]}},
            "context_management.edits[0].frobnicate",
        ),
        (
            {
                "context_management": {
                    "edits": [
                        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}},
                    ]
                }
            },
            "context_management.edits[0].keep.value",
        ),
        ({"compaction": {}}, "compaction"),
        (
            {
                "output_format": {"type": "json_schema", "schema": {}},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_format",
        ),
        ({"container": "c"}, "container"),
    ],
)
def test_field(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    body = {field: value for field, value in (BODY | change).items() if value is not None}
    for route in (ROUTE, f"{ROUTE}/count_tokens"):
        if route != ROUTE and set(change) - {"messages", "system", "tools", "tool_choice", "thinking"}:
            continue
        if route != ROUTE:
            body = {field: value for field, value in body.items() if field != "max_tokens"}
            if param == "thinking.budget_tokens" and "budget_tokens" in change["thinking"]:
                continue
        answer = http.post(route, json=body)
        assert answer.status_code == 400, answer.text
        error = AnthropicErrorBody.model_validate(answer.json(), strict=True).error
        assert (error.type, error.details.param) == ("invalid_request_error", param), error
        anthropic.types.ErrorResponse.model_validate(answer.json(), strict=True)
        assert answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b"null", b"\xff\xfe{}", b'{"model": "\\ud800"}', b"[" * 9999])
def test_broken_json(http: httpx.Client, body: bytes) -> None:
    answer = http.post(ROUTE, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert AnthropicErrorBody.model_validate(answer.json()).error.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_exceptions(running: Running, claude: anthropic.Anthropic, stream: bool) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(**BODY | {"model": "gpt/4"}, stream=stream)
    assert (missing.value.type, missing.value.error_code) == ("not_found_error", "model_not_found")
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError) as long:
        claude.messages.create(**BODY | {"messages": [{"role": "user", "content": "x" * 600}]}, stream=stream)
    assert (long.value.type, long.value.error_code) == ("invalid_request_error", "context_length_exceeded")
    running.engine.behaviour = fails(engine_pb2.ERROR_CODE_OVERLOADED, "full")
    with pytest.raises(anthropic.InternalServerError) as full:
        claude.messages.create(**BODY, stream=stream)
    assert (full.value.status_code, full.value.type) == (503, "overloaded_error")
    assert full.value.response.headers["retry-after"]
    running.engine.behaviour = fails(engine_pb2.ERROR_CODE_DEADLINE_EXCEEDED, "late")
    with pytest.raises(anthropic.GatewayTimeoutError) as late:
        claude.messages.create(**BODY, stream=stream)
    assert late.value.type == "timeout_error"
    running.engine.behaviour = fails(engine_pb2.ERROR_CODE_INTERNAL, "broken")
    with pytest.raises(anthropic.InternalServerError) as broken:
        claude.messages.create(**BODY, stream=stream)
    assert broken.value.type == "api_error"


def test_an_engine_that_dies_ends_the_stream_with_an_error_event(
    running: Running, claude: anthropic.Anthropic, http: httpx.Client
) -> None:
    running.engine.behaviour = dies(after="abc")
    events = events_of(http.post(ROUTE, json=BODY | {"stream": True}))
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert "message_stop" not in [event["type"] for event in events]
    with pytest.raises(anthropic.APIStatusError) as lost, claude.messages.stream(**BODY) as stream:
        stream.until_done()
    assert lost.value.type == "api_error"


def test_routes_that_are_not(http: httpx.Client) -> None:
    answer = http.post(f"{ROUTE}/nothing", json={})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    answer = http.get(ROUTE)
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")
    assert set(http.get("/v1/messagesX").json()) == {"error"}, "another API's route"


def test_body_limit_and_admission(start: Starter) -> None:
    running = start(max_body_bytes=2048, max_in_flight=1)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        answer = http.post(ROUTE, json=BODY | {"system": "x" * 3000})
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
        running.engine.behaviour = hangs
        running.leave(ROUTE, BODY, lambda: bool(running.engine.running))
        running.wait_for(lambda: bool(running.engine.aborts) and running.inference.admission.in_flight == 0)
        place = running.inference.admission.reserve(1)
        for route in (ROUTE, f"{ROUTE}/count_tokens"):
            body = BODY if route == ROUTE else {"model": MODEL, "messages": USER}
            full = http.post(route, json=body)
            assert (full.status_code, full.json()["error"]["type"]) == (503, "overloaded_error")
        place.release()


def test_an_engine_that_refuses_late_names_the_messages_fields(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = fails(
        engine_pb2.ERROR_CODE_INVALID_REQUEST, "response_format is bad", after="a", param="response_format"
    )
    last = events_of(http.post(ROUTE, json=BODY | {"stream": True}))[-1]["error"]
    assert (last["message"], last["details"]["param"]) == ("output_config.format is bad", "output_config.format")


def test_an_unfinished_thought_that_the_template_hides(http: httpx.Client) -> None:
    """The refusal speaks of messages, not of the chat's field that continues one."""
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}
    answer = http.post(ROUTE, json=BODY | {"messages": [*USER, thought]})
    error = AnthropicErrorBody.model_validate(answer.json()).error
    assert error.message == "messages: the chat template does not show the end of the last message"
    assert error.details.param == "messages"
