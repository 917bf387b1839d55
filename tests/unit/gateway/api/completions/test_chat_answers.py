"""What chat completions answer: as described in OpenAPI, the same streamed and whole, for every kind of content."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.pb import engine_pb2
from services.gateway.protocol.chat_response import ChatCompletion, ChatCompletionChunk
from services.gateway.text.detokenizer import TextAssembler
from tests.unit.gateway.api.base.test_bad_input import CHAT, error_of
from tests.unit.gateway.api.completions.test_chat import CALL, WEATHER
from tests.unit.gateway.conftest import MODEL, Running
from tests.unit.gateway.fake_engine import says
from tests.unit.gateway.text.test_tool_corpus import Slices

NOW = {"type": "function", "function": {"name": "now"}}
THINKING = "let me see\n</think>\n\n" + CALL + "\n" + "<tool_call>\n<function=now>\n</function>\n</tool_call>\nbye"
ON = {"chat_template_kwargs": {"enable_thinking": True}, "tools": [WEATHER, NOW]}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    data = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


def whole_of(chunks: Sequence[dict[str, Any]], count: int = 1) -> list[dict[str, Any]]:
    """The choices that a client would put together."""
    choices = [
        {"message": {"content": "", "reasoning": "", "calls": []}, "logprobs": [], "ids": [], "reason": None}
        for _ in range(count)
    ]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        for part in chunk["choices"]:
            choice, delta = choices[part["index"]], part["delta"]
            assert choice["reason"] is None, "nothing follows the end"
            message = choice["message"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"])
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"]["arguments"]
            choice["logprobs"] += (part["logprobs"] or {"content": []})["content"]
            choice["ids"] += part.get("token_ids", ())
            choice["reason"] = part["finish_reason"]
    return choices


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of an answer in one piece, in the same form."""
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return {
        "message": {
            "content": message["content"] or "",
            "reasoning": message.get("reasoning", ""),
            "calls": calls,
        },
        "logprobs": (choice["logprobs"] or {"content": []})["content"],
        "ids": choice.get("token_ids", []),
        "reason": choice["finish_reason"],
    }


@pytest.mark.parametrize("per_update", [1, 7, 400])
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("Hello, wörld 🙂", {}),
        (THINKING, ON),
        (CALL, {"tools": [WEATHER]}),
        ("<tool_call>\n<function=weather>\nbroken", {"tools": [WEATHER]}),
        (THINKING, ON | {"stop": ["Paris"]}),
        (THINKING, ON | {"max_tokens": 60}),
        (THINKING, ON | {"parallel_tool_calls": False}),
    ],
)
def test_streamed_is_whole(
    running: Running, http: httpx.Client, text: str, fields: dict[str, Any], per_update: int
) -> None:
    running.engine.behaviour = says(text, per_update=per_update)
    body = CHAT | fields | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    ChatCompletion.model_validate(answer)
    expected = plain(answer["choices"][0])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(http.post("/v1/chat/completions", json=body | options))
    assert chunks[-1]["usage"] == answer["usage"]
    found = whole_of(chunks)[0]
    assert found == expected
    assert len(expected["ids"]) == answer["usage"]["completion_tokens"]
    if fields.get("parallel_tool_calls") is False:
        assert running.engine.codec.decode(expected["ids"]) == text[: text.index("</tool_call>") + 12]
    if not {"stop", "max_tokens"} & fields.keys() and per_update == 1:
        assert b"".join(bytes(entry["bytes"]) for entry in expected["logprobs"]).decode() in text


