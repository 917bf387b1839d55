"""/v1/conversations, and responses that belong to one, through OpenAI's own client."""

from __future__ import annotations

import time
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

USER: Any = {"role": "user", "content": "hi"}
CALL: Any = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}"}
RESULT: Any = {"type": "function_call_output", "call_id": "call_1", "output": "19"}


def texts(client: openai.OpenAI, conversation_id: str) -> list[tuple[str, str]]:
    """What a conversation has, oldest first."""
    told = []
    for item in client.conversations.items.list(conversation_id, order="asc"):
        content: Any = getattr(item, "content", None)
        told.append((getattr(item, "role", item.type), content[0].text if content else ""))
    return told


def respond(
    client: openai.OpenAI, conversation: Any, text: str = "and?", **more: Any
) -> openai.types.responses.Response:
    body = {"model": MODEL, "input": text, "max_output_tokens": 8, "conversation": conversation, **more}
    return client.responses.create(**body)


def test_life_of_a_conversation(running: Running, client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"topic": "sums"})
    assert (made.object, made.metadata) == ("conversation", {"topic": "sums"})
    assert made.id.startswith("conv_")
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"a": "b"}).metadata == {"a": "b"}
    assert client.conversations.retrieve(made.id).metadata == {"a": "b"}
    deleted = client.conversations.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "conversation.deleted")
    for call in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.update(made.id, metadata={})
    with httpx.Client(base_url=running.url, verify=False, timeout=PATIENCE) as http:
        assert http.post("/v1/conversations").json()["metadata"] == {}, "a body is not needed"


