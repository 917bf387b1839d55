"""Completions that are kept with store=true, through OpenAI's own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.common.pb import engine_pb2
from services.common.security.api_keys import Scope
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import fails, hangs, says
from tests.unit.gateway.key_file import NO_REDIS, Keys

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
ROUTE = "/v1/chat/completions"


def kept(client: openai.OpenAI, **more: Any) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(**{**CHAT, "store": True, **more})


def test_kept_as_it_was_answered(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("Hello")
    answer = kept(client, metadata={"topic": "greeting"}, n=2, logprobs=True)
    assert answer.store is True  # type: ignore[attr-defined]
    assert client.chat.completions.retrieve(answer.id) == answer
    assert len(answer.choices) == 2
    assert answer.metadata == {"topic": "greeting"}  # type: ignore[attr-defined]
    deleted = client.chat.completions.delete(answer.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (answer.id, True, "chat.completion.deleted")
    for call in (client.chat.completions.retrieve, client.chat.completions.delete):
        with pytest.raises(openai.NotFoundError):
            call(answer.id)


@pytest.mark.parametrize("store", [{}, {"store": False}, {"store": None}])
def test_not_kept_unless_asked_for(running: Running, client: openai.OpenAI, store: dict[str, Any]) -> None:
    for stream in (False, True):
        with httpx.Client(base_url=running.url, verify=False, timeout=PATIENCE) as http:
            assert '"store"' not in http.post(ROUTE, json=CHAT | store | {"stream": stream}).text
    assert list(client.chat.completions.list()) == []
    assert running.documents.kept == {}


def test_a_stream_is_kept_as_the_same_answer(running: Running, client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    text = "Let me see.\n\n<tool_call>\n<function=add>\n</function>\n</tool_call>"
    running.engine.behaviour = says(text)
    whole = kept(client, tools=[tool], max_tokens=200, seed=1)
    with client.chat.completions.create(
        **{**CHAT, "tools": [tool], "max_tokens": 200, "seed": 1}, stream=True, store=True
    ) as stream:
        (stream_id,) = {chunk.id for chunk in stream}
    streamed = client.chat.completions.retrieve(stream_id)
    same, told = whole.choices[0].model_dump(), streamed.choices[0].model_dump()
    for choice in (same, told):
        del choice["completion_id"]
        for call in choice["message"]["tool_calls"] or ():
            del call["id"]
    assert told == same
    assert told["message"]["tool_calls"]
    assert streamed.usage == whole.usage


def test_only_whole_streams_are_kept(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("Hello, world", pause=0.2)
    with client.chat.completions.create(**CHAT, stream=True, store=True) as stream:
        next(iter(stream))
    running.wait_for(lambda: not running.engine.running)
    running.engine.behaviour = hangs
    running.leave("/v1/chat/completions", CHAT | {"store": True}, lambda: bool(running.engine.running))
    running.wait_for(lambda: not running.engine.running)
    running.engine.behaviour = fails(engine_pb2.ERROR_CODE_INTERNAL, "broken", after="ab")
    for stream_it in (True, False):
        with pytest.raises(openai.APIError):
            list(client.chat.completions.create(**CHAT, stream=stream_it, store=True))
    assert list(client.chat.completions.list()) == []


def test_lists_in_pages_with_filters(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("Hello")
    made = [kept(client, metadata={"n": str(i % 2), "all": "a b&c=[d]"}).id for i in range(5)]
    chats = client.chat.completions
    assert [chat.id for chat in chats.list(limit=2)] == made, "the client turns the pages"
    first = chats.list(limit=2)
    assert ([chat.id for chat in first.data], first.has_more) == (made[:2], True)
    assert [chat.id for chat in chats.list(after=made[2])] == made[3:]
    assert [chat.id for chat in chats.list(order="desc", limit=2)] == made[::-1]
    assert [chat.id for chat in chats.list(metadata={"n": "1"})] == made[1::2]
    assert [chat.id for chat in chats.list(metadata={"n": "1"}, limit=1)] == made[1::2]
    assert [chat.id for chat in chats.list(metadata={"n": "0", "all": "a b&c=[d]"})] == made[::2]
    assert list(chats.list(metadata={"n": "0", "other": "x"})) == []
    assert [chat.id for chat in chats.list(model=MODEL)] == made
    assert list(chats.list(model="another")) == []
    with pytest.raises(openai.NotFoundError):
        chats.list(after="chatcmpl-x")
    with httpx.Client(base_url=running.url, verify=False, timeout=PATIENCE) as http:
        for query in ("metadata=x", "metadata[]=x", "metadata[a]=1&metadata[a]=2", "limit=0", "order=up"):
            assert http.get(f"{ROUTE}?{query}").status_code == 400, query
        body = http.get(f"{ROUTE}?limit=1").json()
        assert (body["first_id"], body["last_id"], body["object"]) == (made[0], made[0], "list")


def test_metadata_can_be_changed(running: Running, client: openai.OpenAI) -> None:
    answer = kept(client, metadata={"a": "1"})
    other = kept(client)
    changed = client.chat.completions.update(answer.id, metadata={"b": "2"})
    assert changed.metadata == {"b": "2"}  # type: ignore[attr-defined]
    assert changed.choices == answer.choices
    assert [chat.id for chat in client.chat.completions.list(metadata={"b": "2"})] == [answer.id]
    assert [chat.id for chat in client.chat.completions.list()] == [answer.id, other.id], "it keeps its place"
    assert list(client.chat.completions.list(metadata={"a": "1"})) == []
    assert client.chat.completions.update(answer.id, metadata=None).metadata == {}  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.update("chatcmpl-" + "0" * 32, metadata={})
    for body in ({}, {"metadata": {"a": 1}}, {"metadata": {"x" * 65: "a"}}, {"metadata": {}, "model": "x"}):
        with pytest.raises(openai.BadRequestError):
            client.post(f"/chat/completions/{answer.id}", body=body, cast_to=object)


def test_the_messages_of_a_completion(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("Hello")
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "19", "tool_call_id": "call_1"},
    ]
    answer = kept(client, messages=messages)
    told = list(client.chat.completions.messages.list(answer.id, limit=2))
    assert [message.id for message in told] == [f"{answer.id}-{i}" for i in range(4)]
    assert [message.role for message in told] == ["system", "user", "assistant", "tool"]
    assert [message.content for message in told] == ["Be brief.", "ab", None, "19"]
    parts = told[1].content_parts
    assert parts is not None
    assert [part.text for part in parts] == ["a", "b"]  # type: ignore[union-attr]
    assert told[2].tool_calls is not None
    assert told[2].tool_calls[0].id == "call_1"
    backwards = client.chat.completions.messages.list(answer.id, order="desc", after=f"{answer.id}-2")
    assert [message.id for message in backwards] == [f"{answer.id}-1", f"{answer.id}-0"]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.messages.list(answer.id, after="nothing")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.messages.list("chatcmpl-" + "0" * 32)


def test_what_cannot_be_kept_is_answered(
    running: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.responses.down = True
    answer = kept(client)
    assert answer.store is False  # type: ignore[attr-defined]
    assert len(list(client.chat.completions.create(**CHAT, stream=True, store=True))) > 1
    calls = running.responses.calls
    assert kept(client).store is False  # type: ignore[attr-defined]
    assert running.responses.calls == calls, "a store that is away is left alone for a while"
    for call in (client.chat.completions.retrieve, client.chat.completions.delete):
        with pytest.raises(openai.InternalServerError) as away:
            call(answer.id)
        assert away.value.status_code == 503
    running.responses.down = False
    running.response_services.best_effort._away_until = 0.0
    monkeypatch.setattr(running.responses, "largest", 300)
    assert kept(client).store is False, "over the limit of one"  # type: ignore[attr-defined]
    assert list(client.chat.completions.list()) == []
    monkeypatch.undo()
    assert kept(client).store is True  # type: ignore[attr-defined]


def test_each_key_sees_its_own(tmp_path: Path, start: Starter) -> None:
    keys = Keys(tmp_path / "keys.json")
    secrets = [keys.add(name, Scope.INFERENCE) for name in ("one", "two")]
    keys.add("trainer", Scope.TRAIN)
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS)
    mine, theirs = (
        openai.OpenAI(
            base_url=f"{running.url}/v1",
            api_key=secret,
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=False),
        )
        for secret in secrets
    )
    answer = kept(mine)
    assert [chat.id for chat in mine.chat.completions.list()] == [answer.id]
    assert list(theirs.chat.completions.list()) == []
    calls = theirs.chat.completions
    for call in (calls.retrieve, calls.delete, calls.messages.list):
        with pytest.raises(openai.NotFoundError):
            call(answer.id)
    with pytest.raises(openai.NotFoundError):
        calls.update(answer.id, metadata={"a": "b"})
    with pytest.raises(openai.NotFoundError):
        calls.list(after=answer.id)
    with httpx.Client(base_url=running.url, verify=False, headers=keys.bearer("trainer"), timeout=PATIENCE) as http:
        assert http.get(ROUTE).status_code == 403
