"""Whatever is wrong with a request is a 4xx with an OpenAI body that names it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from services.common.pb import engine_pb2
from services.common.validation.json_text import MOST_LEVELS
from services.learning.request_log.record import LoggedRequest
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import fails

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL, "prompt": "hi"}


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 100000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": "hi"}, "messages"),
        ({"model": 3}, "model"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": -1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": []}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"adapter": "../etc"}, "adapter"),
        ({"adapter": "a@0"}, "adapter"),
        ({"seed": 2**70}, "seed"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    ],
)
def test_chat_field(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    error = error_of(http.post("/v1/chat/completions", json=CHAT | change))
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert "sys." not in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": False, "max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
    ],
)
def test_completion_field(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    error = error_of(http.post("/v1/completions", json=TEXT | change))
    assert error["param"] == param, error


def test_missing_field(http: httpx.Client) -> None:
    error = error_of(http.post("/v1/chat/completions", json={"model": MODEL}))
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_not_a_number(http: httpx.Client, word: str) -> None:
    for field in ("temperature", "top_p", "chat_template_kwargs"):
        value = word if field != "chat_template_kwargs" else f'{{"x": [{word}]}}'
        body = json.dumps(CHAT)[:-1] + f', "{field}": {value}}}'
        answer = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert error_of(answer)["param"] == field


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"[]",
        b"3",
        b"null",
        b'"x"',
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"[" * 9999,
    ],
)
def test_broken_json(http: httpx.Client, body: bytes) -> None:
    for headers in ({"content-type": "application/json"}, {}, {"content-type": "text/plain"}):
        error_of(http.post("/v1/chat/completions", content=body, headers=headers))


def test_context_length(running: Running, http: httpx.Client) -> None:
    long = CHAT | {"messages": [{"role": "user", "content": "x" * 600}]}
    assert error_of(http.post("/v1/chat/completions", json=long))["code"] == "context_length_exceeded"
    assert error_of(http.post("/v1/completions", json=TEXT | {"max_tokens": 511}))["code"] == "context_length_exceeded"
    assert not running.engine.requests, "nothing was queued"


def test_template_refusal(http: httpx.Client) -> None:
    body = CHAT | {"messages": [{"role": "assistant", "content": "refuse"}]}
    assert "refuses" in error_of(http.post("/v1/chat/completions", json=body))["message"]


def test_bad_tool_arguments(http: httpx.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "nope"}}
    body = CHAT | {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]}
    error_of(http.post("/v1/chat/completions", json=body))


@pytest.mark.parametrize("change", [{"model": "gpt/4"}, {"model": "base"}, {"model": "gpt-4", "adapter": "bot"}])
def test_unknown_model(http: httpx.Client, change: dict[str, Any]) -> None:
    error = error_of(http.post("/v1/chat/completions", json=CHAT | change), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_adapter(running: Running, http: httpx.Client, stream: bool) -> None:
    running.engine.behaviour = fails(engine_pb2.ERROR_CODE_MODEL_NOT_FOUND, "no adapter ghost")
    answer = http.post("/v1/chat/completions", json=CHAT | {"adapter": "ghost", "stream": stream})
    error = error_of(answer, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "adapter")
    assert error_of(http.post("/v1/chat/completions", json=CHAT | {"model": "ghost"}), 404)["param"] == "model"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("chat/completions", CHAT | {"stop": ["a"] * 9}, "stop: List should have at most 4 items"),
        ("completions", TEXT | {"prompt": []}, "prompt: List should have at least 1 item"),
    ],
)
def test_of_a_union_the_error_of_the_type_that_was_sent_is_told(
    http: httpx.Client, path: str, body: dict[str, Any], said: str
) -> None:
    assert error_of(http.post(f"/v1/{path}", json=body))["message"].startswith(said)


def test_routes(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/nothing"), 404)["code"] == "not_found"
    answer = http.get("/v1/completions")
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"
    assert error_of(http.post("/v1/chat/completions/", json=CHAT), 404)


def test_request_id(http: httpx.Client) -> None:
    assert http.get("/livez", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert http.get("/livez", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req-")
    assert http.get("/v1/nothing").headers["x-request-id"]


def test_body_limit(start: Starter) -> None:
    running = start(max_body_bytes=2048, max_upload_bytes=4096)

    def chunks(size: int) -> Any:
        for _ in range(size // 512):
            yield b" " * 512

    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        headers = {"content-type": "application/json"}
        body = json.dumps(CHAT).encode()
        assert http.post("/v1/chat/completions", content=body, headers=headers).status_code == 200
        for content in (b" " * 3000 + body, chunks(10_000)):
            error = error_of(http.post("/v1/chat/completions", content=content, headers=headers), 413)
            assert error["code"] == "payload_too_large"
            assert "2048" in error["message"]
        files = {"adapter_model.safetensors": b"x" * 9000, "adapter_config.json": b"{}"}
        assert error_of(http.post("/v1/adapters", data={"name": "a"}, files=files), 413)
        assert http.post("/v1/chat/completions", content=body, headers=headers).status_code == 200


def test_of_a_million_errors_the_first_is_told(http: httpx.Client) -> None:
    unknown = {f"field{number}": 1 for number in range(100_000)}
    began = time.process_time()  # of this process: other work on the machine counts for nothing
    assert error_of(http.post("/v1/chat/completions", json=CHAT | unknown))["param"] == "field0"
    assert error_of(http.post("/v1/chat/completions", json=CHAT | {"stream_options": unknown}))["param"] == (
        "stream_options.field0"
    )
    parts = {"messages": [{"role": "user", "content": [{}] * 100_000}]}
    assert error_of(http.post("/v1/chat/completions", json=CHAT | parts))["param"] == "messages[0].content[0].type"
    assert time.process_time() - began < 5.0


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"default": value}
    return value


@pytest.mark.parametrize(
    ("path", "around"),
    [
        ("messages", lambda schema: {"messages": CHAT["messages"], "tools": [{"name": "f", "input_schema": schema}]}),
        (
            "responses",
            lambda schema: {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": schema}]},
        ),
    ],
)
def test_what_is_nested_deeper_than_records_can_be_is_refused(
    http: httpx.Client, path: str, around: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """A tool's schema is one level further in where it is logged: one that the body's parser just takes would make a
    record that nobody can read, and with it whatever stands in the same file."""
    body = around(nested(190)) | {"model": MODEL, "max_tokens": 4, "max_output_tokens": 4}
    body.pop("max_tokens" if path == "responses" else "max_output_tokens")
    answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400
    assert "nested more than 128 levels deep: flatten it" in answer.json()["error"]["message"]
    most = {"function": {"name": "f", "parameters": nested(MOST_LEVELS)}}
    line = LoggedRequest(id="x", at=1.0, kind="chat", model=MODEL, choices=(), tools=[most]).model_dump_json()
    assert LoggedRequest.parse(line.encode(), "here").tools == [most]


@pytest.mark.parametrize(
    ("path", "text", "param"),
    [
        ("chat/completions", '{"model": "m", "temperature": 0, "temperature": 2}', "temperature"),
        ("messages", '{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "messages[0].content"),
        ("train/sft", '{"adapter": "a", "examples": [{"prompt": "a", "p\\u0072ompt": "b"}]}', "examples[0].prompt"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(http: httpx.Client, path: str, text: str, param: str) -> None:
    """A proxy that checks requests may see the other value."""
    answer = http.post(f"/v1/{path}", content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert f"{param} is there twice: leave one of them out" in answer.json()["error"]["message"]
    if path != "messages":  # whose errors have no param
        assert error_of(answer)["param"] == param


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("method", "path", "body", "param", "said"),
    [
        ("POST", "/v1/chat/completions", CHAT | {LONG: 1}, "x" * 200, "check its spelling"),
        (
            "POST",
            "/v1/chat/completions",
            CHAT | {"stream_options": {LONG: 1}},
            "stream_options." + "x" * 200,
            "Unknown",
        ),
        ("POST", "/v1/chat/completions", CHAT | {"messages": [{"role": LONG}]}, "messages[0].role", "'assistant'"),
        ("POST", "/v1/chat/completions", CHAT | {"messages": [{"role": [LONG]}]}, "messages[0].role", "'assistant'"),
        ("POST", "/v1/eval/suites", {"name": "s", "jsonl": "{}", "scorer": {"type": LONG}}, "scorer.type", "'exact'"),
        ("POST", "/v1/chat/completions", CHAT | {"service_tier": LONG}, "service_tier", "'flex'"),
        ("POST", "/v1/chat/completions", CHAT | {"adapter": LONG}, "adapter", "at most"),
        ("POST", "/v1/completions", TEXT | {"model": LONG}, "model", "at most"),
        ("GET", f"/v1/{LONG[:9000]}", None, None, "no such route: GET /v1/x"),
        ("GET", f"/v1/models?{LONG[:9000]}=1", None, "x" * 80, "has after_id, before_id, limit"),
        ("GET", f"/v1/models?after_id={LONG[:9000]}", None, "after_id", "at most"),
        ("GET", f"/v1/batches?after={LONG[:9000]}", None, "after", ""),
        ("GET", f"/v1/files/{LONG[:9000]}", None, None, "no such file"),
        ("GET", f"/v1/responses/{LONG[:9000]}", None, None, ""),
        ("GET", f"/v1/train/jobs/{LONG[:9000]}", None, None, ""),
        ("GET", f"/v1/canaries/{LONG[:9000]}", None, None, ""),
        ("GET", f"/v1/datasets/{LONG[:9000]}", None, None, ""),
        ("GET", f"/v1/sessions/{LONG[:9000]}", None, None, ""),
        ("GET", f"/v1/adapters/{LONG[:9000]}", None, None, ""),
        ("GET", f"/v1/learners/{LONG[:9000]}", None, None, ""),
    ],
)
def test_an_error_does_not_repeat_megabytes(
    http: httpx.Client, method: str, path: str, body: Any, param: str | None, said: str
) -> None:
    answer = http.request(method, path, json=body)
    assert 400 <= answer.status_code < 500, answer.text[:400]
    assert len(answer.content) < 2500
    error = answer.json()["error"]
    assert said in error["message"]
    assert param is None or error["param"] == param
