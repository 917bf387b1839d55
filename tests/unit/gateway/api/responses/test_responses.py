"""/v1/responses through the real openai client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.common.pb import engine_pb2
from services.gateway.protocol.responses.events import ResponseStreamEvent as Described
from services.gateway.protocol.responses.response import InputItemsOut, ResponseOut
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine, dies, fails, hangs, says

ROUTE = "/v1/responses"
ASK: dict[str, Any] = {"model": MODEL, "input": "hi"}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
THINK: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each checked: named by its type, numbered, and as the client describes it."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        Described.model_validate(event)
        parsed = EVENT.validate_python(event)
        assert parsed.type == event["type"]
        assert not getattr(parsed, "model_extra", None), f"{event['type']} has fields that the client does not know"
        found.append(event)
    return found


def stream(http: httpx.Client, **change: Any) -> list[dict[str, Any]]:
    return events_of(http.post(ROUTE, json=ASK | change | {"stream": True}))


def plain(http: httpx.Client, **change: Any) -> dict[str, Any]:
    answer = http.post(ROUTE, json=ASK | change)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    ResponseOut.model_validate(body)
    Response.model_validate(body)
    return body


def same(item: Any) -> Any:
    """Without what no two answers share."""
    if isinstance(item, dict):
        fresh = ("id", "item_id", "call_id", "created_at", "completed_at", "completion_id", "sequence_number")
        return {key: same(value) for key, value in item.items() if key not in fresh}
    return [same(member) for member in item] if isinstance(item, list) else item


def prompt(running: Running) -> str:
    """What the model read last."""
    return running.engine.codec.decode(list(running.engine.requests[-1].prompt_token_ids))


def test_plain(running: Running, client: openai.OpenAI) -> None:
    running.engine.attached, running.engine.cached_tokens = "bot@3", 5
    raw = client.responses.with_raw_response.create(
        model=MODEL, input="hi", instructions="Be kind.", metadata={"a": "b"}, temperature=0.5, user="u"
    )
    answer = raw.parse()
    ResponseOut.model_validate(raw.http_response.json())
    assert answer.output_text == "Hello, world"
    assert answer.status == "completed"
    assert answer.id.startswith("resp_")
    assert (answer.metadata, answer.temperature, answer.user) == ({"a": "b"}, 0.5, "u")
    assert answer.instructions == "Be kind."
    assert raw.headers["x-temper-adapter"] == answer.model_extra["adapter"] == "bot@3"
    assert answer.usage.output_tokens == 13
    assert answer.usage.input_tokens_details.cached_tokens == 5
    request = running.engine.requests[0]
    assert answer.model_extra["completion_id"] == request.request_id
    assert request.sampling.temperature == 0.5
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    assert list(request.prompt_token_ids) == running.engine.codec.encode_chat(turns)
    assert answer.usage.input_tokens == len(request.prompt_token_ids)


def test_order_of_events(http: httpx.Client) -> None:
    events = stream(http)
    types = [event["type"].removeprefix("response.") for event in events]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert types[:4] == begin
    assert types[-4:] == end
    assert set(types[4:-4]) == {"output_text.delta"}
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert "".join(event.get("delta", "") for event in events) == "Hello, world"


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("naïve 🙂 日本語", {}),
        (f"Let me look.\n\n{CALL}\n{CALL}", {"tools": [WEATHER]}),
        (f"hm\nwell\n</think>\n\nSo: {CALL}", {"tools": [WEATHER], **THINK}),
        ("all of it\n</think>\n\nYes", {**THINK, "reasoning": {"summary": "auto"}}),
        (f"a{CALL}", {"tools": [WEATHER], "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        ("", {}),
        ("only thoughts", THINK),
    ],
)
def test_stream_equals_plain(running: Running, http: httpx.Client, text: str, change: dict[str, Any]) -> None:
    running.engine.behaviour = says(text)
    whole, events = plain(http, **change), stream(http, **change)
    assert same(events[-1]["response"]) == same(whole)
    final = events[-1]["response"]["output"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.added"] == list(
        range(len(final))
    )
    for index, item in enumerate(final):
        parts = [e for e in events if e.get("output_index") == index and e["type"].endswith(".delta")]
        joined = "".join(part["delta"] for part in parts)
        told = (
            item.get("arguments")
            if item["type"] == "function_call"
            else (item["content"] or item["summary"])[0]["text"]
        )
        assert joined == told
        assert all(part["item_id"] == item["id"] for part in parts)


def test_thinking(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says("hm\n</think>\n\nYes")
    thought, message = plain(http, **THINK)["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert thought["summary"] == []
    assert message["content"][0]["text"] == "Yes"
    answer = plain(http, **THINK, reasoning={"summary": "detailed"}, include=["reasoning.encrypted_content"])
    assert answer["output"][0]["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert answer["output"][0]["content"] == []
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    # It goes back into the conversation from either place.
    for item in (thought, answer["output"][0]):
        call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c", "output": "rain"}
        asked = [{"role": "user", "content": "hi"}, item, call, result]
        assert http.post(ROUTE, json=ASK | {"input": asked, "tools": [WEATHER]}).status_code == 200


def test_tools(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says(f"Let me look.\n\n{CALL}")
    options: dict[str, Any] = {"model": MODEL, "tools": [WEATHER]}
    asked: list[Any] = [{"role": "user", "content": "Weather?"}]
    first = client.responses.create(**options, input=asked)
    message, call = first.output
    assert (message.type, call.type) == ("message", "function_call")
    assert json.loads(call.arguments) == {"city": "Oslo", "days": 2}
    running.engine.behaviour = says("Rain.")
    # As the guides of OpenAI do it: the output is put behind the input, and the result behind it.
    asked += first.output
    asked.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    by_items = client.responses.create(**options, input=asked)
    read = prompt(running)
    assert by_items.output_text == "Rain."
    by_id = client.responses.create(**options, input=asked[-1:], previous_response_id=first.id)
    assert by_id.previous_response_id == first.id
    assert prompt(running) == read
    assert '<tool_call>{"city": "Oslo", "days": 2}' in read
    assert read.index("Let me look.") < read.index("<tool_call>") < read.index("rain")


def test_one_call_at_most(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says(f"{CALL}\n{CALL}")
    assert len(plain(http, tools=[WEATHER])["output"]) == 2
    assert len(plain(http, tools=[WEATHER], parallel_tool_calls=False)["output"]) == 1


def test_conversation_by_id(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("Blue.")
    first = client.responses.create(model=MODEL, input="A colour?", instructions="Be short.")
    running.engine.behaviour = says("Green.")
    second = client.responses.create(model=MODEL, input="Another?", previous_response_id=first.id)
    turns = [
        {"role": "user", "content": "A colour?"},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Another?"},
    ]
    codec = running.engine.codec
    assert list(running.engine.requests[-1].prompt_token_ids) == codec.encode_chat(turns), "without the instructions"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    third = client.responses.create(model=MODEL, input="More?", previous_response_id=second.id)
    turns += [{"role": "assistant", "content": "Green."}, {"role": "user", "content": "More?"}]
    assert list(running.engine.requests[-1].prompt_token_ids) == codec.encode_chat(turns), "each has all before it"
    assert client.responses.retrieve(third.id).to_dict() == third.to_dict()
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model=MODEL, input="?", previous_response_id=first.id)
    assert missing.value.param == "previous_response_id"


def test_input_items(client: openai.OpenAI, http: httpx.Client) -> None:
    first = client.responses.create(model=MODEL, input="one")
    asked = [{"role": "user", "content": "two", "id": "mine"}, {"role": "assistant", "content": "three"}]
    second = client.responses.create(model=MODEL, input=[*asked, asked[0]], previous_response_id=first.id)
    forwards = list(client.responses.input_items.list(second.id, order="asc"))
    texts = [item.content[0].text for item in forwards]
    assert texts == ["one", "Hello, world", "two", "three", "two"]
    assert [item.role for item in forwards] == ["user", "assistant", "user", "assistant", "user"]
    assert forwards[2].id == "mine"
    assert forwards[1].id == first.output[0].id
    paged = list(client.responses.input_items.list(first.id, limit=1))
    assert [item.content[0].text for item in paged] == ["one"]
    page = http.get(f"{ROUTE}/{second.id}/input_items", params={"limit": 2}).json()
    InputItemsOut.model_validate(page)
    assert (page["has_more"], page["first_id"]) == (True, "mine")
    rest = http.get(f"{ROUTE}/{second.id}/input_items", params={"after": page["last_id"]}).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["two", "Hello, world", "one"]
    assert rest["has_more"] is False
    unknown = http.get(f"{ROUTE}/{second.id}/input_items", params={"after": "nothing"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "after")


def test_logprobs_are_those_of_the_text(running: Running, http: httpx.Client) -> None:
    text = f"why t\n</think>\n\nThe t 🙂.\n\n{CALL}\n{CALL}\ntail"
    for per_update in (1, 7, 1000):
        running.engine.behaviour = says(text, per_update=per_update)
        wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": [WEATHER], **THINK}
        events = stream(http, **wanted)
        messages = [item for item in events[-1]["response"]["output"] if item["type"] == "message"]
        assert [message["content"][0]["text"] for message in messages] == ["The t 🙂.", "tail"]
        for message in messages:
            part = message["content"][0]
            assert bytes(b for entry in part["logprobs"] for b in entry["bytes"]).decode() == part["text"]
            assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
            deltas = [e for e in events if e["type"].endswith("text.delta") and e["item_id"] == message["id"]]
            assert [entry for e in deltas for entry in e["logprobs"]] == part["logprobs"]
    assert plain(http)["output"][0]["content"][0]["logprobs"] == []


def test_cut_off(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says("x" * 50)
    answer = plain(http, max_output_tokens=7)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (answer["output"][0]["status"], answer["completed_at"]) == ("incomplete", None)
    assert stream(http, max_output_tokens=7)[-1]["type"] == "response.incomplete"
    running.engine.behaviour = says(CALL)
    cut = plain(http, max_output_tokens=70, tools=[WEATHER])
    (call,) = cut["output"]
    assert (call["type"], call["status"], call["arguments"]) == ("function_call", "incomplete", '{"city": "Oslo"')
    running.engine.behaviour = says("Go on.")
    assert plain(http, previous_response_id=answer["id"])["status"] == "completed"
    assert "assistant\nxxxxxxx\nuser" in prompt(running)
    assert plain(http, previous_response_id=cut["id"])["status"] == "completed"
    assert "Oslo" not in prompt(running), "half a call is of no use to anyone"


def test_refused_before_the_first_token(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = fails(engine_pb2.ERROR_CODE_OVERLOADED, "64 requests wait already")
    for streamed in (False, True):
        answer = http.post(ROUTE, json=ASK | {"stream": streamed})
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
    assert running.responses.records == {}


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (fails(engine_pb2.ERROR_CODE_INTERNAL, "secret", after="ab"), "internal error; the log has the details"),
        (dies(after="ab"), "the engine was lost while it answered"),
    ],
)
def test_fails_in_a_stream(running: Running, http: httpx.Client, behaviour: Any, message: str) -> None:
    running.engine.behaviour = behaviour
    last = stream(http)[-1]
    assert last["type"] == "response.failed"
    response = last["response"]
    assert response["error"]["code"] == "server_error"
    assert message in response["error"]["message"]
    assert response["output"][0]["content"][0]["text"] == "ab"
    assert response["output"][0]["status"] == "incomplete"
    assert http.get(f"{ROUTE}/{response['id']}").json() == response
    again = http.post(ROUTE, json=ASK | {"previous_response_id": response["id"]})
    assert (again.status_code, again.json()["error"]["param"]) == (409, "previous_response_id")
    running.wait_for(lambda: running.inference.engines.ready)


def test_client_leaves(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = hangs
    for number, streamed in enumerate((False, True), 1):
        running.leave(ROUTE, ASK | {"stream": streamed}, lambda: bool(running.engine.running))
        running.wait_for(lambda: len(running.engine.aborts) == number and not running.engine.running)  # noqa: B023
    running.engine.behaviour = says("x" * 300, pause=0.02)
    with http.stream("POST", ROUTE, json=ASK | {"stream": True}) as answer:
        next(answer.iter_lines())
    running.wait_for(lambda: len(running.engine.aborts) == 3)
    assert running.responses.records == {}


def test_not_stored(running: Running, http: httpx.Client) -> None:
    answer = plain(http, store=False)
    assert answer["store"] is False
    assert running.responses.records == {}
    assert http.get(f"{ROUTE}/{answer['id']}").status_code == 404


def test_redis_away(running: Running, http: httpx.Client) -> None:
    running.responses.down = True
    calls = running.responses.calls
    assert plain(http)["store"] is False, "answered, and honest about it"
    assert stream(http)[-1]["response"]["store"] is False
    assert running.responses.calls == calls + 1, "nobody waits for it again at once"
    known = f"resp_{'0' * 32}"
    refused = (
        http.post(ROUTE, json=ASK | {"previous_response_id": known}),
        http.post(ROUTE, json=ASK | {"background": True}),
        http.get(f"{ROUTE}/{known}"),
        http.delete(f"{ROUTE}/{known}"),
        http.post(f"{ROUTE}/{known}/cancel"),
    )
    for answer in refused:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "retry-after" in answer.headers


@pytest.mark.parametrize("response_id", ["x", "resp_", f"resp_{'G' * 32}", f"resp_{'0' * 33}", f"resp_{'0' * 32}"])
def test_unknown_response(http: httpx.Client, response_id: str) -> None:
    path = f"{ROUTE}/{response_id}"
    for answer in (http.get(path), http.delete(path), http.post(f"{path}/cancel"), http.get(f"{path}/input_items")):
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "response_id")


def test_input_tokens(running: Running, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="hi")
    counted = client.responses.input_tokens.count(model=MODEL, input="more", previous_response_id=first.id)
    second = client.responses.create(model=MODEL, input="more", previous_response_id=first.id)
    assert counted.input_tokens == second.usage.input_tokens
    assert len(running.engine.requests) == 2, "counting asks no engine"


def test_admission(start: Starter) -> None:
    running = start(FakeEngine(), max_in_flight=1)
    held = running.inference.admission.reserve(1)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        answer = http.post(ROUTE, json=ASK)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        held.release()
        assert http.post(ROUTE, json=ASK).status_code == 200
