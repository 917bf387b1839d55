"""Forms of answers, forced calls and thinking budgets, enforced by the whole system on a model that is let run wild."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest

from tests.stack import Stack
from tests.unit.gateway.call_checks import check_model
from tests.unit.gateway.hostile_calls import draw

USER = [{"role": "user", "content": "What is 12 plus 7?"}]
WILD: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_completion_tokens": 200}
SCHEMA = {
    "type": "object",
    "properties": {
        "sum": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["apples", "pears", None]},
        "code": {"type": "string", "pattern": "^[a-z]{2}-[0-9]{2}$"},
    },
    "required": ["sum", "unit", "code"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 999},
                "unit": {"type": ["string", "null"], "maxLength": 6},
                "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
            },
            "required": ["a", "unit"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def check_call(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "add":
        jsonschema_rs.validate(ADD["function"]["parameters"], arguments)  # type: ignore[index]
    else:
        assert (call.function.name, arguments) == ("now", {})


def test_json_schema(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(
        model=stack.served_model_name, messages=USER, response_format=FORMAT, n=3, **WILD
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema_rs.validate(SCHEMA, json.loads(choice.message.content))
    assert len({choice.message.content for choice in answer.choices}) > 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("field", "fits"),
    [
        ({"structured_outputs": {"choice": ["yes", "no", "naïve"]}}, "yes|no|naïve"),
        ({"guided_regex": "[a-f]{3}(-[0-9]{2})+?"}, r"[a-f]{3}(-[0-9]{2})+"),
        ({"guided_grammar": 'start: "<" /[xyz]{1,5}/ ">"'}, "<[xyz]{1,5}>"),
    ],
)
def test_other_forms(client: openai.OpenAI, stack: Stack, field: dict[str, Any], fits: str) -> None:
    options = {"model": stack.served_model_name, "extra_body": field, "n": 4}
    chat = client.chat.completions.create(messages=USER, **WILD, **options)
    text = client.completions.create(prompt="Say:", temperature=1.5, seed=3, max_tokens=60, **options)
    for said in (*(choice.message.content for choice in chat.choices), *(choice.text for choice in text.choices)):
        assert re.fullmatch(fits, said), said


@pytest.mark.sampled
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls(client: openai.OpenAI, stack: Stack, choice: Any, stream: bool) -> None:
    options = {"model": stack.served_model_name, "messages": USER, "tools": [ADD, NOW], **WILD}
    once = {} if isinstance(choice, dict) else {"parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(**options, **once, tool_choice=choice) as events:
            answers = [events.get_final_completion().choices[0]]
    else:
        answers = client.chat.completions.create(**options, **once, tool_choice=choice, n=3).choices
    for answer in answers:
        assert answer.finish_reason == "tool_calls"
        assert not answer.message.content
        (call,) = answer.message.tool_calls
        check_call(call)
        if isinstance(choice, dict):
            assert call.function.name == "add"


EDGES: list[dict[str, Any]] = [
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1},
    {"type": "integer", "minimum": 2**64 - 2, "maximum": 2**64 - 1},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "minimum": 10**40, "maximum": 10**40 + 9},
    {
        "type": "object",
        "patternProperties": {"^[ab]$": {"type": "integer"}},
        "additionalProperties": False,
        "minProperties": 2,
    },
    {
        "type": "object",
        "properties": {"score": {"type": "integer", "maximum": 9}},
        "required": ["score"],
        "additionalProperties": False,
        "patternProperties": {"^score$": {"minimum": 0}},
    },
    {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": {"type": "boolean"},
        "required": ["b"],
    },
    {"type": "string", "format": "starts_with", "pattern": "^ab.{0,3}$"},
    {"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True, "minItems": 2},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: json.dumps(edge)[:60])
def test_the_edges_of_schemas(client: openai.OpenAI, stack: Stack, edge: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"v": edge}, "required": ["v"], "additionalProperties": False}
    options: dict[str, Any] = {"model": stack.served_model_name, "messages": USER, **WILD}
    form = {"type": "json_schema", "json_schema": {"name": "edge", "schema": schema}}
    tool = {"type": "function", "function": {"name": "edge", "parameters": schema}}
    answer = client.chat.completions.create(**options, response_format=form, n=2)
    called = client.chat.completions.create(**options, tools=[NOW, tool], tool_choice=FORCED_EDGE)
    texts = [choice.message.content for choice in answer.choices]
    texts += [call.function.arguments for choice in called.choices for call in choice.message.tool_calls]
    assert len(texts) == 3
    for text in texts:
        jsonschema_rs.validate(schema, json.loads(text))


FORCED_EDGE: dict[str, Any] = {"type": "function", "function": {"name": "edge"}}


def test_refusals_name_the_function_the_place_and_the_keyword(client: openai.OpenAI, stack: Stack) -> None:
    parameters = {
        "type": "object",
        "properties": {"values": {"type": "array", "items": {"type": "array", "uniqueItems": True}}},
    }
    tool = {"type": "function", "function": {"name": "set_many", "parameters": parameters}}
    schema = parameters["properties"]["values"]  # type: ignore[index]
    form = {"type": "json_schema", "json_schema": {"name": "many", "schema": schema}}
    options: dict[str, Any] = {"model": stack.served_model_name, "messages": USER}
    with pytest.raises(openai.BadRequestError) as called:
        client.chat.completions.create(**options, tools=[NOW, tool], tool_choice="required")
    with pytest.raises(openai.BadRequestError) as formed:
        client.chat.completions.create(**options, response_format=form)
    assert called.value.param == "tools[1].function.parameters"
    assert "function 'set_many': #/properties/values/items: 'uniqueItems'" in called.value.message
    assert formed.value.param == "response_format.json_schema.schema"
    assert "#/items: 'uniqueItems'" in formed.value.message
    assert "line" not in called.value.message + formed.value.message


def test_calls_of_strict_functions(client: openai.OpenAI, stack: Stack) -> None:
    strict = {"type": "function", "function": ADD["function"] | {"strict": True}}  # type: ignore[operator]
    answer = client.chat.completions.create(
        model=stack.served_model_name, messages=USER, tools=[strict, NOW], n=3, **WILD
    )
    for choice in answer.choices:
        if choice.finish_reason != "length":
            for call in choice.message.tool_calls or ():
                if call.function.name == "add":  # the other one is bound to the form only
                    check_call(call)
                else:
                    assert call.function.name == "now"


def test_a_constrained_answer_behind_reasoning(client: openai.OpenAI, stack: Stack) -> None:
    budget = {"thinking_budget": 12, "chat_template_kwargs": {"enable_thinking": True}}
    for fields, is_call in (({"response_format": FORMAT}, False), ({"tools": [ADD], "tool_choice": "required"}, True)):
        answer = client.chat.completions.create(
            model=stack.served_model_name, messages=USER, n=2, extra_body=budget, **fields, **WILD
        )
        for choice in answer.choices:
            if is_call:
                list(map(check_call, choice.message.tool_calls))
            else:
                jsonschema_rs.validate(SCHEMA, json.loads(choice.message.content))
    free = client.chat.completions.create(
        model=stack.served_model_name, messages=USER, extra_body=budget | {"return_token_ids": True}, **WILD
    )
    closing = client.chat.completions.create(
        model=stack.served_model_name,
        messages=USER,
        extra_body={"thinking_budget": 0, "chat_template_kwargs": {"enable_thinking": True}},
        **WILD,
    )
    assert 0 < free.usage.completion_tokens_details.reasoning_tokens < 12 + 60
    assert closing.usage.completion_tokens_details.reasoning_tokens <= 1
    assert not closing.choices[0].message.model_extra.get("reasoning")


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"guided_regex": "(unclosed"}, "guided_regex"),
        ({"guided_grammar": "no grammar"}, "guided_grammar"),
        ({"guided_json": {"type": "object", "unevaluatedItems": {"not": {}}, "contains": 3}}, "guided_json"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "("}}}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools[0].function.parameters.properties.a",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused(
    client: openai.OpenAI, stack: Stack, field: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=stack.served_model_name, messages=USER, extra_body=field, **WILD)
    assert caught.value.param == param


def test_drawn_tools_are_called_as_they_say(stack: Stack) -> None:
    """Their texts may have the markup of calls in them: what the model writes under the grammar is read as that."""
    chance = random.Random(5)
    assert sum(check_model(draw(chance), stack.url, stack.served_model_name, seed) for seed in range(3)) >= 1
