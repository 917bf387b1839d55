"""What agents send to /v1/messages beside the plain form: instructions anywhere, edits of the context, hosted tools,
and fields of their own."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types.beta import BetaMessage, BetaMessageTokensCount, BetaRawMessageDeltaEvent

from services.gateway.api.messages.to_chat import CLEARED
from services.gateway.protocol.messages.response import MessageAnswer, TokenCount
from tests.unit.gateway.api.messages.test_messages import BODY, ROUTE, USER, WEATHER, events_of
from tests.unit.gateway.conftest import MODEL, Running

EPHEMERAL = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8, "cache_control": {"type": "ephemeral"}}
THINKING = "clear_thinking_20251015"
TOOL_USES = "clear_tool_uses_20250919"


@pytest.fixture
def running(roomy: Running) -> Running:
    return roomy


def message(http: httpx.Client, **change: Any) -> dict[str, Any]:
    answer = http.post(f"{ROUTE}?beta=true", json=BODY | change, headers={"anthropic-beta": "frobnicate-2026-01-01"})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    MessageAnswer.model_validate(body)
    BetaMessage.model_validate(body)
    return body


def prompt(running: Running) -> str:
    """What the model read last."""
    return running.engine.codec.decode(list(running.engine.requests[-1].prompt_token_ids), skip_special=False)


def test_claude_code(running: Running, http: httpx.Client) -> None:
    """The fields that Claude Code sends with every request."""
    body = {
        "model": MODEL,
        "max_tokens": 100,
        "stream": True,
        "system": [
            {"type": "text", "text": "You are a coding agent.", "cache_control": EPHEMERAL},
            {"type": "text", "text": "Be short.", "cache_control": EPHEMERAL},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is 3 + 4?", "cache_control": EPHEMERAL}]},
            {"role": "system", "content": [{"type": "text", "text": "Helpers: none.", "cache_control": EPHEMERAL}]},
        ],
        "tools": [
            WEATHER | {"cache_control": EPHEMERAL, "eager_input_streaming": True, "defer_loading": True},
            WEB,
            WEATHER | {"name": "mcp__" + "x" * 123, "allowed_callers": ["direct", "code_execution_20260120"]},
        ],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": THINKING, "keep": "all"}]},
        "output_config": {"effort": "max", "task_budget": {"type": "tokens", "total": 1000}},
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "inference_geo": "us",
        "speed": "standard",
        "diagnostics": {"previous_message_id": None},
        "fallbacks": "default",
        "betas": ["context-management-2025-06-27"],
    }
    headers = {"anthropic-beta": "claude-code-20250219,mid-conversation-system-2026-04-07,frobnicate"}
    answer = http.post(f"{ROUTE}?beta=true", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-temper-left-out-tools"] == "web_search_20250305"
    start, *_, delta, _ = events_of(answer)
    assert start["message"]["left_out_tools"] == ["web_search_20250305"]
    assert start["message"]["context_management"] == delta["context_management"] == {"applied_edits": []}
    read = prompt(running)
    assert "<|im_start|>system\nYou are a coding agent.\nBe short.<|im_end|>" in read
    told = "What is 3 + 4?\n\n<system-reminder>\nHelpers: none.\n</system-reminder>"
    assert f"<|im_start|>user\n{told}<|im_end|>" in read
    assert "web_search" not in read


@pytest.mark.parametrize(
    ("messages", "read"),
    [
        # behind the user's turn, leading, in the middle, last
        ([*USER, "S"], "user\nhi\n\n[S]"),
        (["S", *USER], "system\nS|user\nhi"),
        (["S", "T", *USER], "system\nS\nT|user\nhi"),
        ([*USER, {"role": "assistant", "content": "a"}, "S", *USER], "user\nhi|assistant\na|user\n[S]\n\nhi"),
        ([*USER, {"role": "assistant", "content": "a"}, "S"], "user\nhi|assistant\na|user\n[S]"),
        ([*USER, "S", {"role": "assistant", "content": "a"}, *USER], "user\nhi\n\n[S]|assistant\na|user\nhi"),
    ],
)
def test_instructions_anywhere(running: Running, http: httpx.Client, messages: list[Any], read: str) -> None:
    turns = [{"role": "system", "content": turn} if isinstance(turn, str) else turn for turn in messages]
    message(http, messages=turns)
    for turn in read.split("|"):
        turn = turn.replace("[S]", "<system-reminder>\nS\n</system-reminder>")
        assert f"<|im_start|>{turn}<|im_end|>\n" in prompt(running)
    assert prompt(running).count("<|im_start|>") == read.count("|") + 2
    counted = http.post(f"{ROUTE}/count_tokens", json={"model": MODEL, "messages": turns})
    assert counted.json() == {"input_tokens": len(running.engine.requests[-1].prompt_token_ids)}


def test_instructions_between_results(running: Running, http: httpx.Client) -> None:
    calls = [{"type": "tool_use", "id": name, "name": "weather", "input": {"city": name}} for name in ("a", "b")]
    first, second = ({"role": "user", "content": [result(name, f"is {name}")]} for name in ("a", "b"))
    turns = [
        *USER,
        {"role": "assistant", "content": calls},
        first,
        {"role": "system", "content": "S"},
        second,
        {"role": "system", "content": "T"},
    ]
    message(http, messages=turns, tools=[WEATHER])
    mark = "<system-reminder>\n{}\n</system-reminder>".format
    read = f"tool\nis a\n\n{mark('S')}<|im_end|>\n<|im_start|>tool\nis b\n\n{mark('T')}<|im_end|>"
    assert read in prompt(running)


@pytest.mark.parametrize("stream", [False, True])
def test_hosted_tools(running: Running, claude: anthropic.Anthropic, stream: bool) -> None:
    alone: Any = [{"type": "web_search_20260318", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]: tools of type 'web_search_20260318'"):
        claude.messages.create(**BODY, tools=alone, stream=stream)
    with pytest.raises(anthropic.BadRequestError, match="names 'bash', a tool of type 'bash_20250124'"):
        claude.messages.create(**BODY, tools=[WEATHER, *alone], tool_choice={"type": "tool", "name": "bash"})
    raw = claude.messages.with_raw_response.create(**BODY, tools=[*alone, WEATHER], tool_choice={"type": "any"})
    assert raw.headers["x-temper-left-out-tools"] == "web_search_20260318, bash_20250124"
    assert raw.parse().model_extra == {
        "adapter": None,
        "left_out_tools": ["web_search_20260318", "bash_20250124"],
    }
    # A schema that is refused is named by its place among all.
    broken = WEATHER | {"input_schema": {"type": "object", "oneOf": []}, "strict": True}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[2\]\.input_schema"):
        claude.messages.create(**BODY, tools=[*alone, broken])


def test_examples_of_inputs_are_read(running: Running, http: httpx.Client) -> None:
    message(http, tools=[WEATHER | {"input_examples": [{"city": "Oslo"}, {"city": "Rom", "days": 3}]}])
    told = (
        'tells the weather\\n\\nExamples of its input:\\n{\\"city\\":\\"Oslo\\"}\\n{\\"city\\":\\"Rom\\",\\"days\\":3}'
    )
    assert told in prompt(running)


def test_the_older_name_of_the_form(running: Running, http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    message(http, output_format={"type": "json_schema", "schema": schema}, output_config={"effort": "low"})
    assert '"integer"' in running.engine.requests[-1].sampling.constraint.json_schema


# -- context_management


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": "s"}


def loop(*names: str) -> list[dict[str, Any]]:
    """A user's question and a call of each tool with its result; each call was thought about."""
    turns: list[dict[str, Any]] = list(USER)
    for number, name in enumerate(names):
        call = {"type": "tool_use", "id": f"t{number}", "name": name, "input": {"city": f"in{number}"}}
        turns.append({"role": "assistant", "content": [thought(f"thought{number}"), call]})
        turns.append({"role": "user", "content": [result(f"t{number}", f"result{number} " + "x" * 20)]})
    return turns


