"""What a request demands of its answer reaches the engine as one message, or is refused by name and limit."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from services.common.pb import engine_pb2
from tests.stack import PATIENCE
from tests.unit.gateway.api.base.test_bad_input import CHAT, TEXT, error_of
from tests.unit.gateway.api.completions.test_chat import CALL, USER, WEATHER
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import fails, says

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": False}}


def sent(running: Running) -> engine_pb2.SamplingParams:
    """What the engine was asked for last."""
    return running.engine.requests[-1].sampling


@pytest.mark.sampled
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("field", "kind", "value", "param"),
    [
        ({"response_format": FORMAT}, "json_schema", SCHEMA, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA, "structured_outputs.json"),
        (
            {"structured_outputs": {"json_object": True}},
            "json_schema",
            {"type": "object"},
            "structured_outputs.json_object",
        ),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "regex", "[a-z]+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "é"]}}, "choices", ["a", "é"], "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"', "structured_outputs.grammar"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_regex": "a|b"}, "regex", "a|b", "guided_regex"),
        ({"guided_choice": ["x"]}, "choices", ["x"], "guided_choice"),
        ({"guided_grammar": "start: /x/"}, "lark", "start: /x/", "guided_grammar"),
    ],
)
def test_message(
    running: Running, http: httpx.Client, path: str, field: dict[str, Any], kind: str, value: Any, param: str
) -> None:
    body = (CHAT if path.startswith("chat") else TEXT) | field
    assert http.post(f"/v1/{path}", json=body).status_code == 200
    constraint = sent(running).constraint
    assert constraint.WhichOneof("kind") == kind
    found = getattr(constraint, kind)
    if kind == "json_schema":
        found = json.loads(found)
    assert (list(found.texts) if kind == "choices" else found) == value
    assert constraint.param == param
    assert not sent(running).HasField("thinking"), "the answer has no reasoning"


def test_no_constraint(running: Running, http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json=CHAT | {"response_format": {"type": "text"}, "guided_json": None})
    assert not sent(running).HasField("constraint")


def test_behind_reasoning_the_engine_is_told_where_it_ends(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says('hm\n</think>\n\n{"é": 1}')
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = client.chat.completions.create(model=MODEL, messages=USER, response_format=FORMAT, extra_body=thinking)
    assert sent(running).HasField("constraint")
    assert sent(running).thinking.end_token_id == running.engine.codec.token_id("</think>")
    assert not sent(running).thinking.HasField("budget")
    assert json.loads(answer.choices[0].message.content) == {"é": 1}
    assert answer.choices[0].message.model_extra["reasoning"] == "hm"


def test_the_last_token_of_a_complete_answer_is_text(running: Running, client: openai.OpenAI) -> None:
    """Where nothing more may follow the engine ends the output without an end token."""

    async def behave(engine: Any, request: engine_pb2.GenerateRequest, send: Any) -> None:
        tokens = engine.codec.encode('{"é": 1}')
        reason = engine_pb2.FINISH_REASON_STOP
        await send(engine_pb2.Update(request_id=request.request_id, token_ids=tokens, finish_reason=reason))

    running.engine.behaviour = behave
    answer = client.chat.completions.create(model=MODEL, messages=USER, response_format=FORMAT)
    assert answer.choices[0].message.content == '{"é": 1}'
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 9


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("field", "param", "said"),
    [
        ({"guided_json": deep(60)}, "guided_json", "levels of nesting and may have 32"),
        ({"guided_json": {"enum": ["x" * 70000]}}, "guided_json", "bytes and may have 65536"),
        (
            {"guided_json": {"properties": {f"p{i}": {} for i in range(1200)}}},
            "guided_json",
            "1200 properties and may have 1000",
        ),
        ({"guided_json": {"pattern": "a" * 5000}}, "guided_json", "5000 characters in a pattern and may have 4096"),
        ({"guided_regex": "a" * 5000}, "guided_regex", "5000 characters and may have 4096"),
        ({"guided_grammar": "é" * 200000}, "guided_grammar", "400000 bytes and may have 262144"),
        ({"guided_choice": ["a"] * 2000}, "guided_choice", "2000 texts and may have 1024"),
        ({"guided_choice": ["a" * 300000]}, "guided_choice", "300000 bytes and may have 262144"),
        ({"structured_outputs": {"json": deep(60)}}, "structured_outputs.json", "levels of nesting"),
        (
            {"response_format": FORMAT | {"json_schema": {"name": "x", "schema": deep(60)}}},
            "response_format.json_schema.schema",
            "levels of nesting",
        ),
    ],
)
def test_limits(running: Running, http: httpx.Client, field: dict[str, Any], param: str, said: str) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", TEXT)):
        error = error_of(http.post(f"/v1/{path}", json=body | field))
        assert error["param"] == param
        assert said in error["message"]
    assert not running.engine.requests, "nothing was sent"


def test_limits_are_settings(start: Starter) -> None:
    running = start(max_regex_chars=3)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        assert http.post("/v1/completions", json=TEXT | {"guided_regex": "abc"}).status_code == 200
        assert "may have 3" in error_of(http.post("/v1/completions", json=TEXT | {"guided_regex": "abcd"}))["message"]


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "x"}, "guided_regex"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"guided_json": "not json"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": True}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": SCHEMA}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_regex": "x", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "x", "min_tokens": 3}, "min_tokens"),
    ],
)
def test_refused(running: Running, http: httpx.Client, field: dict[str, Any], param: str) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", TEXT)):
        assert error_of(http.post(f"/v1/{path}", json=body | field))["param"] == param
    assert not running.engine.requests


def test_what_the_engine_cannot_compile_is_the_clients_to_change(running: Running, http: httpx.Client) -> None:
    code = engine_pb2.ERROR_CODE_INVALID_REQUEST
    running.engine.behaviour = fails(code, "guided_regex: unclosed group", param="guided_regex")
    for stream in (False, True):
        error = error_of(http.post("/v1/chat/completions", json=CHAT | {"guided_regex": "(", "stream": stream}))
        assert error["param"] == "guided_regex"


# -- tools

STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
OTHER = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("tools", "choice", "named", "start"),
    [
        ([WEATHER, OTHER], "required", ["weather", "now"], "start: calls"),
        ([WEATHER, OTHER], {"type": "function", "function": {"name": "now"}}, ["now"], "start: calls"),
        (
            [WEATHER, OTHER],
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [OTHER]}},
            ["now"],
            "start: calls",
        ),
        (
            [WEATHER, OTHER],
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [OTHER]}},
            ["now"],
            "start: called* TEXT",
        ),
        ([STRICT, OTHER], "auto", ["weather", "now"], "start: called* TEXT"),
        ([STRICT, OTHER], None, ["weather", "now"], "start: called* TEXT"),
        ([WEATHER, OTHER], "auto", None, None),
        ([WEATHER, OTHER], None, None, None),
        ([STRICT, OTHER], "none", None, None),
    ],
)
def test_tool_choice(
    running: Running, client: openai.OpenAI, tools: list[Any], choice: Any, named: list[str] | None, start: str | None
) -> None:
    running.engine.behaviour = says(CALL.removeprefix("Sure.\n\n"))
    options = {} if choice is None else {"tool_choice": choice}
    client.chat.completions.create(model=MODEL, messages=USER, tools=tools, **options)
    constraint = sent(running).constraint
    if named is None:
        assert not sent(running).HasField("constraint")
        return
    assert constraint.param == "tools"
    lines = constraint.lark.splitlines()
    assert lines[0] == start
    functions = [name for name in ("weather", "now") if f"<function={name}>" in constraint.lark]
    assert functions == named
    prompt = running.engine.codec.decode(list(running.engine.requests[-1].prompt_token_ids))
    assert '"name": "weather"' in prompt, "all tools are shown"


def test_one_call_where_one_is_wanted(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says(CALL.removeprefix("Sure.\n\n"))
    named = {"type": "function", "function": {"name": "weather"}}
    for options, repeats in (
        ({"tool_choice": "required"}, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, False),
        ({"tool_choice": named}, False),
    ):
        answer = client.chat.completions.create(model=MODEL, messages=USER, tools=[WEATHER], **options)
        assert ("(SEPARATOR call)*" in sent(running).constraint.lark) is repeats
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None


def test_text_or_calls_with_a_response_format(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says('{"é": 1}')
    options: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": [WEATHER]}
    answer = client.chat.completions.create(**options, response_format=FORMAT)
    assert answer.choices[0].message.content == '{"é": 1}'
    assert sent(running).constraint.lark.startswith("start: calls | document\n")
    client.chat.completions.create(**options, response_format=FORMAT, tool_choice="required")
    assert "document" not in sent(running).constraint.lark
    client.chat.completions.create(**options, response_format=FORMAT, tool_choice="none")
    assert json.loads(sent(running).constraint.json_schema) == SCHEMA


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "banana"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.function"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "x"}, "guided_regex"),
        ({"tools": [WEATHER], "guided_regex": "x"}, "guided_regex"),
        ({"tools": [WEATHER], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep(60)}}]},
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [
                    OTHER,
                    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"anyOf": []}}},
                ]
            },
            "tools[1].function.parameters",
        ),
    ],
)
def test_refused_tools(running: Running, http: httpx.Client, change: dict[str, Any], param: str) -> None:
    assert error_of(http.post("/v1/chat/completions", json=CHAT | change))["param"] == param
    assert not running.engine.requests


def test_the_error_says_what_is_offered(http: httpx.Client) -> None:
    choice = {"type": "function", "function": {"name": "forecast"}}
    error = error_of(http.post("/v1/chat/completions", json=CHAT | {"tools": [WEATHER], "tool_choice": choice}))
    assert "'forecast'" in error["message"]
    assert "'weather'" in error["message"]
