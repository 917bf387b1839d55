"""What agents send to /v1/responses beside the plain form: tools in namespaces, custom and hosted ones, items by their
ids, and fields of their own."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from services.gateway.api.responses.streaming import InputText
from services.gateway.protocol.responses.response import InputItemsOut
from tests.unit.gateway.api.responses.test_responses import ROUTE, events_of, plain, prompt, same, stream
from tests.unit.gateway.conftest import MODEL, Running
from tests.unit.gateway.fake_engine import says

RUN = {
    "type": "function",
    "name": "run",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
START = {"type": "function", "name": "start", "description": "Starts one.", "parameters": {"type": "object"}}
HELPERS = {"type": "namespace", "name": "helpers", "description": "Helpers of yours.", "tools": [RUN, START]}
MCP = {"type": "namespace", "name": "mcp__files__", "tools": [START | {"name": "read"}]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
WEB = {"type": "web_search", "external_web_access": False, "filters": {"allowed_domains": ["a.example"]}}


@pytest.fixture
def running(roomy: Running) -> Running:
    return roomy


def called(name: str, parameter: str = "", value: str = "") -> str:
    inside = f"<parameter={parameter}>\n{value}\n</parameter>\n" if parameter else ""
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def test_codex(running: Running, http: httpx.Client) -> None:
    """The fields that Codex sends with every request."""
    body = {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is 3 + 4?"}]},
        ],
        "tools": [RUN, HELPERS, PATCH, WEB, {"type": "image_generation", "output_format": "png"}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": "auto", "context": "auto"},
        "text": {"verbosity": "low"},
        "store": False,
        "stream": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread-1",
        "client_metadata": {"installation": "one", "nested": {"a": [1]}},
        "access_programs": {"cyber": "standard"},
        "service_tier": "priority",
        "max_tool_calls": 3,
    }
    running.engine.behaviour = says("hm</think>\n\n7")
    answer = http.post(ROUTE, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-temper-left-out-tools"] == "web_search, image_generation"
    told = answer.json()
    assert told["left_out_tools"] == ["web_search", "image_generation"]
    assert [tool["type"] for tool in told["tools"]] == ["function", "namespace", "custom"]
    assert (told["text"]["verbosity"], told["service_tier"]) == ("low", "default")
    read = prompt(running)
    assert "You are a coding agent.\n\nBe short." in read
    assert "web_search" not in read
    events = events_of(http.post(ROUTE, json=body | {"stream": True}))
    assert events[-1]["response"]["left_out_tools"] == ["web_search", "image_generation"]


@pytest.mark.parametrize(
    ("tools", "name", "item"),
    [
        ([RUN, HELPERS], "run", {"name": "run"}),
        ([RUN, HELPERS], "helpers__run", {"name": "run", "namespace": "helpers"}),
        ([HELPERS, RUN], "helpers__start", {"name": "start", "namespace": "helpers"}),
        ([MCP], "mcp__files__read", {"name": "read", "namespace": "mcp__files__"}),
        ([HELPERS], "unknown__start", {"name": "unknown__start"}),
    ],
)
def test_namespaces(running: Running, http: httpx.Client, tools: Any, name: str, item: dict[str, str]) -> None:
    running.engine.behaviour = says(called(name, "cmd", "ls"))
    ask: dict[str, Any] = {"input": [{"role": "user", "content": "hi"}], "tools": tools}
    answer = plain(http, **ask)
    (call,) = answer["output"]
    assert (call["type"], call["arguments"]) == ("function_call", '{"cmd": "ls"}')
    assert {key: value for key, value in call.items() if key in ("name", "namespace")} == item
    assert answer["tools"] == echoed(tools)
    events = stream(http, **ask)
    assert same(events[-1]["response"]["output"]) == same(answer["output"])
    added = next(event["item"] for event in events if event["type"] == "response.output_item.added")
    assert {key: value for key, value in added.items() if key in ("name", "namespace")} == item
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok", "name": "x", "namespace": "y"}
    for history in (
        {"input": [*ask["input"], call, output]},
        {"input": [output], "previous_response_id": answer["id"]},
    ):
        plain(http, tools=tools, **history)
        assert '<tool_call>{"cmd": "ls"}</tool_call>\ntool\nok' in prompt(running)


def echoed(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as an answer tells them: what was left out is null, or empty."""
    return [
        {"description": ""} | tool | {"tools": echoed(tool["tools"])}
        if tool["type"] == "namespace"
        else {"strict": None} | tool
        for tool in tools
    ]


