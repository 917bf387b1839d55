"""Anthropic's messages as chats: what goes where, without a gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.text.output_parser import TextDelta
from services.common.text.tool_calls.parser import ToolDelta
from services.gateway.api.messages.routes import MessageBlocks, joined
from services.gateway.api.messages.to_chat import chat_form, named_as_sent
from services.gateway.protocol.messages.request import MessagesRequest

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "input_schema": {"type": "object"}, "strict": True}


def form_of(**fields: Any) -> dict[str, Any]:
    return chat_form(MessagesRequest.model_validate({"model": "m", "max_tokens": 9, "messages": [USER]} | fields))


def use(call_id: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": given}


def result(call_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id} | more


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_the_least() -> None:
    assert form_of() == {
        "model": "m",
        "messages": [USER],
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": 9,
    }


def test_everything_about_sampling() -> None:
    given = {"stop_sequences": ["a"], "stream": True, "temperature": 0, "top_p": 0.5, "top_k": 3}
    form = form_of(**given, metadata={"user_id": "u"})
    given = {"max_tokens": 9, "stop": ["a"], "stream": True, "temperature": 0, "top_p": 0.5, "top_k": 3, "user": "u"}
    assert given.items() <= form.items()


@pytest.mark.parametrize(
    ("choice", "form"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto"}),
    ],
)
def test_tool_choice(choice: dict[str, Any], form: dict[str, Any]) -> None:
    found = form_of(tools=[TOOL], tool_choice=choice)
    assert {field: found[field] for field in ("tool_choice", "parallel_tool_calls") if field in found} == form
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert found["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("thinking", "effort", "form"),
    [
        ({"type": "disabled"}, "max", {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            {"type": "enabled", "budget_tokens": 5},
            "low",
            {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 5},
        ),
        ({"type": "adaptive"}, None, {"chat_template_kwargs": {"enable_thinking": True}}),
        (
            {"type": "adaptive"},
            "low",
            {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"},
        ),
        (
            {"type": "adaptive"},
            "max",
            {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "xhigh"},
        ),
    ],
)
def test_thinking(thinking: dict[str, Any], effort: str | None, form: dict[str, Any]) -> None:
    found = form_of(thinking=thinking, output_config={"effort": effort})
    fields = ("chat_template_kwargs", "thinking_budget", "reasoning_effort")
    assert {field: found[field] for field in fields if field in found} == form


def test_a_schema_of_the_output() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    form = form_of(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert form["response_format"]["type"] == "json_schema"
    assert form["response_format"]["json_schema"]["schema"] == schema
    assert form["response_format"]["json_schema"]["strict"] is True


def test_system_turns_keep_their_places() -> None:
    system = {"role": "system", "content": [text("c")]}
    blocks = [text("a"), text("b") | {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}]
    leading = form_of(system=blocks, messages=[system, USER])["messages"]
    assert leading[:2] == [{"role": "system", "content": "a\nb"}, {"role": "system", "content": "c"}]
    later = form_of(system="s", messages=[USER, system, USER])["messages"]
    assert [turn["role"] for turn in later] == ["system", "user", "system", "user"]


def test_results_around_a_system_turn_are_of_one_turn() -> None:
    calls = {"role": "assistant", "content": [use("a", x=1), use("b", x=2)]}
    system = {"role": "system", "content": "s"}
    between = [
        {"role": "user", "content": [result("b", content="2")]},
        system,
        {"role": "user", "content": [result("a", content="1"), text("so")]},
    ]
    told = form_of(messages=[USER, calls, system, *between, system])["messages"][2:]
    assert [(turn["role"], turn["content"]) for turn in told] == [
        ("system", "s"),
        ("tool", "1"),
        ("system", "s"),
        ("tool", "2"),
        ("user", "so"),
        ("system", "s"),
    ]
    with pytest.raises(InvalidRequest, match="has no tool_result"):
        form_of(messages=[USER, calls, *between[:2], USER])


def test_turns_of_one_role_are_one() -> None:
    assistant = {"role": "assistant", "content": [text("x"), text("y")]}
    messages = [USER, USER, assistant, {"role": "assistant", "content": "z"}, {"role": "user", "content": [text("u")]}]
    assert form_of(messages=messages)["messages"] == [
        {"role": "user", "content": "hi\nhi"},
        {"role": "assistant", "content": "xyz"},
        {"role": "user", "content": "u"},
    ]


def test_calls_and_results() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    said = [thought, {"type": "redacted_thinking", "data": "?"}, text("so"), use("a", x=1), use("b", y={"z": [None]})]
    answers = [result("b", content=[text("1"), text("2")]), result("a", content="no", is_error=True), text("go on")]
    messages = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": answers}]
    form = form_of(messages=messages, tools=[TOOL])["messages"]
    calls = form[1].pop("tool_calls")
    assert form[1] == {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    assert [(call["id"], call["type"], call["function"]["name"]) for call in calls] == [
        ("a", "function", "f"),
        ("b", "function", "f"),
    ]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"x": 1}, {"y": {"z": [None]}}]
    assert form[2:] == [
        {"role": "tool", "tool_call_id": "a", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "b", "content": "1\n2"},
        {"role": "user", "content": "go on"},
    ]


def test_a_beginning_of_the_answer_is_continued() -> None:
    form = form_of(messages=[USER, {"role": "assistant", "content": "The answer is ("}])
    assert form["messages"][-1] == {"role": "assistant", "content": "The answer is ("}
    assert (form["continue_final_message"], form["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    ("turns", "param"),
    [
        ([[use("a")]], "messages[1].content[0]"),
        ([[use("a")], [text("x")]], "messages[1].content[0]"),
        ([[use("a")], [result("b")]], "messages[2].content[0].tool_use_id"),
        ([[use("a")], [result("a"), result("a")]], "messages[2].content[1].tool_use_id"),
        ([[use("a"), use("b")], [result("b")]], "messages[1].content[0]"),
        ([[use("a"), use("a")], [result("a")]], "messages[1].content[1].id"),
        ([[use("a")], [text("x"), result("a")]], "messages[2].content[0]"),
        ([[text("x")], [result("a")]], "messages[2].content[0].tool_use_id"),
        ([[use("a")], [result("a")], [text("x")], [result("a")]], "messages[4].content[0].tool_use_id"),
    ],
)
def test_calls_without_their_results(turns: list[list[dict[str, Any]]], param: str) -> None:
    roles = ("assistant", "user")
    messages = [USER, *({"role": roles[i % 2], "content": blocks} for i, blocks in enumerate(turns))]
    with pytest.raises(InvalidRequest) as refused:
        form_of(messages=messages)
    assert refused.value.param == param
    assert refused.value.message.startswith(param)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ("response_format.json_schema.schema", "output_config.format"),
        ("response_format", "output_config.format"),
        ("tools[3].function.parameters", "tools[3].input_schema"),
        ("tools[3].function.name", "tools[3].name"),
        ("thinking_budget", "thinking.budget_tokens"),
        ("messages", "messages"),
    ],
)
def test_errors_of_the_chat_name_the_fields_of_the_message(chat: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused, named_as_sent():
        raise InvalidRequest(f"{chat} is too long", param=chat)
    assert (refused.value.message, refused.value.param) == (f"{message} is too long", message)
    with pytest.raises(InvalidRequest) as refused, named_as_sent():
        raise InvalidRequest("no field")
    assert refused.value.param is None


def test_blocks_interleaved() -> None:
    deltas = [
        TextDelta("hm", reasoning=True),
        TextDelta("m", reasoning=True),
        TextDelta("a"),
        ToolDelta(0, name="f", call_id="call_1"),
        ToolDelta(0, '{"x": 1'),
        ToolDelta(0, "}"),
        ToolDelta(1, name="f", call_id="call_2"),
        ToolDelta(1, "{}"),
        TextDelta("b"),
        TextDelta("c"),
    ]
    blocks = MessageBlocks()
    events = [event for delta in deltas for event in blocks.take(delta)]
    whole = joined([*events, *blocks.close()])
    assert [{**block, "signature": ""} if "signature" in block else block for block in whole] == [
        {"type": "thinking", "thinking": "hmm", "signature": ""},
        text("a"),
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "toolu_2", "name": "f", "input": {}},
        text("bc"),
    ]
    assert blocks.close() == []
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == [0, 1, 2, 3, 4]


def test_a_call_with_more_nesting_than_json_takes() -> None:
    arguments = '{"x": ' + "[" * 300 + "]" * 300 + "}"
    blocks = MessageBlocks()
    events = blocks.take(ToolDelta(0, arguments, name="f", call_id="call_1"))
    assert joined([*events, *blocks.close()])[0]["input"] == {"arguments": arguments}