TOOLS = [WEATHER, WEATHER | {"name": "memory"}]


def managed(http: httpx.Client, turns: list[dict[str, Any]], *edits: dict[str, Any]) -> list[dict[str, Any]]:
    """The edits that were applied, the same in every form of the answer, and in the count."""
    change = {"messages": turns, "tools": TOOLS, "context_management": {"edits": list(edits)}}
    plain = message(http, **change)
    *_, delta, _ = events_of(http.post(ROUTE, json=BODY | change | {"stream": True}))
    BetaRawMessageDeltaEvent.model_validate(delta)
    assert delta["context_management"] == plain["context_management"]
    counted = http.post(f"{ROUTE}/count_tokens", json={"model": MODEL, **change}).json()
    TokenCount.model_validate(counted)
    BetaMessageTokensCount.model_validate(counted)
    applied: list[dict[str, Any]] = plain["context_management"]["applied_edits"]
    assert counted["input_tokens"] == plain["usage"]["input_tokens"]
    saved = sum(edit["cleared_input_tokens"] for edit in applied)
    assert counted["context_management"]["original_input_tokens"] == counted["input_tokens"] + saved
    return applied


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({}, [2]),
        ({"keep": {"type": "thinking_turns", "value": 1}}, [2]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, [1, 2]),
        ({"keep": {"type": "thinking_turns", "value": 3}}, [0, 1, 2]),
        ({"keep": {"type": "thinking_turns", "value": 9}}, [0, 1, 2]),
        ({"keep": "all"}, [0, 1, 2]),
        ({"keep": {"type": "all"}}, [0, 1, 2]),
    ],
)
def test_thinking_is_cleared(running: Running, http: httpx.Client, keep: Any, left: list[int]) -> None:
    applied = managed(http, loop("weather", "weather", "weather"), {"type": THINKING, **keep})
    read = prompt(running)
    assert [number for number in range(3) if f"<think>thought{number}</think>" in read] == left
    cleared = 3 - len(left)
    # "thought0" and the two tags, of this tokenizer's bytes and tokens.
    right = {"type": THINKING, "cleared_thinking_turns": cleared, "cleared_input_tokens": cleared * 10}
    assert applied == ([right] if cleared else [])
    assert all(f"result{number}" in read for number in range(3))


