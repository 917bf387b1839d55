"""What a message asks of the engine beyond a plain chat: forced calls, schemas, thinking budgets, continued answers."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pydantic
import pytest

from tests.unit.gateway.api.messages.test_messages import BODY, CALL, USER, WEATHER, ask
from tests.unit.gateway.api.messages.test_messages_errors import ROUTE
from tests.unit.gateway.conftest import MODEL, Running
from tests.unit.gateway.fake_engine import says

ONLY_CALL = CALL.removeprefix("Sure.\n\n")
OTHER = {"name": "other", "input_schema": {"type": "object"}}


class Sum(pydantic.BaseModel):
    """A structured answer."""

    a: int


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
@pytest.mark.parametrize("thinks", [False, True])
def test_a_forced_call(
    running: Running, claude: anthropic.Anthropic, stream: bool, choice: dict[str, Any], thinks: bool
) -> None:
    running.engine.behaviour = says(("hm</think>\n\n" if thinks else "") + ONLY_CALL)
    body = BODY | {"tools": [WEATHER, OTHER], "tool_choice": choice, "max_tokens": 200}
    message = ask(claude, body | ({"thinking": {"type": "adaptive"}} if thinks else {}), stream=stream)
    assert [block.type for block in message.content] == ["thinking"] * thinks + ["tool_use"]
    assert message.content[-1].input == {"city": "Paris", "days": 3}
    assert message.stop_reason == "tool_use"
    grammar = running.engine.requests[-1].sampling.constraint.lark
    assert "weather" in grammar
    assert ("other" in grammar) == (choice["type"] == "any")


def test_a_schema_is_enforced(running: Running, claude: anthropic.Anthropic) -> None:
    running.engine.behaviour = says('{"a": 1}')
    message = claude.messages.parse(**BODY, output_format=Sum)
    assert message.parsed_output == Sum(a=1)
    constraint = running.engine.requests[-1].sampling.constraint
    assert json.loads(constraint.json_schema)["properties"]["a"]["type"] == "integer"


def test_thinking_has_a_budget(running: Running, claude: anthropic.Anthropic) -> None:
    claude.messages.create(**BODY, thinking={"type": "enabled", "budget_tokens": 50})
    assert running.engine.requests[-1].sampling.thinking.budget == 50
    claude.messages.create(**BODY, thinking={"type": "adaptive"})
    assert not running.engine.requests[-1].sampling.thinking.HasField("budget")
    claude.messages.create(**BODY, thinking={"type": "adaptive"}, output_config={"effort": "max"})
    budget = running.inference.settings.reasoning_budget_xhigh
    assert running.engine.requests[-1].sampling.thinking.budget == budget


def test_a_beginning_of_the_answer_is_continued(
    running: Running, claude: anthropic.Anthropic, http: httpx.Client
) -> None:
    running.engine.behaviour = says("fine.")
    body = {"model": MODEL, "messages": [*USER, {"role": "assistant", "content": "I am "}]}
    message = claude.messages.create(**body, max_tokens=20)
    assert message.content[0].text == "fine."
    prompt = list(running.engine.requests[-1].prompt_token_ids)
    assert running.engine.codec.decode(prompt, skip_special=False).endswith("<|im_start|>assistant\nI am ")
    assert claude.messages.count_tokens(**body).input_tokens == len(prompt)
    fields = {"messages": body["messages"], "continue_final_message": True}
    assert http.post("/tokenize", json=fields).json()["tokens"] == prompt
    bare = http.post("/tokenize", json={"messages": USER, "add_generation_prompt": False}).json()["tokens"]
    assert running.engine.codec.decode(bare, skip_special=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (
            {
                "output_config": {
                    "format": {
                        "type": "json_schema",
                        "schema": {"properties": {str(number): {} for number in range(1200)}},
                    }
                }
            },
            "output_config.format",
        ),
        (
            {
                "tools": [WEATHER | {"input_schema": {"type": "object", "properties": {"a": {"$ref": "#/x"}}}}],
                "tool_choice": {"type": "any"},
            },
            "tools[0].input_schema.properties.a",
        ),
    ],
)
def test_what_cannot_be_enforced_is_named_as_it_was_sent(
    http: httpx.Client, change: dict[str, Any], param: str
) -> None:
    answer = http.post(ROUTE, json=BODY | change)
    assert answer.status_code == 400
    assert answer.json()["error"]["details"]["param"] == param
    assert answer.json()["error"]["message"].startswith(param)
