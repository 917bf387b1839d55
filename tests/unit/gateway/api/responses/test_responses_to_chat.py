"""Responses requests become chat requests of the same meaning, and what chat refuses is told in their own words."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from services.common.errors import InvalidRequest
from services.gateway.api.responses.response_object import given_items, parsed
from services.gateway.api.responses.to_chat import ChatFields, chat_fields
from services.gateway.core.errors import validation_response
from services.gateway.protocol.responses.items import ItemReference
from services.gateway.protocol.responses.request import ResponseRequest
from tests.unit.gateway.conftest import MODEL, Running

ROUTE = "/v1/responses"
RESPONSE = f"resp_{'0' * 32}"
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
NAMESPACE = {"type": "namespace", "name": "n", "description": "N.", "tools": [TOOL]}


def translated(request: ResponseRequest, prior: list[dict[str, Any]] | None = None) -> ChatFields:
    given = [item for item in request.input if not isinstance(item, str | ItemReference)]
    return chat_fields(request, parsed(prior or []), request.input if isinstance(request.input, str) else given)


def fields(prior: list[dict[str, Any]] | None = None, **body: Any) -> dict[str, Any]:
    """Of the chat request, without the model."""
    made = translated(ResponseRequest.model_validate({"model": "m", "input": "hi"} | body), prior).fields
    assert made.pop("model") == "m"
    return made


def messages(*items: Any, prior: list[dict[str, Any]] | None = None, instructions: str | None = None) -> Any:
    return fields(prior, input=list(items), instructions=instructions)["messages"]


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def test_text() -> None:
    assert fields() == {"messages": [{"role": "user", "content": "hi"}]}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages({"role": "user", "content": parts}) == [{"role": "user", "content": "ab"}]


def test_a_turn_of_the_model_is_one_message() -> None:
    ask = {"role": "user", "content": "?"}
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}} for n in (1, 2)]
    turn = {"role": "assistant", "reasoning_content": "hm", "content": "Well", "tool_calls": calls}
    second = CALL | {"call_id": "c2"}
    answers = [{"role": "tool", "tool_call_id": f"c{n}", "content": "3"} for n in (1, 2)]
    items = [ask, THOUGHT, said("Well"), CALL, second, RESULT, RESULT | {"call_id": "c2"}]
    assert messages(*items) == [ask, turn, *answers]
    assert messages(*items[3:], prior=given_items(parsed(items[:3]), RESPONSE)) == [ask, turn, *answers]
    bare = {"role": "assistant", "tool_calls": calls[:1]}
    assert messages(CALL, RESULT) == [bare, answers[0]]
    # What begins another turn of the model.
    one, other = ({"role": "assistant", "content": text} for text in ("one", "other"))
    assert messages(said("one"), said("other")) == [one, other]
    assert messages(said("one"), THOUGHT) == [one, {"role": "assistant", "reasoning_content": "hm"}]
    assert messages(CALL, THOUGHT)[0] == bare
    assert messages(THOUGHT, THOUGHT) == [{"role": "assistant", "reasoning_content": "hmhm"}]


def test_reasoning_is_its_content_or_its_summary() -> None:
    summary = [{"type": "summary_text", "text": "short"}]
    for item, text in ((THOUGHT | {"summary": summary}, "hm"), ({"type": "reasoning", "summary": summary}, "short")):
        assert messages(item) == [{"role": "assistant", "reasoning_content": text}]


def test_instructions_keep_their_places() -> None:
    system, developer = ({"role": role, "content": role} for role in ("system", "developer"))
    ask = {"role": "user", "content": "?"}
    told = [{"role": "system", "content": text} for text in ("Be kind.", "system", "developer")]
    assert messages(system, developer, ask, instructions="Be kind.") == [*told, ask]
    assert messages(ask, developer) == [ask, told[-1]]


def test_an_answer_needs_its_call() -> None:
    with pytest.raises(InvalidRequest) as error:
        messages({"role": "user", "content": "?"}, RESULT)
    assert error.value.param == "input[1].call_id"
    assert messages(RESULT, prior=[CALL])[-1]["role"] == "tool"


def test_options() -> None:
    made = fields(
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.5,
        seed=3,
        top_k=4,
        stop=["x"],
        logit_bias={"7": 1.0},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        reasoning={"effort": "low"},
        adapter="base",
        stream=True,
        cache_salt="s",
        priority=-1,
        chat_template_kwargs={"enable_thinking": True},
        user="u",
        prompt_cache_key="k",
        # These stay here: they are not about what the model writes.
        metadata={"a": "b"},
        store=True,
        stream_options={"include_obfuscation": False},
        truncation="disabled",
    )
    del made["messages"]
    assert made == {
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.5,
        "seed": 3,
        "top_k": 4,
        "stop": ["x"],
        "logit_bias": {"7": 1.0},
        "logprobs": True,
        "top_logprobs": 2,
        "reasoning_effort": "low",
        "adapter": "base",
        "stream": True,
        "cache_salt": "s",
        "priority": -1,
        "chat_template_kwargs": {"enable_thinking": True},
        "user": "u",
        "prompt_cache_key": "k",
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
        ),
    ],
)
def test_tools(choice: Any, expected: Any) -> None:
    made = fields(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert made["tools"] == [{"type": "function", "function": function}]
    assert made["tool_choice"] == expected
    assert made["parallel_tool_calls"] is False


def test_names_in_namespaces() -> None:
    """In the history the model reads the name that it wrote."""
    for namespace, name in (("n", "n__f"), ("mcp__s__", "mcp__s__f"), (None, "f")):
        made = messages(CALL | {"namespace": namespace}, RESULT | {"namespace": namespace, "name": "f"})
        assert made[0]["tool_calls"][0]["function"] == {"name": name, "arguments": '{"x": 1}'}
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "p", "namespace": "n", "input": 'a "b"\n'}
    made = messages(custom, {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"})
    assert made[0]["tool_calls"][0]["function"] == {"name": "n__p", "arguments": '{"input":"a \\"b\\"\\n"}'}
    assert made[1] == {"role": "tool", "tool_call_id": "c1", "content": "ok"}


def test_defaults_without_tools() -> None:
    made = fields(tools=[], tool_choice="auto", parallel_tool_calls=True)
    assert set(made) == {"messages"}, "clients send these always, and chat wants them with tools only"
    assert fields(tool_choice="required")["tool_choice"] == "required", "for chat to refuse"


def test_text_formats() -> None:
    schema = {"name": "s", "schema": {"type": "object"}, "strict": True}
    assert fields(text={"format": {"type": "text"}})["response_format"] == {"type": "text"}
    assert fields(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    made = fields(text={"format": {"type": "json_schema", **schema}})
    assert made["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert "response_format" not in fields(text={})


def test_errors_of_chat_have_the_names_of_responses() -> None:
    """Whatever chat refuses, found by breaking fields behind the translation."""
    request = ResponseRequest.model_validate(
        {
            "model": "m",
            "input": [{"role": "user", "content": "?"}, THOUGHT, CALL, RESULT],
            "instructions": "i",
            "tools": [TOOL],
            "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}},
            "reasoning": {"effort": "low"},
            "max_output_tokens": 5,
            "include": ["message.output_text.logprobs"],
        }
    )
    broken: list[tuple[tuple[Any, ...], Any, str]] = [
        (("messages", 1, "content"), 5, "input[0].content"),
        (("messages", 0, "content"), 5, "instructions"),
        (("messages", 2, "tool_calls", 0, "function", "name"), "", "input[2].name"),
        (("tools", 0, "function", "name"), "?", "tools[0].name"),
        (("max_completion_tokens",), 0, "max_output_tokens"),
        (("logprobs",), 7, "include"),
    ]
    for path, value, param in broken:
        made = translated(request)
        made.fields.pop("response_format")
        made.fields.pop("reasoning_effort")
        target: Any = made.fields
        for segment in path[:-1]:
            target = target[segment]
        target[path[-1]] = value
        with pytest.raises(RequestValidationError) as error:
            made.request()
        told = bytes(validation_response(error.value.errors(), error.value.body, "/v1/responses").body).decode()
        assert f'"param":"{param}"' in told, told
    made = translated(request)
    for message, param, renamed, where in (
        ("max_tokens is 5", "max_tokens", "max_output_tokens is 5", "max_output_tokens"),
        ("odd", "response_format.json_schema.schema", "odd", "text.format.schema"),
        ("tools[1].function.parameters: odd", "tools[1].function.parameters", "tools[1].parameters: odd", None),
        ("messages[2]: odd", "messages[2]", "input[1]: odd", "input[1]"),
        ("reasoning_effort: odd", "reasoning_effort", "reasoning.effort: odd", "reasoning.effort"),
    ):
        failure = InvalidRequest(message, param=param)
        made.rename(failure)
        assert (failure.message, failure.param) == (renamed, where or "tools[1].parameters")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": "x" * 600}, "input"),
        ({"max_output_tokens": 600}, "input"),
        ({"input": [{"role": "user", "content": "?"}, CALL | {"arguments": "no"}, RESULT]}, "input[1].arguments"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"input": [{"role": "assistant", "content": "refuse"}]}, "input"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"role": "nobody", "content": "?"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "x", "frobnicate": 1}]}, "input[0].frobnicate"),
        ({"input": [{}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [CALL | {"caller": {"type": "program", "caller_id": "c"}}]}, "input[0].caller.type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "frobnicate": True}]}, "tools[0].frobnicate"),
        ({"tools": [{"type": "frobnicate"}, TOOL]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": []}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [TOOL, TOOL]}]}, "tools[0].tools[1].name"),
        ({"tools": [TOOL | {"name": "n__f"}, NAMESPACE]}, "tools[1].tools[0].name"),
        ({"tools": [NAMESPACE | {"name": "n" * 127}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar"}}]}, "tools[0].format.syntax"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice"),
        (
            {
                "tools": [TOOL, {"type": "mcp"}],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
            },
            "tool_choice.tools[0].type",
        ),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"verbosity": "mute"}}, "text.verbosity"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"include": ["frobnicate"]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"truncation": "always"}, "truncation"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"conversation": ""}, "conversation"),
        ({"conversation": {"name": "c"}}, "conversation.id"),
        ({"conversation": {"id": "c", "name": "c"}}, "conversation.name"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"stream_options": {}}, "stream_options"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"previous_response_id": 5}, "previous_response_id"),
    ],
)
def test_refused(running: Running, http: httpx.Client, change: dict[str, Any], param: str) -> None:
    for streamed in (False, True):
        body = {"model": MODEL, "input": "hi"} | change
        if "stream_options" not in change:
            body["stream"] = streamed
        answer = http.post(ROUTE, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param, answer.text
    assert not running.engine.requests


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        ('"temperature": NaN', "invalid_value", "temperature"),
        ('"temperature": 1e999', "invalid_value", "temperature"),
        ('"instructions": "\\ud800"', "invalid_json", None),
        (f'"metadata": {"[" * 100_000}', "invalid_json", None),
        (
            '"tools": [{"type": "function", "name": "f", "parameters": {"a": NaN}}]',
            "invalid_value",
            "tools[0].parameters",
        ),
        (f'"seed": {"9" * 100}', "invalid_value", "seed"),
    ],
)
def test_hostile(http: httpx.Client, text: str, code: str, param: str | None) -> None:
    body = f'{{"model": "tiny", "input": "hi", {text}}}'
    answer = http.post(ROUTE, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error


def test_every_field_is_translated_or_stays() -> None:
    """A field added to the model has to be placed on purpose."""
    stays = {
        *("store", "background", "metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("truncation", "previous_response_id", "stream_options", "client_metadata", "access_programs"),
        *("max_tool_calls", "prompt_cache_options", "conversation"),
    }
    renamed = {"input", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "max_output_tokens"}
    # `adapters` is not sent beside `adapter`: tests/unit/gateway/inference/test_compositions.py has it.
    same = set(ResponseRequest.model_fields) - stays - renamed - {"top_logprobs", "adapters"}
    values: dict[str, Any] = dict.fromkeys(same, 1) | {
        "model": "m",
        "adapter": "a",
        "stop": "x",
        "cache_salt": "s",
        "chat_template_kwargs": {},
        "logit_bias": {"1": 1.0},
        "stream": True,
        "parallel_tool_calls": True,
        "service_tier": "auto",
    }
    try:
        made = fields(**values, tools=[TOOL])
    except ValidationError as error:
        pytest.fail(str(error))
    assert same - {"model"} == set(made) - {"messages", "tools"}
