"""Stops against the whole system: they end what a client sees of an answer, and what they end can be scored at once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.stack import Stack

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM = [{"role": "user", "content": "What is 3 + 4?"}]
WHO = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        yield client


@pytest.fixture
def model(stack: Stack) -> str:
    return stack.served_model_name


def post(http: httpx.Client, route: str, **body: Any) -> Any:
    answer = http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def tools(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA} | function}]


ENUM = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}, "required": ["city"]}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "change",
    [{}, {"tool_choice": "required"}, {"tools": tools(strict=True, parameters=ENUM)}, {"parallel_tool_calls": False}],
)
def test_a_stop_inside_an_argument_breaks_the_call(http: httpx.Client, model: str, change: dict[str, Any]) -> None:
    body = {"model": model, "messages": WEATHER, "temperature": 0, "max_tokens": 100, "tools": tools()} | change

    def answered(**stops: Any) -> tuple[str, list[str]]:
        choice = post(http, "/v1/chat/completions", **body, **stops)["choices"][0]
        assert choice["message"]["content"] is None
        return choice["finish_reason"], [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]

    whole = "tool_calls", ['{"city": "Paris"}']
    assert answered() == whole
    assert answered(stop=["\n"]) == whole
    assert answered(stop=["parameter", "_weather", "<tool_call>", "city"]) == whole
    assert answered(stop=["ris"]) == ("stop", ['{"city": "Pa'])
    token = post(http, "/tokenize", model=model, prompt="aris")["tokens"][0]
    assert answered(stop_token_ids=[token]) == ("stop", ['{"city": "P'])


def test_reasoning_has_no_stops(http: httpx.Client, model: str) -> None:
    body = {"model": model, "messages": SUM, "temperature": 0, "max_tokens": 200}
    body["chat_template_kwargs"] = {"enable_thinking": True}
    plain = post(http, "/v1/chat/completions", **body)["choices"][0]
    reasoning, content = plain["message"]["reasoning"], plain["message"]["content"]
    assert "," in reasoning
    assert content == "7"
    comma = post(http, "/tokenize", model=model, prompt=",")["tokens"]
    for stops in ({"stop": [","]}, {"stop": ["\n", "\n\n", "</think>"]}, {"stop_token_ids": comma}):
        found = post(http, "/v1/chat/completions", **body, **stops)["choices"][0]
        assert (found["message"]["reasoning"], found["message"]["content"]) == (reasoning, content), stops
        assert found["finish_reason"] == "stop"


@pytest.mark.sampled
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize(
    "change",
    [
        {"messages": WHO, "stop": ["am"]},
        {"messages": WEATHER, "tools": tools(), "parallel_tool_calls": False},
        {"messages": WEATHER, "tools": tools(), "stop": ["ris"]},
    ],
)
def test_what_was_ended_early_can_be_scored_at_once(
    http: httpx.Client, model: str, change: dict[str, Any], n: int, stream: bool
) -> None:
    answer = post(http, "/v1/chat/completions", model=model, max_tokens=60, n=n, stream=stream, **change)
    chunks = answer if stream else [answer]
    ids = {choice["completion_id"] for chunk in chunks for choice in chunk["choices"]}
    assert len(ids) == n
    assert scored(http, ids) == "known"


@pytest.mark.parametrize("stream", [False, True])
def test_so_can_those_of_the_other_apis(http: httpx.Client, model: str, stream: bool) -> None:
    body = {"model": model, "max_tokens": 60, "messages": WHO, "stop_sequences": ["am"], "stream": stream}
    message = post(http, "/v1/messages", **body)
    if stream:
        message = message[0]["message"]
    assert scored(http, [message["id"]]) == "known"
    ask = {"model": model, "input": "Who are you?", "stop": ["am"], "store": False, "stream": stream}
    response = post(http, "/v1/responses", **ask)
    if stream:
        response = response[-1]["response"]
    assert scored(http, [response["completion_id"]]) == "known"
    text = post(http, "/v1/completions", model=model, prompt="1 2 3", max_tokens=40, stop=["3", "4"], stream=stream)
    first = text[0] if stream else text
    assert scored(http, [first["choices"][0]["completion_id"]]) == "known"


def scored(http: httpx.Client, ids: Any) -> str:
    """Equal rewards teach nothing, which is said of rollouts that are known."""
    rollouts = [{"completion_id": one, "reward": 1.0} for one in ids]
    answer = http.post("/v1/train/grpo", json={"adapter": "stops", "attach": False, "rollouts": rollouts})
    assert answer.status_code in (400, 404), answer.text
    return "known" if answer.status_code == 400 else "unknown"


def test_the_tokens_that_are_trained_on_are_those_that_were_answered(http: httpx.Client, model: str) -> None:
    body = {"messages": WHO, "max_tokens": 60, "n": 4, "stop": ["it", "serves"], "return_token_ids": True}
    choices = post(http, "/v1/chat/completions", model=model, temperature=1.0, seed=5, **body)["choices"]
    job = http.post(
        "/v1/train/grpo",
        json={
            "adapter": "stops",
            "attach": False,
            "learning_rate": 1e-9,
            "rollouts": [
                {"completion_id": choice["completion_id"], "reward": float(number)}
                for number, choice in enumerate(choices)
            ],
        },
    )
    assert job.status_code == 202, job.text
    deadline = time.monotonic() + 60
    while (told := http.get(f"/v1/train/jobs/{job.json()['id']}").json())["state"] not in ("succeeded", "failed"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert told["state"] == "succeeded", told
    assert told["metrics"]["tokens"] == sum(len(choice["token_ids"]) for choice in choices)
