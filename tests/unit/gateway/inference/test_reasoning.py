"""Thinking on and off, how long, and what of an answer counts as reasoning."""

from __future__ import annotations

import random
from typing import Any

import httpx
import openai
import pytest

from services.common.pb import engine_pb2
from services.gateway.settings import GatewaySettings
from tests.stack import PATIENCE
from tests.unit.gateway.api.base.test_bad_input import CHAT, error_of
from tests.unit.gateway.api.completions.test_chat import USER
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import says

ON = {"chat_template_kwargs": {"enable_thinking": True}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
SETTINGS = GatewaySettings()
CLOSING = f"\n\n{SETTINGS.reasoning_closing}\n</think>"


def ask(running: Running, http: httpx.Client, **fields: Any) -> engine_pb2.GenerateRequest:
    answer = http.post("/v1/chat/completions", json=CHAT | fields)
    assert answer.status_code == 200, answer.text
    return running.engine.requests[-1]


def opens(running: Running, request: engine_pb2.GenerateRequest) -> bool:
    return running.engine.codec.decode(list(request.prompt_token_ids)).endswith("<think>\n")


@pytest.mark.parametrize(
    ("fields", "thinks", "budget"),
    [
        ({}, False, None),
        (ON, True, None),
        (OFF, False, None),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "none"} | OFF, False, None),
        ({"reasoning_effort": "minimal"}, True, SETTINGS.reasoning_budget_minimal),
        ({"reasoning_effort": "low"}, True, SETTINGS.reasoning_budget_low),
        ({"reasoning_effort": "medium"} | ON, True, SETTINGS.reasoning_budget_medium),
        ({"reasoning_effort": "high"}, True, SETTINGS.reasoning_budget_high),
        ({"reasoning_effort": "xhigh"}, True, SETTINGS.reasoning_budget_xhigh),
        ({"thinking_budget": 7}, True, 7),
        ({"thinking_token_budget": 7} | ON, True, 7),
        ({"thinking_budget": 0}, False, None),
        ({"thinking_budget": 0} | ON, True, 0),
    ],
)
def test_budget(running: Running, http: httpx.Client, fields: dict[str, Any], thinks: bool, budget: int | None) -> None:
    request = ask(running, http, **fields)
    assert opens(running, request) is thinks
    assert request.sampling.HasField("thinking") is (budget is not None)
    if budget is None:
        return
    thinking, codec = request.sampling.thinking, running.engine.codec
    assert (thinking.budget, thinking.HasField("budget")) == (budget, True)
    assert thinking.end_token_id == codec.token_id("</think>") == thinking.closing_token_ids[-1]
    assert codec.decode(list(thinking.closing_token_ids)) == (CLOSING if budget else "\n</think>")


def test_budgets_and_closing_are_settings(start: Starter) -> None:
    running = start(reasoning_budget_low=3, reasoning_closing="")
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        thinking = ask(running, http, reasoning_effort="low").sampling.thinking
    assert thinking.budget == 3
    assert running.engine.codec.decode(list(thinking.closing_token_ids)) == "\n</think>"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "none"} | ON, "reasoning_effort"),
        ({"reasoning_effort": "high"} | OFF, "reasoning_effort"),
        ({"thinking_budget": 5} | OFF, "thinking_budget"),
        ({"thinking_token_budget": 5} | OFF, "thinking_token_budget"),
        ({"thinking_budget": 5, "thinking_token_budget": 5}, "thinking_token_budget"),
        ({"thinking_budget": 5, "reasoning_effort": "low"}, "thinking_budget"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"thinking_budget": 2**40}, "thinking_budget"),
        ({"thinking_budget": "many"}, "thinking_budget"),
        ({"reasoning_effort": "maximal"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        # Without a generation prompt nothing opens the reasoning.
        ({"reasoning_effort": "high", "add_generation_prompt": False}, "reasoning_effort"),
        ({"thinking_budget": 5, "add_generation_prompt": False}, "thinking_budget"),
    ],
)
def test_contradictions(running: Running, http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert error_of(http.post("/v1/chat/completions", json=CHAT | fields))["param"] == param
    assert not running.engine.requests


@pytest.mark.sampled
@pytest.mark.parametrize("per_update", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "fields", "count"),
    [
        ("let me see\n</think>\n\nforty two", ON, 11),
        ("né\n</think>yes", ON, 4),
        ("</think>yes", ON, 0),
        ("never ends", ON, 10),
        ("no thinking", {}, 0),
        ("<think>\nhm\n</think>\n\nyes", {}, 4),
        ("spelled </think", ON, 15),
    ],
)
def test_reasoning_tokens_are_exact(
    running: Running, client: openai.OpenAI, text: str, fields: dict[str, Any], count: int, per_update: int
) -> None:
    running.engine.behaviour = says(text, per_update=per_update)
    answer = client.chat.completions.create(model=MODEL, messages=USER, extra_body=fields)
    assert answer.usage.completion_tokens_details.reasoning_tokens == count
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=USER, extra_body=fields, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage == answer.usage


