"""The requests that coding agents and agent frameworks send by themselves, against the whole system: instructions
anywhere, edits of the context, tools in namespaces, hosted tools among others, items by their ids.

The agents themselves run elsewhere; here every kind of request has its right answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.stack import PATIENCE, Stack

RUN = {
    "type": "function",
    "name": "run",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string", "maxLength": 20}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
HELPERS = {"type": "namespace", "name": "helpers", "description": "Helpers.", "tools": [RUN | {"name": "start"}]}
CODEX: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is 12 plus 7?"}]},
    ],
    "tools": [RUN, HELPERS, {"type": "web_search"}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
}
CLAUDE_CODE: dict[str, Any] = {
    "max_tokens": 48,
    "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral", "scope": "global"}}],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is 12 plus 7?", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "system", "content": "Helpers: none."},
    ],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def claude(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model(stack: Stack) -> str:
    return stack.served_model_name


def rendered(stack: Stack, messages: list[dict[str, Any]]) -> str:
    """The prompt of a conversation, as the served model's own template has it."""
    tokens = (
        httpx.post(f"{stack.url}/tokenize", json={"messages": messages}, timeout=PATIENCE)
        .raise_for_status()
        .json()["tokens"]
    )
    answer = httpx.post(f"{stack.url}/detokenize", json={"tokens": tokens}, timeout=PATIENCE).raise_for_status()
    return str(answer.json()["prompt"])


def test_codex(client: openai.OpenAI, model: str) -> None:
    extra: dict[str, Any] = {"client_metadata": {"a": "b"}, "access_programs": {"cyber": "standard"}}
    raw = client.responses.with_raw_response.create(model=model, **CODEX, extra_body=extra)
    answer = raw.parse()
    assert answer.status == "completed"
    assert raw.headers["x-temper-left-out-tools"] == "web_search"
    assert answer.model_extra is not None
    assert answer.model_extra["left_out_tools"] == ["web_search"]
    assert [tool.type for tool in answer.tools] == ["function", "namespace"]
    # One of the namespace, forced, run, and its result back.
    choice: Any = {"type": "function", "name": "start"}
    with client.responses.stream(model=model, **CODEX | {"tool_choice": choice}, extra_body=extra) as stream:
        for event in stream:
            if event.type == "response.output_item.done":
                assert event.item.type == "function_call"
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert (call.name, call.namespace) == ("start", "helpers")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is 19."}
    told: Any = [*CODEX["input"], call, result]
    assert client.responses.create(model=model, **CODEX | {"input": told}).status == "completed"


@pytest.mark.thorough
def test_custom_tools(client: openai.OpenAI, model: str) -> None:
    language = {"type": "grammar", "syntax": "regex", "definition": r"\*\*\* [a-c]{3}\n\+[x-z]{2}"}
    tool: Any = {"type": "custom", "name": "patch", "description": "Changes a file.", "format": language}
    choice: Any = {"type": "custom", "name": "patch"}
    asked = client.responses.create(model=model, input="Patch it.", tools=[tool], tool_choice=choice, temperature=1.5)
    (call,) = asked.output
    assert call.type == "custom_tool_call"
    head, line = call.input.split("\n")
    assert set(head.removeprefix("*** ")) <= set("abc")
    assert set(line) <= set("+xyz")
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    told = client.responses.create(model=model, input=[result], tools=[tool], previous_response_id=asked.id)
    assert told.status == "completed"


@pytest.mark.thorough
def test_two_turns_by_references(client: openai.OpenAI, model: str) -> None:
    """What the AI SDK's provider sends for a second turn."""
    first = client.responses.create(model=model, input="What is 12 plus 7?", temperature=0)
    turns: Any = [
        {"role": "user", "content": "What is 12 plus 7?"},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "What is 1 plus 2?"},
    ]
    by_id = client.responses.create(model=model, input=turns, temperature=0)
    turns[1] = {"role": "assistant", "content": first.output_text}
    whole = client.responses.create(model=model, input=turns, temperature=0)
    assert (by_id.output_text, by_id.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    turns[1] = {"id": "msg_" + "0" * 48}
    with pytest.raises(openai.NotFoundError, match="msg_0000"):
        client.responses.create(model=model, input=turns)


def test_claude_code(stack: Stack, claude: anthropic.Anthropic, model: str) -> None:
    httpx.head(stack.url, timeout=PATIENCE)  # whatever the answer is
    betas = ["claude-code-20250219", "context-management-2025-06-27", "frobnicate-2026-01-01"]
    message = claude.beta.messages.create(model=model, **CLAUDE_CODE, thinking={"type": "adaptive"}, betas=betas)
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.context_management is not None
    assert message.context_management.applied_edits == []
    plain: Any = {**CLAUDE_CODE, "thinking": {"type": "disabled"}}
    with claude.beta.messages.stream(model=model, **plain, betas=betas) as stream:
        whole = stream.get_final_message()
    read = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What is 12 plus 7?"},
        {"role": "system", "content": "Helpers: none."},
    ]
    tokens = httpx.post(f"{stack.url}/tokenize", json={"messages": read}, timeout=PATIENCE).json()["count"]
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == tokens