@pytest.mark.parametrize(
    ("edit", "left"),
    [
        ({}, [0, 1, 2, 3, 4]),  # 100,000 tokens are not reached
        ({"trigger": {"type": "tool_uses", "value": 5}}, [0, 1, 2, 3, 4]),
        ({"trigger": {"type": "tool_uses", "value": 4}}, [2, 3, 4]),
        ({"trigger": {"type": "tool_uses", "value": 4}, "keep": {"type": "tool_uses", "value": 1}}, [4]),
        ({"trigger": {"type": "tool_uses", "value": 4}, "keep": {"type": "tool_uses", "value": 0}}, []),
        ({"trigger": {"type": "tool_uses", "value": 4}, "keep": {"type": "tool_uses", "value": 5}}, [0, 1, 2, 3, 4]),
        ({"trigger": {"type": "input_tokens", "value": 100}}, [2, 3, 4]),
        ({"trigger": {"type": "input_tokens", "value": 10_000}}, [0, 1, 2, 3, 4]),
        ({"trigger": {"type": "input_tokens", "value": 100}, "exclude_tools": ["memory"]}, [1, 2, 3, 4]),
        (
            {
                "trigger": {"type": "input_tokens", "value": 100},
                "clear_at_least": {"type": "input_tokens", "value": 10_000},
            },
            [0, 1, 2, 3, 4],
        ),
    ],
)
def test_results_are_cleared(running: Running, http: httpx.Client, edit: Any, left: list[int]) -> None:
    turns = loop("weather", "memory", "weather", "weather", "weather")
    applied = managed(http, turns, {"type": TOOL_USES, **edit})
    read = prompt(running)
    assert [number for number in range(5) if f"result{number}" in read] == left
    assert read.count(f"tool\n{CLEARED}<|im_end|>") == 5 - len(left)
    assert all(f'"in{number}"' in read for number in range(5)), "what the calls said stays"
    assert [entry["cleared_tool_uses"] for entry in applied] == ([5 - len(left)] if len(left) < 5 else [])


@pytest.mark.parametrize(
    ("inputs", "left"), [(True, [2, 3]), (["memory"], [0, 2, 3]), ([], [0, 1, 2, 3]), (False, [0, 1, 2, 3])]
)
def test_inputs_are_cleared(running: Running, http: httpx.Client, inputs: Any, left: list[int]) -> None:
    edit = {
        "type": TOOL_USES,
        "trigger": {"type": "tool_uses", "value": 1},
        "keep": {"type": "tool_uses", "value": 2},
        "clear_tool_inputs": inputs,
    }
    managed(http, loop("weather", "memory", "weather", "weather"), edit)
    read = prompt(running)
    assert [number for number in range(4) if f'"in{number}"' in read] == left
    assert [number for number in range(4) if f"result{number}" in read] == [2, 3]


def test_edits_one_after_the_other(running: Running, http: httpx.Client) -> None:
    edits = [
        {"type": THINKING},
        {"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": 0}, "keep": {"type": "tool_uses", "value": 1}},
    ]
    thinking, uses = managed(http, loop("weather", "weather"), *edits)
    assert (thinking["cleared_thinking_turns"], uses["cleared_tool_uses"]) == (1, 1)
    assert managed(http, loop("weather", "weather")) == []


def test_the_clients_own_conversation_stays(running: Running, http: httpx.Client) -> None:
    """The longer conversation of the next request is edited anew."""
    turns = loop("weather", "weather", "weather")
    edit = {"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": 1}, "keep": {"type": "tool_uses", "value": 1}}
    assert managed(http, turns, edit)[0]["cleared_tool_uses"] == 2
    message(http, messages=turns, tools=TOOLS)
    assert "result0" in prompt(running)