def test_every_token_of_reasoning_and_calls_has_its_log_probability(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says(THINKING)
    answer = http.post("/v1/chat/completions", json=CHAT | ON | {"logprobs": True, "top_logprobs": 3}).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == THINKING
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    assert len(entries) == answer["usage"]["completion_tokens"] - 1, "all but the end token"
    assert answer["choices"][0]["message"]["content"] == "Sure.bye"
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 2


def test_choices_interleave(running: Running, http: httpx.Client) -> None:
    """Each choice says something else at its own speed; a stream carries them side by side."""
    texts = [THINKING, "short\n</think>x", "hm\n</think>\n\n" + CALL + CALL]

    async def behave(engine: Any, request: engine_pb2.GenerateRequest, send: Any) -> None:
        index = int(request.request_id.rpartition(":")[2])
        await says(texts[index], per_update=1 + index, pause=0.001)(engine, request, send)

    running.engine.behaviour = behave
    body = CHAT | ON | {"n": 3}
    answer = http.post("/v1/chat/completions", json=body).json()
    chunks = events(http.post("/v1/chat/completions", json=body | {"stream": True}))
    assert whole_of(chunks, 3) == [plain(choice) for choice in answer["choices"]]
    order = [part["index"] for chunk in chunks for part in chunk["choices"]]
    assert len(list(itertools.groupby(order))) > 3, "side by side"
    roles = [part["delta"].get("role") for chunk in chunks for part in chunk["choices"]]
    assert roles.count("assistant") == 3
    assert len({part["completion_id"] for chunk in chunks for part in chunk["choices"]}) == 3


def test_usage_in_every_chunk(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says(THINKING)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(http.post("/v1/chat/completions", json=CHAT | ON | {"stream": True, "stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < 20, "what it is by then, not by the end"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == chunks[-2]["usage"]
    reasoning = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert reasoning == sorted(reasoning)
    assert reasoning[-1] == 11
    body = {"model": MODEL, "prompt": "x", "stream": True, "stream_options": options}
    texts = events(http.post("/v1/completions", json=body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in texts]
    assert counts == sorted(counts)
    assert counts[0] < 20
    assert texts[-1]["usage"] == texts[-2]["usage"]


def test_usage_in_every_chunk_needs_usage(http: httpx.Client) -> None:
    body = CHAT | {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    error = error_of(http.post("/v1/chat/completions", json=body))
    assert error["param"] == "stream_options.continuous_usage_stats"


def test_metadata_comes_back(http: httpx.Client) -> None:
    metadata = {"k" * 64: "v" * 512, "é": ""}
    assert http.post("/v1/chat/completions", json=CHAT | {"metadata": metadata}).json()["metadata"] == metadata
    assert "metadata" not in http.post("/v1/chat/completions", json=CHAT | {"metadata": {}}).json()
    chunks = events(http.post("/v1/chat/completions", json=CHAT | {"metadata": metadata, "stream": True}))
    assert [chunk["metadata"] for chunk in chunks if "metadata" in chunk] == [metadata], "once, first"
    assert "metadata" in chunks[0]


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
        ({"metadata": {"k" * 65: ""}}, "metadata." + "k" * 65, "64"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "512"),
        ({"metadata": {"k": 3}}, "metadata.k", "string"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction", "leave it out"),
        ({"function_call": "auto"}, "function_call", "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions", "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type", "text"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0].type", "text"),
        ({"max_tokens": 5, "max_completion_tokens": 6, "tools": [NOW]}, "max_tokens", "send one"),
    ],
)
def test_refused(http: httpx.Client, change: dict[str, Any], param: str, said: str) -> None:
    error = error_of(http.post("/v1/chat/completions", json=CHAT | change))
    assert error["param"] == param
    assert said in error["message"]


def test_parts_of_a_long_call_arrive_while_it_is_written(running: Running, http: httpx.Client) -> None:
    code = "print('x')\n" * 12
    call = f"<tool_call>\n<function=weather>\n<parameter=city>\n{code}\n</parameter>\n</function>\n</tool_call>"
    running.engine.behaviour = says(call)
    chunks = events(http.post("/v1/chat/completions", json=CHAT | {"tools": [WEATHER], "stream": True}))
    found = whole_of(chunks)[0]
    assert json.loads(found["message"]["calls"][0][1]) == {"city": code}
    assert found["reason"] == "tool_calls"
    parts = sum("tool_calls" in part["delta"] for chunk in chunks for part in chunk["choices"])
    assert parts > 10, "not when the parameter is complete"


# -- stop strings


def reference(parts: list[str], stops: list[str], min_tokens: int) -> str:
    """Character by character: the first stop string that is complete ends the text where it begins, of several at once
    the longest; what is complete within the first tokens does not count."""
    text, counts_from = "", 0
    for number, part in enumerate(parts, start=1):
        before, text = len(text), text + part
        if number <= min_tokens:
            counts_from = len(text)
            continue
        for end in range(max(before, counts_from) + 1, len(text) + 1):
            found = [len(stop) for stop in stops if text[:end].endswith(stop)]
            if found:
                return text[: end - max(found)]
    return text


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    parts=st.lists(st.text(alphabet="abé🙂\n", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abé🙂\n", min_size=1, max_size=5), min_size=1, max_size=4),
    group=st.integers(1, 5),
    min_tokens=st.integers(0, 4),
)
def test_stop_strings_over_tokens_and_updates(parts: list[str], stops: list[str], group: int, min_tokens: int) -> None:
    raw = "".join(parts).encode()
    edges = [0, *itertools.accumulate(len(part.encode()) for part in parts)]
    tokens = [slice(start, end) for start, end in itertools.pairwise(edges)]
    assembler = TextAssembler(Slices(raw), stop=stops, min_tokens=min_tokens)  # type: ignore[arg-type]
    shown = ""
    expected = reference(parts, stops, min_tokens)
    for start in range(0, len(tokens), group):
        for token in tokens[start : start + group]:
            assembler.push(token)  # type: ignore[arg-type]
        shown += assembler.take().text
        assert expected.startswith(shown), "nothing of a stop string is shown"
    assert shown + assembler.take(final=True).text == expected