def test_a_tool_loop_with_edits(claude: anthropic.Anthropic, model: str) -> None:
    tool: Any = {"name": "run", "input_schema": RUN["parameters"]}
    turns: list[Any] = [{"role": "user", "content": "Run them."}]
    for number in range(4):
        use = {"type": "tool_use", "id": f"t{number}", "name": "run", "input": {"cmd": "ls"}}
        thought = {"type": "thinking", "thinking": "A long thought about it.", "signature": "s"}
        turns.append({"role": "assistant", "content": [thought, use]})
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": "file " * 40}
        turns.append({"role": "user", "content": [result]})
    edits: Any = {
        "edits": [
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "input_tokens", "value": 200},
                "keep": {"type": "tool_uses", "value": 1},
            },
        ]
    }
    body: Any = {"model": model, "max_tokens": 16, "messages": turns, "tools": [tool]}
    whole = claude.beta.messages.create(**body)
    shorter = claude.beta.messages.create(**body, context_management=edits)
    assert shorter.context_management is not None
    thinking, uses = shorter.context_management.applied_edits
    assert thinking.type == "clear_thinking_20251015"
    assert thinking.cleared_thinking_turns == 3
    assert uses.type == "clear_tool_uses_20250919"
    assert uses.cleared_tool_uses == 3
    read = [message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) for message in (whole, shorter)]
    assert read[0] - read[1] == thinking.cleared_input_tokens + uses.cleared_input_tokens > 0
    counted = claude.beta.messages.count_tokens(model=model, messages=turns, tools=[tool], context_management=edits)
    assert counted.context_management is not None
    assert (counted.input_tokens, counted.context_management.original_input_tokens) == (read[1], read[0])


@pytest.mark.thorough
def test_instructions_anywhere(stack: Stack, client: openai.OpenAI, model: str) -> None:
    leading: Any = [
        {"role": "system", "content": "You are brief."},
        {"role": "developer", "content": "Today is Monday."},
        {"role": "user", "content": "What is 12 plus 7?"},
    ]
    assert client.chat.completions.create(model=model, messages=leading, temperature=0).choices[0].message.content
    assert "system\nYou are brief.\n\nToday is Monday.<|im_end|>" in rendered(stack, leading)
    later = [leading[2], {"role": "assistant", "content": "19"}, leading[0], leading[2], leading[1]]
    mark = "<system-reminder>\n{}\n</system-reminder>".format
    turn = f"user\n{mark('You are brief.')}\n\nWhat is 12 plus 7?\n\n{mark('Today is Monday.')}<|im_end|>"
    assert turn in rendered(stack, later)
    assert client.chat.completions.create(model=model, messages=later, max_tokens=8).choices


def test_a_conversation_that_is_too_long(stack: Stack, client: openai.OpenAI, model: str) -> None:
    turns: Any = []
    for number in range(40):
        turns.append({"role": "user", "content": f"What is {number} plus 7?"})
        turns.append({"role": "assistant", "content": str(number + 7)})
    turns.append({"role": "user", "content": "What is 12 plus 7?"})
    counted = httpx.post(f"{stack.url}/tokenize", json={"messages": turns}, timeout=PATIENCE).json()
    room = counted["count"] // 2
    body: Any = {"model": model, "input": turns, "max_output_tokens": counted["max_model_len"] - room}
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(**body)
    shown = httpx.post(
        f"{stack.url}/v1/responses/input_tokens", json={**body, "truncation": "auto"}, timeout=PATIENCE
    ).json()
    one_turn = counted["count"] // 40
    assert room - one_turn < shown["input_tokens"] <= room