def test_items(running: Running, client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[{"role": "system", "content": "Be brief."}])
    items = client.conversations.items
    added = items.create(made.id, items=[USER, CALL, RESULT, {**USER, "id": "msg_mine"}])
    assert [item.type for item in added.data] == ["message", "function_call", "function_call_output", "message"]
    assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, "msg_mine", False)
    listed = list(items.list(made.id, limit=2))
    assert [item.id for item in listed[:4]] == [item.id for item in added.data[::-1]], "newest first, in pages"
    assert [item.id for item in items.list(made.id, order="asc", after=added.data[1].id)] == [
        added.data[2].id,
        "msg_mine",
    ]
    one = items.retrieve("msg_mine", conversation_id=made.id, include=["message.output_text.logprobs"])
    assert one == added.data[3]
    assert items.delete("msg_mine", conversation_id=made.id).id == made.id
    for call in (items.retrieve, items.delete):
        with pytest.raises(openai.NotFoundError):
            call("msg_mine", conversation_id=made.id)
    with pytest.raises(openai.NotFoundError):
        items.list(made.id, after="msg_mine")
    for wrong, param in (
        ([], "items"),
        ([USER] * 21, "items"),
        ([{**USER, "id": "same"}, {**USER, "id": "same"}], "items[1].id"),
        ([{**USER, "id": added.data[0].id}], "items[0].id"),
        ([{"type": "web_search_call"}], "items[0]"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            items.create(made.id, items=wrong)
        assert refused.value.param == param
    with pytest.raises(openai.NotFoundError) as missing:
        items.create(made.id, items=[{"type": "item_reference", "id": "msg_" + "0" * 48}])
    assert missing.value.param == "items[0].id"
    assert len(list(items.list(made.id))) == 4, "what is refused adds nothing"


def test_an_item_of_a_response_may_be_named(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("Hello")
    answer = client.responses.create(model=MODEL, input="hi", max_output_tokens=8)
    made = client.conversations.create(items=[{"type": "item_reference", "id": answer.output[0].id or ""}])
    assert texts(client, made.id) == [("assistant", "Hello")]


def test_responses_read_it_and_add_to_it(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("Hello")
    made = client.conversations.create(items=[{"role": "user", "content": "I am Ann."}])
    first = respond(client, made.id)
    assert first.conversation is not None
    assert first.conversation.id == made.id
    assert texts(client, made.id) == [("user", "I am Ann."), ("user", "and?"), ("assistant", "Hello")]
    with client.responses.stream(
        model=MODEL, input="go on", max_output_tokens=8, conversation={"id": made.id}
    ) as stream:
        final = stream.get_final_response()
    assert final.conversation == first.conversation
    prompt = running.engine.requests[-1].prompt_token_ids
    counted = client.responses.input_tokens.count(model=MODEL, input="go on", conversation=made.id)
    assert texts(client, made.id)[3:] == [("user", "go on"), ("assistant", "Hello")]
    assert counted.input_tokens > len(prompt) > len(running.engine.requests[-2].prompt_token_ids)
    same = [{"role": role, "content": text} for role, text in texts(client, made.id)[:4]]
    plain: Any = client.responses.create(model=MODEL, input=same, max_output_tokens=8)  # type: ignore[arg-type]
    assert running.engine.requests[-1].prompt_token_ids == prompt, "it reads what the items say"
    assert plain.conversation is None
    assert client.responses.retrieve(final.id).conversation == final.conversation
    ids = [item.id for item in client.conversations.items.list(made.id, order="asc")]
    assert [item.id for item in client.responses.input_items.list(final.id, order="asc")] == ids[:4]


def test_a_response_that_is_not_stored_is_in_it_all_the_same(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("Hello")
    made = client.conversations.create()
    answer = respond(client, made.id, store=False)
    assert answer.conversation is not None
    assert len(texts(client, made.id)) == 2
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_in_the_background(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("Hello", pause=0.02)
    made = client.conversations.create()
    job = respond(client, made.id, background=True)
    assert job.conversation is not None
    deadline = time.monotonic() + 20
    while (job := client.responses.retrieve(job.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert job.conversation is not None
    assert texts(client, made.id) == [("user", "and?"), ("assistant", "Hello")]


def test_a_function_is_called_and_answered_in_it(roomy: Running) -> None:
    roomy.engine.behaviour = says("<tool_call>\n<function=add>\n</function>\n</tool_call>")
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
    plain = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="none", max_retries=0, http_client=plain) as client:
        made = client.conversations.create()
        called = respond(client, made.id, tools=[tool], max_output_tokens=200)
        (call,) = [item for item in called.output if item.type == "function_call"]
        roomy.engine.behaviour = says("It is 19.")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "19"}
        told = client.responses.create(model=MODEL, input=[result], tools=[tool], conversation=made.id)  # type: ignore[list-item]
        assert told.output_text == "It is 19."
        kinds = [item.type for item in client.conversations.items.list(made.id, order="asc")]
        assert kinds == ["message", "function_call", "function_call_output", "message"]
        client.conversations.items.delete(call.id or "", conversation_id=made.id)
        with pytest.raises(openai.BadRequestError) as orphan:
            respond(client, made.id)
        assert orphan.value.param == "conversation.call_id"


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_answer_adds_nothing(running: Running, client: openai.OpenAI, stream: bool) -> None:
    made = client.conversations.create(items=[USER])
    running.engine.behaviour = fails(engine_pb2.ERROR_CODE_INTERNAL, "broken", after="ab")
    if stream:
        events = list(respond(client, made.id, stream=True))
        assert events[-1].type == "response.failed"
        assert events[-1].response.conversation is None
    else:
        with pytest.raises(openai.InternalServerError):
            respond(client, made.id)
    job = respond(client, made.id, background=True)
    running.wait_for(lambda: client.responses.retrieve(job.id).status == "failed")
    assert client.responses.retrieve(job.id).conversation is None
    running.engine.behaviour = hangs
    body = {"model": MODEL, "input": "and?", "conversation": made.id}
    running.leave("/v1/responses", body, lambda: bool(running.engine.running))
    running.wait_for(lambda: not running.engine.running and running.inference.admission.in_flight == 0)
    assert texts(client, made.id) == [("user", "hi")]


def test_refused_before_anything_is_generated(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = says("Hello")
    made = client.conversations.create(items=[{**USER, "id": "msg_mine"}])
    before = client.responses.create(model=MODEL, input="hi", max_output_tokens=8)
    count = len(running.engine.requests)
    with pytest.raises(openai.BadRequestError) as both:
        respond(client, made.id, previous_response_id=before.id)
    assert both.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as known:
        respond(client, made.id, input=[{**USER, "id": "msg_mine"}])
    assert known.value.param == "input[0].id"
    for unknown in ("conv_" + "0" * 32, "conv_x", {"id": before.id}):
        with pytest.raises(openai.NotFoundError) as missing:
            respond(client, unknown)
        assert missing.value.param == "conversation"
    assert len(running.engine.requests) == count


def test_an_answer_that_cannot_be_added_says_so(
    running: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = client.conversations.create()

    def then(change: Any) -> Any:
        async def behave(*arguments: Any) -> None:
            change()
            await says("Hello")(*arguments)

        return behave

    running.engine.behaviour = then(lambda: monkeypatch.setattr(running.responses, "largest", 200))
    assert respond(client, made.id, store=False).conversation is None
    with pytest.raises(openai.APIStatusError) as large:
        client.conversations.items.create(made.id, items=[{"role": "user", "content": "x" * 300}])
    assert (large.value.status_code, large.value.param) == (413, "items")  # type: ignore[attr-defined]
    monkeypatch.undo()
    running.engine.behaviour = then(lambda: setattr(running.responses, "down", True))
    answer = respond(client, made.id)
    assert (answer.conversation, answer.output_text) == (None, "Hello")
    with pytest.raises(openai.InternalServerError) as away:
        respond(client, made.id)
    assert away.value.status_code == 503
    running.responses.down = False
    running.engine.behaviour = then(running.documents.kept.clear)
    assert respond(client, made.id, store=False).conversation is None


def test_each_key_sees_its_own(tmp_path: Path, start: Starter) -> None:
    keys = Keys(tmp_path / "keys.json")
    secrets = [keys.add(name, Scope.INFERENCE) for name in ("one", "two")]
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
    made = mine.conversations.create(items=[USER])
    item = mine.conversations.items.list(made.id).data[0].id or ""
    them = theirs.conversations
    for call in (them.retrieve, them.delete, them.items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    for call in (them.items.retrieve, them.items.delete):
        with pytest.raises(openai.NotFoundError):
            call(item, conversation_id=made.id)
    with pytest.raises(openai.NotFoundError):
        them.items.create(made.id, items=[USER])
    with pytest.raises(openai.NotFoundError):
        respond(theirs, made.id)
    assert len(list(mine.conversations.items.list(made.id))) == 1
