"""Stop strings and stop tokens over HTTP: in every API, streamed and whole, whatever the updates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from services.gateway.engines import request_group as exchange
from services.gateway.protocol.chat_response import ChatCompletion
from tests.stack import PATIENCE
from tests.unit.gateway.api.base.test_bad_input import CHAT
from tests.unit.gateway.api.completions.test_chat_answers import events, plain, whole_of
from tests.unit.gateway.api.messages import test_messages as messages_api
from tests.unit.gateway.api.responses import test_responses
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine, says

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
THOUGHT = "Paris, I think.\nOr not?"
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
    "</function>\n</tool_call>"
)
TEXT = f"{THOUGHT}\n</think>\n\nSure, I look.\n\n{CALL}"


@dataclass(frozen=True)
class Right:
    """What an answer is."""

    content: str
    calls: tuple[str, ...]
    """Arguments."""
    stop: str | None
    """The string that ended it, if it is told."""
    broken: bool = False
    thought: str = THOUGHT


WHOLE = Right("Sure, I look.", ('{"city": "Paris", "days": 12}',), None)
CASES = [
    (TEXT, {}, WHOLE),
    # Reasoning, markup and the white space beside it are not seen.
    (TEXT, {"stop": ["think"]}, WHOLE),
    (TEXT, {"stop": ["</think>"]}, WHOLE),
    (TEXT, {"stop": ["\n", "\n\n"]}, WHOLE),
    (TEXT, {"stop": ["parameter", "<tool_call>", "=city>", "weather"]}, WHOLE),
    (f"{THOUGHT}\n</think>\n\nYes.\nNo.", {"stop": ["\n"]}, Right("Yes.", (), "\n")),
    (f"{THOUGHT}\n</think>\n\nYes.\n\nNo.", {"stop": ["\n\n"]}, Right("Yes.", (), "\n\n")),
    # What is seen.
    (TEXT, {"stop": ["Paris", "look"]}, Right("Sure, I ", (), "look")),
    (TEXT, {"stop": [","]}, Right("Sure", (), ",")),
    (TEXT, {"stop": ["ris"]}, Right("Sure, I look.", ('{"city": "Pa',), "ris", broken=True)),
    (TEXT, {"stop": ["Paris"]}, Right("Sure, I look.", ('{"city": ',), "Paris", broken=True)),
    (TEXT, {"stop": ["2"]}, Right("Sure, I look.", ('{"city": "Paris", "days": 1',), "2", broken=True)),
    # The first call is whole, the second is not.
    (
        TEXT + CALL.replace("Paris", "Oslo"),
        {"stop": ["slo"]},
        Right("Sure, I look.", ('{"city": "Paris", "days": 12}', '{"city": "O'), "slo", broken=True),
    ),
    # Behind whole calls a stop breaks nothing.
    (TEXT + "\nDone.", {"stop": ["one"]}, Right("Sure, I look.D", WHOLE.calls, None)),
    # Not a call, so it is text.
    (f"{THOUGHT}\n</think>\n\n<tool_call>what", {"stop": ["call>w"]}, Right("<tool_", (), "call>w")),
    (f"{THOUGHT}\n</think>\n\n<tool_call>what", {"stop": ["<tool_call>w"]}, Right("", (), "<tool_call>w")),
    # The form of earlier models.
    (
        f'{THOUGHT}\n</think>\n\n<tool_call>\n{{"name": "weather", "arguments": {{"city": "Paris"}}}}\n</tool_call>',
        {"stop": ["name", "city", '": "', "ris"]},
        Right("", ('{"city": "Pa',), "ris", broken=True),
    ),
]
TOKENS = [
    (TEXT, ["I"], Right("Sure, ", (), None)),
    (TEXT, ["k"], Right("Sure, I loo", (), None)),
    (TEXT, ["s"], Right("Sure, I look.", ('{"city": "Pari',), None, broken=True)),
    (TEXT, ["\n", "<", "_", "\n</think>", "<tool_call>"], WHOLE),
]


def chat(http: httpx.Client, fields: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    body = CHAT | {"tools": tools, "chat_template_kwargs": {"enable_thinking": True}, "return_token_ids": True} | fields
    if stream:
        return whole_of(events(http.post("/v1/chat/completions", json=body | {"stream": True})))[0]
    answer = http.post("/v1/chat/completions", json=body).json()
    ChatCompletion.model_validate(answer)
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"])
    return plain(answer["choices"][0])


def check_chat(found: dict[str, Any], right: Right) -> None:
    message = found["message"]
    assert message["reasoning"] == right.thought
    assert message["content"] == right.content
    assert tuple(arguments for _, arguments in message["calls"]) == right.calls
    assert found["reason"] == ("tool_calls" if right.calls and not right.broken else "stop")


@pytest.mark.sampled
@pytest.mark.parametrize("per_update", [1, 9, 1000])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "fields", "right"), CASES, ids=range(len(CASES)))
def test_chat(
    running: Running, http: httpx.Client, text: str, fields: dict[str, Any], right: Right, stream: bool, per_update: int
) -> None:
    running.engine.behaviour = says(text, per_update=per_update)
    found = chat(http, fields | {"logprobs": True}, stream=stream)
    check_chat(found, right)
    ids = found["ids"]
    told = running.engine.codec.decode(ids, skip_special=False)
    if right.stop is not None and right.stop != "ris":
        assert told.endswith(right.stop), "not a token more than the stop needs"
        assert [(running.engine.requests[0].request_id, len(ids))] == running.engine.aborts
    shown = "".join(entry["token"] for entry in found["logprobs"])
    assert told.startswith(shown)


@pytest.mark.sampled
@pytest.mark.parametrize("per_update", [1, 1000])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "stops", "right"), TOKENS, ids=range(len(TOKENS)))
def test_stop_tokens(
    running: Running, http: httpx.Client, text: str, stops: list[str], right: Right, stream: bool, per_update: int
) -> None:
    running.engine.behaviour = says(text, per_update=per_update)
    codec = running.engine.codec
    wanted = [token for stop in stops for token in codec.encode(stop)[-1:]]
    found = chat(http, {"stop_token_ids": wanted}, stream=stream)
    check_chat(found, right)
    assert list(running.engine.requests[0].sampling.stop_token_ids) == []
    if right != WHOLE:
        assert codec.decode(found["ids"], skip_special=False).endswith(stops[0])
        assert found["ids"].count(wanted[0]) >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_what_comes_within_the_first_tokens_does_not_count(running: Running, http: httpx.Client, stream: bool) -> None:
    running.engine.behaviour = says("one, two, three, four")
    base = {"min_tokens": 9, "chat_template_kwargs": {"enable_thinking": False}}
    for fields in ({"stop": [","]}, {"stop_token_ids": running.engine.codec.encode(",")}):
        found = chat(http, base | fields, stream=stream)
        assert found["message"]["content"] == "one, two, three"


def test_a_control_token_ends_the_answer_wherever_it_comes(running: Running, http: httpx.Client) -> None:
    control = running.engine.codec.token_id("<|endoftext|>")
    codec = running.engine.codec
    cut = TEXT[: TEXT.index("ris\n</par")]
    running.engine.behaviour = says([*codec.encode(cut), control], ends=False)
    body = {"stop_token_ids": [control], "max_tokens": len(codec.encode(cut)) + 1}
    assert chat(http, body, stream=False)["reason"] == "length"
    assert list(running.engine.requests[0].sampling.stop_token_ids) == [control]


@pytest.mark.sampled
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "fields", "right"), CASES, ids=range(len(CASES)))
def test_messages(
    running: Running, http: httpx.Client, text: str, fields: dict[str, Any], right: Right, stream: bool
) -> None:
    running.engine.behaviour = says(text, per_update=5)
    body = {
        "model": MODEL,
        "max_tokens": 480,
        "messages": [{"role": "user", "content": "hi"}],
        "thinking": {"type": "adaptive"},
        "tools": [{"name": "weather", "input_schema": PARAMETERS}],
        "stop_sequences": fields.get("stop", []),
        "stream": stream,
    }
    answer = http.post("/v1/messages", json=body)
    if stream:
        told = messages_api.events_of(answer)
        deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
        stop = next(event["delta"] for event in told if event["type"] == "message_delta")
        calls = [event for event in told if event.get("content_block", {}).get("type") == "tool_use"]
        inputs = {event["index"]: "" for event in calls}
        for event in told:
            if event.get("delta", {}).get("type") == "input_json_delta":
                inputs[event["index"]] += event["delta"]["partial_json"]
        assert tuple(inputs.values()) == right.calls
        assert "".join(delta.get("text", "") for delta in deltas) == right.content
    else:
        stop = answer.json()
        blocks = stop["content"]
        assert "".join(block.get("text", "") for block in blocks) == right.content
        found = [block["input"] for block in blocks if block["type"] == "tool_use"]
        assert found[: len(found) - right.broken] == [
            json.loads(call) for call in right.calls[: len(right.calls) - right.broken]
        ]
        assert len(found) == len(right.calls)
    whole = "tool_use" if right.calls and not right.broken else "end_turn"
    assert stop["stop_reason"] == (whole if right.stop is None else "stop_sequence")
    assert stop["stop_sequence"] == right.stop


@pytest.mark.sampled
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "fields", "right"), CASES, ids=range(len(CASES)))
def test_responses_api(
    running: Running, http: httpx.Client, text: str, fields: dict[str, Any], right: Right, stream: bool
) -> None:
    running.engine.behaviour = says(text, per_update=5)
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS}
    body = {"tools": [tool], "chat_template_kwargs": {"enable_thinking": True}, **fields}
    if stream:
        told = test_responses.stream(http, **body)
        answer = told[-1]["response"]
        assert told[-1]["type"] == ("response.incomplete" if right.broken else "response.completed")
    else:
        answer = test_responses.plain(http, **body)
    assert answer["status"] == ("incomplete" if right.broken else "completed")
    assert answer["incomplete_details"] is None
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    assert tuple(call["arguments"] for call in calls) == right.calls
    broken = ["incomplete"] if right.broken else []
    assert [call["status"] for call in calls] == ["completed"] * (len(calls) - len(broken)) + broken
    messages = [item for item in answer["output"] if item["type"] == "message"]
    assert "".join(part["text"] for item in messages for part in item["content"]) == right.content


# -- what the engine knows when the answer is out


@pytest.mark.sampled
@pytest.mark.parametrize("fields", [{"stop": ["look"]}, {"parallel_tool_calls": False}])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_the_end_waits_for_the_engine(start: Starter, fields: dict[str, Any], n: int, stream: bool) -> None:
    engine = FakeEngine(behaviour=says(TEXT + CALL, pause=0.0005), keep_after=0.3)
    running = start(engine)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    body = CHAT | {"tools": tools, "chat_template_kwargs": {"enable_thinking": True}, "n": n, "stream": stream} | fields
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert len(engine.kept) == n
    reasons = [choice["finish_reason"] for choice in _choices(answer, stream)]
    assert [reason for reason in reasons if reason] == ["stop" if "stop" in fields else "tool_calls"] * n
    assert answer.elapsed.total_seconds() > 0.3


def _choices(answer: httpx.Response, stream: bool) -> list[dict[str, Any]]:
    return [choice for chunk in events(answer) for choice in chunk["choices"]] if stream else answer.json()["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_does_not_say(start: Starter, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(exchange, "_KEEP_SECONDS", 0.2)
    running = start(FakeEngine(behaviour=says("one two three", pause=0.001), keep_after=None))
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        answer = http.post("/v1/chat/completions", json=CHAT | {"stop": ["two"], "stream": stream})
    assert _choices(answer, stream)[-1]["finish_reason"] == "stop"
    assert not running.inference.engines.clients[0]._keeping


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_instead(start: Starter, stream: bool) -> None:
    engine = FakeEngine(behaviour=says("one two three", pause=0.001), dies_on_abort=True)
    running = start(engine)
    with httpx.Client(base_url=running.url, timeout=4) as http:
        answer = http.post("/v1/chat/completions", json=CHAT | {"stop": ["two"], "stream": stream})
    assert answer.status_code == 200
    assert _choices(answer, stream)[-1]["finish_reason"] == "stop", "the answer is whole"


def test_an_engine_of_an_older_release(start: Starter) -> None:
    engine = FakeEngine(behaviour=says("one two three", pause=0.001), tells_kept=False)
    running = start(engine)
    with httpx.Client(base_url=running.url, timeout=4) as http:
        answer = http.post("/v1/chat/completions", json=CHAT | {"stop": ["two"]})
    assert answer.json()["choices"][0]["message"]["content"] == "one "
    running.wait_for(lambda: engine.aborts == [(answer.json()["id"], 7)])