@pytest.mark.parametrize("per_update", [1, 4])
def test_the_token_ends_the_reasoning_its_letters_do_not(
    running: Running, client: openai.OpenAI, per_update: int
) -> None:
    codec = running.engine.codec
    tokens = [*b"say ", *b"</think>", *b" to end", codec.token_id("</think>"), *b"done </think>"]
    running.engine.behaviour = says(tokens, per_update=per_update)
    answer = client.chat.completions.create(model=MODEL, messages=USER, extra_body=ON)
    message = answer.choices[0].message
    assert message.model_extra["reasoning"] == message.model_extra["reasoning_content"] == "say </think> to end"
    assert message.content == "done </think>"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 19


def test_bytes_that_are_no_text_before_the_end_of_the_reasoning(running: Running, client: openai.OpenAI) -> None:
    end = running.engine.codec.token_id("</think>")
    running.engine.behaviour = says([97, 0xF0, 0x9F, end, 98])
    answer = client.chat.completions.create(model=MODEL, messages=USER, extra_body=ON)
    assert answer.choices[0].message.model_extra["reasoning"] == "a\ufffd"
    assert answer.choices[0].message.content == "b"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3


def test_reasoning_streams_under_both_names(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says("ab\n</think>\n\nc")
    with http.stream("POST", "/v1/chat/completions", json=CHAT | ON | {"stream": True}) as answer:
        text = "".join(answer.iter_text())
    assert '"reasoning":"a","reasoning_content":"a"' in text
    assert '"reasoning":"b","reasoning_content":"b"' in text, "also from the template"


def test_reasoning_goes_back_into_the_conversation(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("hm\n</think>\n\nyes")
    first = client.chat.completions.create(model=MODEL, messages=USER, extra_body=ON).choices[0].message
    answer = client.chat.completions.create(model=MODEL, messages=[*USER, first.model_dump(), *USER])
    assert answer.choices[0].message.content == "hm\n</think>\n\nyes", "thinking is off: this is text"


# -- continuing the last message


def continued(running: Running, http: httpx.Client, last: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": MODEL, "messages": [*USER, {"role": "assistant", **last}], "continue_final_message": True}
    answer = http.post("/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    prompt = running.engine.codec.decode(list(running.engine.requests[-1].prompt_token_ids), skip_special=False)
    return prompt, answer.json()["choices"][0]["message"]


def test_the_last_message_is_continued(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says("and more")
    for content in ("It was a dark ", "<b>", "line\n", "x <|im_end|> y", "é", "a\ufdd0b", "<tool"):
        prompt, message = continued(running, http, {"content": content})
        assert prompt.endswith(f"<|im_start|>assistant\n{content}"), repr(prompt)
        assert message["content"] == "and more"
    assert running.engine.requests[-1].prompt_token_ids[-1] == ord("l")
    prompt, _ = continued(
        running, http, {"content": [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]}
    )
    assert prompt.endswith("\ntwo parts")
    prompt, _ = continued(running, http, {"content": "x"}, add_generation_prompt=False)
    assert prompt.endswith("\nx")


def test_an_open_reasoning_is_continued(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says("\nmore\n</think>\n\nyes")
    long = "thinking " * 20
    prompt, message = continued(running, http, {"content": f"<think>\n{long}"}, thinking_budget=9)
    assert prompt.endswith(f"<think>\n{long}")
    assert (message["content"], message["reasoning"]) == ("yes", "\nmore")
    assert running.engine.requests[-1].sampling.thinking.budget == 9
    _, message = continued(running, http, {"content": "<think>\ndone\n</think>\n\nso "})
    assert message == {"role": "assistant", "content": "\nmore\n</think>\n\nyes", "refusal": None}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": USER}, "continue_final_message"),
        (
            {
                "messages": [
                    *USER,
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
                ]
            },
            "continue_final_message",
        ),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs.continue_final_message"),
    ],
)
def test_what_cannot_be_continued(running: Running, http: httpx.Client, change: dict[str, Any], param: str) -> None:
    body = CHAT | {"messages": [*USER, {"role": "assistant", "content": "x"}], "continue_final_message": True}
    assert error_of(http.post("/v1/chat/completions", json=body | change))["param"] == param
    assert not running.engine.requests


def test_without_a_generation_prompt(running: Running, http: httpx.Client) -> None:
    request = ask(running, http, add_generation_prompt=False)
    assert list(request.prompt_token_ids) == running.engine.codec.encode_chat(USER, add_generation_prompt=False)


def test_random_answers_are_split_alike_whole_and_streamed(running: Running, client: openai.OpenAI) -> None:
    chance = random.Random(5)
    for _ in range(12):
        tokens = chance.choices([*b"ab \n<", 0xC3, 0xA9, 261, 262, 263, 264, 257], k=25)
        seen = []
        for per_update, stream in ((25, False), (1, True), (4, True)):
            running.engine.behaviour = says(tokens, per_update=per_update)
            answer = client.chat.completions.create(model=MODEL, messages=USER, extra_body=ON, stream=stream)
            if stream:
                deltas = [chunk.choices[0].delta for chunk in answer]
                reasoning = "".join((delta.model_extra or {}).get("reasoning") or "" for delta in deltas)
                seen.append((reasoning, "".join(delta.content or "" for delta in deltas)))
            else:
                message = answer.choices[0].message
                seen.append((message.model_extra.get("reasoning", ""), message.content))
        assert seen[0] == seen[1] == seen[2], tokens