def test_the_model_reads_about_a_namespace_once(running: Running, http: httpx.Client) -> None:
    plain(http, tools=[HELPERS])
    read = prompt(running)
    assert read.count("helpers: Helpers of yours.") == 1
    assert read.index("Helpers of yours.") < read.index("Runs a command.") < read.index("Starts one.")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "start"}, ["helpers__start"]),
        ({"type": "function", "name": "helpers__start"}, ["helpers__start"]),
        ({"type": "function", "name": "start", "namespace": "helpers"}, ["helpers__start"]),
        ({"type": "function", "name": "run"}, ["run"]),
        ({"type": "function", "name": "run", "namespace": "helpers"}, ["helpers__run"]),
        ({"type": "custom", "name": "apply_patch"}, ["apply_patch"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "namespace", "name": "helpers"}, {"type": "web_search"}],
            },
            ["helpers__run", "helpers__start"],
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "start"}, {"type": "custom", "name": "apply_patch"}],
            },
            ["helpers__start", "apply_patch"],
        ),
    ],
)
def test_choices_of_qualified_names(running: Running, http: httpx.Client, choice: Any, names: list[str]) -> None:
    answer = plain(http, tools=[RUN, HELPERS, PATCH, WEB], tool_choice=choice)
    assert answer["tool_choice"] == choice
    grammar = running.engine.requests[-1].sampling.constraint.lark
    offered = {name for name in ("run", "helpers__run", "helpers__start", "apply_patch") if f"={name}>" in grammar}
    assert offered == set(names)


@pytest.mark.parametrize(
    "tools", [[WEB], [WEB, {"type": "mcp", "server_label": "s"}], [{"type": "tool_search", "execution": "client"}]]
)
def test_hosted_tools_alone_are_refused_by_name(running: Running, http: httpx.Client, tools: Any) -> None:
    answer = http.post(ROUTE, json={"model": MODEL, "input": "hi", "tools": tools})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "tools[0].type")
    assert tools[0]["type"] in error["message"]
    forced = {"model": MODEL, "input": "hi", "tools": [RUN, *tools], "tool_choice": {"type": tools[0]["type"]}}
    answer = http.post(ROUTE, json=forced)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
    assert tools[0]["type"] in answer.json()["error"]["message"]
    assert not running.engine.requests


def test_a_refused_schema_is_named_where_it_stands(http: httpx.Client) -> None:
    broken = RUN | {"name": "broken", "strict": True, "parameters": {"type": "object", "oneOf": []}}
    tools = [WEB, HELPERS | {"tools": [START, broken]}]
    error = http.post(ROUTE, json={"model": MODEL, "input": "hi", "tools": tools}).json()["error"]
    assert error["param"].startswith("tools[1].tools[1].parameters"), error
    assert "tools[1].tools[1].parameters" in error["message"]


@pytest.mark.parametrize("text", ['*** Begin Patch\n+a "b" \\ \t\u20ac\U0001f600\n*** End Patch', "x", '{"input": 1}'])
def test_custom_tools(running: Running, http: httpx.Client, text: str) -> None:
    running.engine.behaviour = says(called("apply_patch", "input", text))
    tools = [PATCH | {"format": {"type": "text"}}, RUN]
    answer = plain(http, tools=tools)
    (call,) = answer["output"]
    assert same(call) == {"type": "custom_tool_call", "status": "completed", "name": "apply_patch", "input": text}
    assert call["id"].startswith("ctc_")
    events = stream(http, tools=tools)
    pieces = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    done = next(event for event in events if event["type"] == "response.custom_tool_call_input.done")
    assert "".join(pieces) == done["input"] == text
    assert len(text) == 1 or len(pieces) > 1, "it is streamed"
    assert same(events[-1]["response"]["output"]) == same(answer["output"])
    # and back
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
    user = {"role": "user", "content": "hi"}
    for history in (
        {"input": [user, call, output]},
        {"input": [output], "previous_response_id": answer["id"]},
        {"input": [user, {"type": "item_reference", "id": call["id"]}, output]},
    ):
        continued = plain(http, tools=tools, **history)
        read = prompt(running)
        given = json.dumps({"input": text}, ensure_ascii=False)
        assert f"<tool_call>{given}</tool_call>\ntool\nDone." in read
        listed = http.get(f"{ROUTE}/{continued['id']}/input_items").json()
        InputItemsOut.model_validate(listed)
        assert {"custom_tool_call", "custom_tool_call_output"} <= {item["type"] for item in listed["data"]}


