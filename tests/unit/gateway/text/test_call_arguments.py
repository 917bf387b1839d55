"""Arguments of calls as clients get them: markup in them is theirs, and integers are written as integers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.unit.gateway.api.completions.test_chat_answers import events, plain, whole_of
from tests.unit.gateway.conftest import MODEL, Running
from tests.unit.gateway.fake_engine import says

SCHEMA = {
    "type": "object",
    "properties": {
        "command": {"type": "string"},
        "timeout": {"type": "integer"},
        "sizes": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    },
    "required": ["command"],
}
BASH = {"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}
ASKED = [{"role": "user", "content": "Do it."}]
TO_TIMEOUT = "cat > t.xml <<'E'\n<parameter=timeout>\n5\n</parameter>\nE\nrm -r build"
LS = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
A_CALL = f"cat > t.md <<'E'\n{LS}\nE"
INLINE = "echo '<parameter=timeout>5</parameter>' '</tool_call>'"


def call(**arguments: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=bash>\n{inside}</function>\n</tool_call>"


ANSWERS: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"command": TO_TIMEOUT}, {"command": TO_TIMEOUT}),
    ({"command": A_CALL}, {"command": A_CALL}),
    ({"command": A_CALL, "timeout": "5.0"}, {"command": A_CALL, "timeout": 5}),
    ({"command": INLINE, "timeout": "1e3"}, {"command": INLINE, "timeout": 1000}),
    ({"timeout": "-3.00", "sizes": "[1.0, null, 2e2]"}, {"timeout": -3, "sizes": [1, None, 200]}),
    ({"timeout": "5.5", "sizes": "[1.5]"}, {"timeout": "5.5", "sizes": [1.5]}),
]


@pytest.mark.parametrize("per_update", [1, 500])
@pytest.mark.parametrize(("written", "wanted"), ANSWERS)
def test_chat(
    running: Running, http: httpx.Client, written: dict[str, str], wanted: dict[str, Any], per_update: int
) -> None:
    running.engine.behaviour = says(call(**written), per_update=per_update)
    body = {"model": MODEL, "messages": ASKED, "tools": [BASH]}
    choice = plain(http.post("/v1/chat/completions", json=body).json()["choices"][0])
    assert whole_of(events(http.post("/v1/chat/completions", json=body | {"stream": True})))[0] == choice
    assert choice["message"]["content"] == ""
    # Integers as such: 5.0 would be equal.
    assert choice["message"]["calls"] == [["bash", json.dumps(wanted)]]
    assert choice["reason"] == "tool_calls"


@pytest.mark.parametrize(("written", "wanted"), ANSWERS)
def test_messages_and_responses(
    running: Running, http: httpx.Client, written: dict[str, str], wanted: dict[str, Any]
) -> None:
    running.engine.behaviour = says(call(**written))
    tools: list[dict[str, Any]] = [{"name": "bash", "input_schema": SCHEMA}]
    body = {"model": MODEL, "max_tokens": 400, "messages": ASKED, "tools": tools}
    (block,) = http.post("/v1/messages", json=body).json()["content"]
    assert json.dumps(block["input"]) == json.dumps(wanted)
    tools = [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}]
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "Hi", "tools": tools, "store": False}).json()
    (item,) = answer["output"]
    assert item["arguments"] == json.dumps(wanted)


@pytest.mark.parametrize("per_update", [1, 500])
def test_a_stop_within_markup_that_is_an_argument(running: Running, http: httpx.Client, per_update: int) -> None:
    """Where the value would have ended is not known when the stop comes."""
    running.engine.behaviour = says(call(command=TO_TIMEOUT), per_update=per_update)
    body = {"model": MODEL, "messages": ASKED, "tools": [BASH], "stop": ["rm -r"]}
    choice = plain(http.post("/v1/chat/completions", json=body).json()["choices"][0])
    assert whole_of(events(http.post("/v1/chat/completions", json=body | {"stream": True})))[0] == choice
    told = json.dumps({"command": TO_TIMEOUT[: TO_TIMEOUT.index("rm -r")]}).removesuffix('"}')
    assert choice["message"]["calls"] == [["bash", told]]
    assert choice["reason"] == "stop"
