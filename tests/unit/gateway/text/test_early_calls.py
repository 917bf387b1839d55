"""Calls that begin before the reasoning is closed, in every API, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from services.common.pb import engine_pb2
from services.common.text.output_parser import ChatParser
from tests.unit.gateway.api.completions.test_chat_answers import events, plain, whole_of
from tests.unit.gateway.conftest import MODEL, Running
from tests.unit.gateway.fake_engine import says
from tests.unit.gateway.text.test_tool_corpus import joined

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": ASKED,
    "tools": [WEATHER],
    "chat_template_kwargs": {"enable_thinking": True},
}


def call(city: str) -> str:
    return f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"


def cities(*names: str) -> list[list[str]]:
    return [["weather", json.dumps({"city": name})] for name in names]


PARIS, ROME = call("Paris"), call("Rome")
NESTED = call(f"see\n{PARIS}\nabove")
UNCLOSED = PARIS.removesuffix("\n</tool_call>")

# What the model writes after <think>, then the reasoning, the content and the calls of the answer.
ANSWERS: dict[str, tuple[str, str, str, list[list[str]]]] = {
    "at once": (PARIS, "", "", cities("Paris")),
    "behind thoughts": (f"I need it.\n\n{PARIS}", "I need it.", "", cities("Paris")),
    "white space behind it": (f"Hm.\n{PARIS}\n\n", "Hm.", "", cities("Paris")),
    "two": (f"Hm.\n{PARIS}\n{ROME}", "Hm.", "", cities("Paris", "Rome")),
    "the reasoning closed and nothing more": (f"Hm.\n{PARIS}\n</think>\n\n", "Hm.", "", cities("Paris")),
    "a call in it": (f"Hm.\n{NESTED}", "Hm.", "", cities(f"see\n{PARIS}\nabove")),
    "its last tag forgotten": (f"Hm.\n{UNCLOSED}", "Hm.", "", cities("Paris")),
    "thoughts go on": (f"Like {PARIS}? No.\n</think>\n\nHi.", f"Like {PARIS}? No.", "Hi.", []),
    "thoughts go on and end": (f"Like {PARIS}\nor not", f"Like {PARIS}\nor not", "", []),
    "thoughts go on, then a call": (f"Like {PARIS}? Or {ROME}", f"Like {PARIS}? Or", "", cities("Rome")),
    "thought of, then an answer": (f"So: {PARIS}\n</think>\n\nHi.", f"So: {PARIS}", "Hi.", []),
    "thought of, then called": (f"So: {PARIS}\n</think>\n\n{ROME}", f"So: {PARIS}", "", cities("Rome")),
    "the tag alone": ("Say <tool_call> first.\n</think>\nHi.", "Say <tool_call> first.", "Hi.", []),
    "the tag alone, then a call": (f"Say <tool_call> first.\n{PARIS}", "Say <tool_call> first.", "", cities("Paris")),
    "left open": (f"Like {UNCLOSED[:-25]}\n</think>\n\nHi.", f"Like {UNCLOSED[:-25]}", "Hi.", []),
    "behind the reasoning": (f"Hm.\n</think>\n\n{PARIS}", "Hm.", "", cities("Paris")),
}


@pytest.mark.sampled
@pytest.mark.parametrize("per_update", [1, 5, 500])
@pytest.mark.parametrize("name", ANSWERS)
def test_chat(running: Running, http: httpx.Client, name: str, per_update: int) -> None:
    text, reasoning, content, calls = ANSWERS[name]
    running.engine.behaviour = says(text, per_update=per_update)
    answer = http.post("/v1/chat/completions", json=CHAT).json()
    choice = plain(answer["choices"][0])
    assert choice["message"] == {"content": content, "reasoning": reasoning, "calls": calls}
    assert choice["reason"] == ("tool_calls" if calls else "stop")
    details = answer["usage"]["completion_tokens_details"]
    # The tokenizer has one token a byte, and one a tag. White space beside a tag counts, too.
    shown = len(reasoning.replace("<tool_call>", "!").replace("</tool_call>", "!"))
    assert shown <= details["reasoning_tokens"] <= shown + 2
    stream = http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert whole_of(events(stream))[0] == choice


@pytest.mark.parametrize("name", ANSWERS)
def test_messages(running: Running, http: httpx.Client, name: str) -> None:
    text, reasoning, content, calls = ANSWERS[name]
    running.engine.behaviour = says(text)
    body = {
        "model": MODEL,
        "max_tokens": 400,
        "messages": ASKED,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    answer = http.post("/v1/messages", json=body | {"max_tokens": 2000}).json()
    kinds: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
    for block in answer["content"]:
        kinds[block["type"]].append(block["input"] if block["type"] == "tool_use" else block[block["type"]])
    assert kinds["thinking"] == [reasoning] * bool(reasoning)
    assert kinds["text"] == [content] * bool(content)
    assert kinds["tool_use"] == [json.loads(arguments) for _, arguments in calls]
    assert answer["stop_reason"] == ("tool_use" if calls else "end_turn")


@pytest.mark.parametrize("name", ANSWERS)
def test_responses(running: Running, http: httpx.Client, name: str) -> None:
    text, reasoning, content, calls = ANSWERS[name]
    running.engine.behaviour = says(text)
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    body = {"model": MODEL, "input": "Hi", "tools": tools, "reasoning": {"effort": "low"}, "store": False}
    answer = http.post("/v1/responses", json=body).json()
    output = answer["output"]
    thoughts = [part["text"] for item in output if item["type"] == "reasoning" for part in item["content"]]
    texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
    found = [[item["name"], item["arguments"]] for item in output if item["type"] == "function_call"]
    assert thoughts == [reasoning] * bool(reasoning)
    assert "".join(texts) == content
    assert found == calls
    assert answer["status"] == "completed"


def test_cut_off_it_is_a_thought(running: Running, http: httpx.Client) -> None:
    """Nobody knows what would have followed."""
    running.engine.behaviour = says(f"Hm.\n{PARIS}", ends=False)
    choice = plain(http.post("/v1/chat/completions", json=CHAT).json()["choices"][0])
    assert choice["message"] == {"content": "", "reasoning": f"Hm.\n{PARIS}", "calls": []}
    assert choice["reason"] == "length"


def test_one_call_where_one_is_allowed(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says(f"Hm.\n{PARIS}\n{ROME}")
    body = CHAT | {"parallel_tool_calls": False}
    choice = plain(http.post("/v1/chat/completions", json=body).json()["choices"][0])
    assert choice["message"]["calls"] == cities("Paris")


def test_letters_are_text(running: Running, http: httpx.Client) -> None:
    codec = running.engine.codec
    running.engine.behaviour = says([*codec.encode("Hm.\n"), *codec.encode_plain(PARIS)])
    choice = plain(http.post("/v1/chat/completions", json=CHAT).json()["choices"][0])
    assert choice["message"] == {"content": "", "reasoning": f"Hm.\n{PARIS}", "calls": []}


def test_without_tools_it_is_text(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says(f"Hm.\n{PARIS}")
    body = {key: value for key, value in CHAT.items() if key != "tools"}
    choice = plain(http.post("/v1/chat/completions", json=body).json()["choices"][0])
    assert choice["message"] == {"content": "", "reasoning": f"Hm.\n{PARIS}", "calls": []}


@pytest.mark.parametrize("name", ANSWERS)
def test_where_tags_are_no_tokens_letters_count(name: str) -> None:
    text, reasoning, content, calls = ANSWERS[name]
    for step in (1, 3, len(text)):
        parser = ChatParser(thinking=True, tools=[WEATHER])
        deltas = [delta for at in range(0, len(text), step) for delta in parser.feed(text[at : at + step])]
        assert joined([*deltas, *parser.finish(complete=True)]) == (content, reasoning, calls)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tool_choice": "required"}, True),
        ({"tools": [{**WEATHER, "function": WEATHER["function"] | {"strict": True}}]}, True),
        ({"thinking_budget": 64}, False),
        ({"response_format": {"type": "json_object"}, "tool_choice": "none"}, False),
    ],
)
def test_the_engine_is_told_with_what_a_call_begins(
    running: Running, http: httpx.Client, fields: dict[str, Any], told: bool
) -> None:
    """Where a grammar of calls is to be enforced, the answer may begin with one before the reasoning is closed."""
    assert http.post("/v1/chat/completions", json=CHAT | fields).status_code == 200
    request: engine_pb2.GenerateRequest = running.engine.requests[-1]
    assert request.sampling.thinking.HasField("call_token_id") is told
    if told:
        assert request.sampling.thinking.call_token_id == running.engine.codec.token_id("<tool_call>")


@pytest.mark.parametrize("per_update", [1, 500])
def test_a_stop_in_an_argument_counts_and_in_the_reasoning_does_not(
    running: Running, http: httpx.Client, per_update: int
) -> None:
    running.engine.behaviour = says(f"Paris?\n{PARIS}\n{ROME}", per_update=per_update)
    body = CHAT | {"stop": ["ris"]}
    choice = plain(http.post("/v1/chat/completions", json=body).json()["choices"][0])
    assert whole_of(events(http.post("/v1/chat/completions", json=body | {"stream": True})))[0] == choice
    assert choice["message"] == {"content": "", "reasoning": "Paris?", "calls": [["weather", '{"city": "Pa']]}
    assert choice["reason"] == "stop"
