"""Documents on a real Valkey: stored chats and conversations, beside the responses and within their limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis

from services.common.errors import NewerSchema, NotFound, PayloadTooLarge
from services.common.settings import CommonSettings
from services.gateway.api.completions.stored_chats import change_metadata
from services.gateway.api.responses.documents import Document, DocumentStore
from services.gateway.api.responses.response_object import new_id
from services.gateway.api.responses.store import INDEX, Place, ResponseStore
from services.gateway.settings import GatewaySettings
from tests.integration.servers import RunningServer
from tests.integration.test_response_store import check_account, raw, record

__all__ = ["raw"]
Open = Callable[..., tuple[ResponseStore, DocumentStore]]


@pytest.fixture
async def opened(valkey: RunningServer, settings: CommonSettings) -> AsyncIterator[Open]:
    stores: list[ResponseStore] = []

    def make(**values: Any) -> tuple[ResponseStore, DocumentStore]:
        stores.append(ResponseStore(GatewaySettings(**{"redis_url": settings.redis_url, **values})))
        return stores[-1], DocumentStore(stores[-1])

    yield make
    for store in stores:
        await store.aclose()


def chat(text: str = "hi", **metadata: str) -> Document:
    body = {"id": new_id("x").replace("x_", "chatcmpl-"), "text": text, "metadata": metadata}
    return Document(body, [{"id": "m", "content": text}], {"model": "m", "metadata": metadata})


async def save(store: DocumentStore, owner: str, *documents: Document) -> list[str]:
    for document in documents:
        assert await store.save(Place(owner, document.id), document)
    return [document.id for document in documents]


async def ids(store: DocumentStore, owner: str, **options: Any) -> list[str]:
    wanted = options.pop("wanted", lambda _: True)
    page, _ = await store.chats(owner, wanted, **{"limit": 100, **options})
    return [body["id"] for body in page]


async def test_kept_for_its_owner(opened: Open, raw: redis.Redis) -> None:
    (_, store), (_, other) = opened(), opened()
    kept = chat("naïve 🙂", a="b")
    place = Place("key-1", kept.id)
    await save(store, "key-1", kept)
    assert await other.find(place) == kept, "another gateway finds it"
    for owner in ("", "key-2"):
        assert await store.find(Place(owner, kept.id)) is None
        assert not await store.delete(Place(owner, kept.id))
        assert await ids(store, owner) == []
    assert check_account(raw) > 0
    assert await other.delete(place)
    assert not await other.delete(place)
    assert check_account(raw) == 0
    assert not raw.keys("temper:response:*")
    assert not raw.exists(place.chats)


async def test_lists_of_chats(opened: Open, raw: redis.Redis) -> None:
    responses, store = opened()
    made = await save(store, "me", *(chat(n=str(number % 2)) for number in range(7)))
    await save(store, "you", chat())
    await save(store, "me", Document({"id": new_id("conv")}))
    response = record()
    await responses.save(Place("me", response.id), response)
    assert await ids(store, "me") == made
    assert await ids(store, "me", newest_first=True, limit=3) == made[:3:-1]
    assert await ids(store, "me", after=made[2], limit=2) == made[3:5]
    assert await ids(store, "me", after=made[2], newest_first=True) == made[1::-1]
    odd: Any = {"wanted": lambda tags: tags["metadata"] == {"n": "1"}}
    assert await ids(store, "me", **odd) == made[1::2]
    assert (await store.chats("me", odd["wanted"], limit=2))[1]
    assert not (await store.chats("me", odd["wanted"], limit=3))[1]
    with pytest.raises(NotFound):
        await ids(store, "you", after=made[0])
    await change_metadata(store, Place("me", made[3]), {"n": "9"})
    assert await ids(store, "me") == made, "what is changed keeps its place"
    raw.delete(Place("me", made[0]).key)  # expired
    assert await ids(store, "me") == made[1:]
    assert await ids(store, "me", limit=1, after=made[0]) == made[1:2]
    for name in made[1:]:
        await store.delete(Place("me", name))
    assert await ids(store, "me") == []
    check_account(raw)


async def test_more_chats_than_are_looked_at_at_once(opened: Open) -> None:
    _, store = opened()
    made = await save(store, "me", *(chat(n=str(number)) for number in range(230)))
    assert await ids(store, "me", wanted=lambda tags: tags["metadata"]["n"] in ("5", "150", "229")) == [
        made[5],
        made[150],
        made[229],
    ]


async def test_a_page_is_bounded_in_bytes(opened: Open) -> None:
    _, store = opened()
    made = await save(store, "me", *(chat("x" * 1_500_000) for _ in range(7)))
    page, more = await store.chats("me", lambda _: True, limit=100)
    assert ([body["id"] for body in page], more) == (made[:6], True), "the one that is over 8 MiB is the last"
    assert await ids(store, "me", after=made[5]) == made[6:]


async def test_limits_and_expiry_are_those_of_responses(opened: Open, raw: redis.Redis) -> None:
    responses, store = opened(responses_key_max_bytes=12_000, response_max_bytes=9_000, responses_ttl_seconds=600)
    response = record("x" * 4_000)
    await responses.save(Place("me", response.id), response)
    made = await save(store, "me", *(chat("x" * 1_500) for _ in range(3)))
    assert check_account(raw) <= 12_000
    with pytest.raises(NotFound):
        await responses.load(Place("me", response.id))
    with pytest.raises(PayloadTooLarge, match="9000"):
        await store.save(Place("me", "chatcmpl-x"), chat("x" * 9_000))
    assert await ids(store, "me") == made
    for kept in made:
        assert 0 < raw.ttl(Place("me", kept).key) <= 600
        raw.pexpire(Place("me", kept).key, 0)
        raw.zincrby(INDEX, -600, Place("me", kept).key)
    assert await ids(store, "me") == []
    (last,) = await save(store, "me", chat())
    assert raw.zrange(Place("me", "").chats, 0, -1) == [last], "what has expired is in no list any more"
    check_account(raw)


async def test_changes_are_not_lost(opened: Open) -> None:
    _, store = opened()
    kept = Document({"id": new_id("conv"), "metadata": {}})
    place = Place("me", kept.id)
    await store.save(place, kept)
    first, second = await store.find(place), await store.find(place)
    assert first is not None
    assert second is not None
    first.items.append({"id": "a"})
    second.items.append({"id": "b"})
    assert await store.save(place, first, replaces=True)
    assert not await store.save(place, second, replaces=True), "somebody else was there first"
    found = await store.find(place)
    assert found == first
    await store.delete(place)
    assert not await store.save(place, first, replaces=True), "what is deleted stays so"
    assert await store.find(place) is None


async def test_many_who_change_at_once(opened: Open) -> None:
    stores = [opened()[1] for _ in range(4)]
    kept = Document({"id": new_id("conv"), "metadata": {}})
    place = Place("me", kept.id)
    await stores[0].save(place, kept)

    async def add(number: int) -> None:
        changed = await stores[number % 4].change(place, lambda found: found.items.append({"id": number}))
        assert changed is not None

    await asyncio.gather(*(add(number) for number in range(8)))
    found = await stores[0].find(place)
    assert found is not None
    assert sorted(item["id"] for item in found.items) == list(range(8))
    assert await stores[0].change(Place("you", kept.id), lambda _: None) is None


async def test_of_a_later_release(opened: Open, raw: redis.Redis) -> None:
    _, store = opened()
    (name,) = await save(store, "me", chat())
    raw.hset(Place("me", name).key, "schema", "99")
    with pytest.raises(NewerSchema):
        await store.find(Place("me", name))