def test_a_custom_tool_that_is_cut_off(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says(called("apply_patch", "input", "abc " * 20))
    answer = plain(http, tools=[PATCH], max_output_tokens=80)
    (call,) = answer["output"]
    assert (answer["status"], call["status"]) == ("incomplete", "incomplete")
    assert 0 < len(call["input"]) < 80
    assert ("abc " * 20).startswith(call["input"])
    user = {"role": "user", "content": "go on"}
    plain(http, tools=[PATCH], input=[{"type": "item_reference", "id": call["id"]}, user])
    assert "abc" not in prompt(running), "what was cut off is left out, as by previous_response_id"


@pytest.mark.parametrize(
    "pieces",
    [
        ['{"input": "', "a\\", 'n\\"b', "\\u00", "e4", "\\ud83d", "\\ude00\\", '\\"}'],
        ['{"input": "a\\n\\"b\\u00e4\\ud83d\\ude00\\\\"}'],
        list('{"input": "a\\n\\"b\\u00e4\\ud83d\\ude00\\\\"}'),
    ],
)
def test_input_text_in_pieces(pieces: list[str]) -> None:
    text = InputText()
    assert "".join(map(text.feed, pieces)) == 'a\n"b\u00e4\U0001f600\\'


def test_grammars_of_custom_tools(running: Running, http: httpx.Client) -> None:
    regex = {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}|x"}
    plain(http, tools=[PATCH | {"format": regex}], tool_choice={"type": "custom", "name": "apply_patch"})
    forced = running.engine.requests[-1].sampling.constraint.lark
    # Bound even where nothing is forced.
    answer = plain(http, tools=[PATCH | {"format": regex}])
    for lark in (forced, running.engine.requests[-1].sampling.constraint.lark):
        (pattern,) = re.findall(r"^V1: \(\(PLAIN & /(.*)/\)\) ", lark, re.MULTILINE)
        assert [bool(re.fullmatch(pattern, text)) for text in ("abc", "x", "abcd", "y")] == [True, True, False, False]
    assert answer["tools"][0]["format"] == regex


# -- items by their ids


def test_two_turns_by_references(running: Running, client: openai.OpenAI) -> None:
    """The second turn of the AI SDK's Responses provider."""
    first = client.responses.create(model=MODEL, input="What is 12 plus 7?")
    running.engine.behaviour = says("3")
    second = client.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": "What is 12 plus 7?"},
            {"type": "item_reference", "id": first.output[0].id},
            {"role": "user", "content": "What is 1 plus 2?"},
        ],
    )
    turns = [
        {"role": "user", "content": "What is 12 plus 7?"},
        {"role": "assistant", "content": "Hello, world"},
        {"role": "user", "content": "What is 1 plus 2?"},
    ]
    assert list(running.engine.requests[-1].prompt_token_ids) == running.engine.codec.encode_chat(turns)
    items = client.responses.input_items.list(second.id, order="asc").data
    assert items[1].id == first.output[0].id, "the item itself is kept with the second response, too"


def test_references_to_all_kinds_of_items(running: Running, http: httpx.Client) -> None:
    think = {"chat_template_kwargs": {"enable_thinking": True}}
    running.engine.behaviour = says(f"hm</think>\n\nWell.\n\n{called('run', 'cmd', 'ls')}")
    first = plain(http, input=[{"role": "user", "content": "hi"}], tools=[RUN], **think)
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    output = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "a b"}
    second = plain(http, input=[output], tools=[RUN], previous_response_id=first["id"], **think)
    asked = http.get(f"{ROUTE}/{first['id']}/input_items").json()["data"]
    told = http.get(f"{ROUTE}/{second['id']}/input_items").json()["data"][:1]
    assert told[0]["type"] == "function_call_output"
    ids = [item["id"] for item in [*asked, *first["output"], *told, *second["output"]]]
    by_id = [{"type": "item_reference", "id": item} for item in ids[:3]] + [{"id": item} for item in ids[3:5]]
    by_id.append({"type": None, "id": ids[5]})
    last = {"role": "user", "content": "go on"}
    plain(http, input=[last], previous_response_id=second["id"], **think)
    right = list(running.engine.requests[-1].prompt_token_ids)
    plain(http, input=[*by_id, *({"id": item} for item in ids[6:]), last], **think)
    assert list(running.engine.requests[-1].prompt_token_ids) == right
    counted = http.post(f"{ROUTE}/input_tokens", json={"model": MODEL, "input": [*by_id, last], **think})
    assert counted.status_code == 200, counted.text


@pytest.mark.parametrize("item_id", ["msg_1", "x", f"msg_{'0' * 48}", f"msg_{'g' * 48}", "resp_" + "0" * 32, "msg_ä"])
def test_unknown_references(running: Running, http: httpx.Client, item_id: str) -> None:
    user = {"role": "user", "content": "hi"}
    for streamed in (False, True):
        answer = http.post(ROUTE, json={"model": MODEL, "input": [user, {"id": item_id}], "stream": streamed})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (404, "input[1].id"), error
        assert repr(item_id) in error["message"]
    assert not running.engine.requests


def test_references_end_with_their_response(running: Running, http: httpx.Client) -> None:
    kept, other = plain(http), plain(http, store=False)
    item = kept["output"][0]["id"]
    made_up = item[:-16] + "0" * 16
    for wrong in (other["output"][0]["id"], made_up):
        assert http.post(ROUTE, json={"model": MODEL, "input": [{"id": wrong}]}).status_code == 404
    assert http.post(ROUTE, json={"model": MODEL, "input": [{"id": item}, {"role": "user", "content": "x"}]}).is_success
    http.delete(f"{ROUTE}/{kept['id']}")
    assert http.post(ROUTE, json={"model": MODEL, "input": [{"id": item}]}).status_code == 404
    running.responses.down = True
    assert http.post(ROUTE, json={"model": MODEL, "input": [{"id": item}]}).status_code == 503


def test_encrypted_reasoning_is_left_out(running: Running, http: httpx.Client) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    user = {"role": "user", "content": "hi"}
    plain(http, input=[user, thought, {"role": "assistant", "content": "a", "phase": "final_answer"}, user])
    turns = [user, {"role": "assistant", "content": "a"}, user]
    assert list(running.engine.requests[-1].prompt_token_ids) == running.engine.codec.encode_chat(turns)
