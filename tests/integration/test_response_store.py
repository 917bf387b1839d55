"""The store of responses on a real Valkey: what is kept, for whom, how long and how much of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import redis

from services.common.errors import InvalidRequest, NotFound, PayloadTooLarge, Unavailable
from services.common.settings import CommonSettings
from services.gateway.api.responses import store as keys
from services.gateway.api.responses.response_object import Record, given_items, new_response
from services.gateway.api.responses.serving import BackgroundResponses, Work
from services.gateway.api.responses.store import BestEffortStore, Place, ResponseStore
from services.gateway.protocol.responses.request import ResponseRequest
from services.gateway.settings import GatewaySettings
from tests.integration.servers import RunningServer

Open = Callable[..., ResponseStore]


@pytest.fixture
def gateway_settings(settings: CommonSettings) -> Callable[..., GatewaySettings]:
    return lambda **values: GatewaySettings(**{"redis_url": settings.redis_url, **values})


@pytest.fixture
async def opened(valkey: RunningServer, gateway_settings: Callable[..., GatewaySettings]) -> AsyncIterator[Open]:
    stores: list[ResponseStore] = []

    def make(**values: object) -> ResponseStore:
        stores.append(ResponseStore(gateway_settings(**values)))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


@pytest.fixture
def raw(valkey: RunningServer, settings: CommonSettings) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(settings.redis_url.get_secret_value(), decode_responses=True, protocol=2) as client:
        yield client


def record(text: str = "hi", *, background: bool = False, status: str | None = None) -> Record:
    body = ResponseRequest.model_validate({"model": "m", "input": text, "background": background})
    response = new_response(body)
    response["status"] = status or response["status"]
    return Record(response, given_items(text, response["id"]))


def check_account(raw: redis.Redis) -> int:
    """The sum of the sizes is what is told, and nothing is known that is not there; returns the sum."""
    sizes = raw.hgetall(keys.SIZES)
    assert set(sizes) == set(raw.zrange(keys.INDEX, 0, -1))
    total = sum(map(int, sizes.values()))
    assert int(raw.get(keys.BYTES) or 0) == total
    by_owner: dict[str, int] = {}
    for key, size in sizes.items():
        owner = key.split(":")[2]
        if owner:
            by_owner[owner] = by_owner.get(owner, 0) + int(size)
            assert raw.zscore(f"{keys.INDEX}:{owner}", key) is not None
    assert {owner: int(size) for owner, size in raw.hgetall(keys.OWNERS).items()} == by_owner
    assert len(raw.keys(f"{keys.INDEX}:*")) == len(by_owner)
    return total


async def test_kept_for_its_owner(opened: Open, raw: redis.Redis) -> None:
    store, other = opened(), opened()
    kept = record("naïve 🙂")
    place = Place("key-1", kept.id)
    assert await store.save(place, kept)
    assert await other.load(place) == kept, "another gateway finds it"
    for owner in ("", "key-2"):
        with pytest.raises(NotFound):
            await store.load(Place(owner, kept.id))
        with pytest.raises(NotFound):
            await store.delete(Place(owner, kept.id))
        with pytest.raises(NotFound):
            await store.cancel(Place(owner, kept.id))
    assert "key-1" not in place.key
    assert check_account(raw) > 0
    await other.delete(place)
    with pytest.raises(NotFound) as gone:
        await store.load(place, param="previous_response_id")
    assert gone.value.param == "previous_response_id"
    assert check_account(raw) == 0


async def test_bounded_in_bytes(opened: Open, raw: redis.Redis) -> None:
    store = opened(responses_max_bytes=20_000, response_max_bytes=9_000)
    places = []
    for _ in range(5):
        kept = record("x" * 5_000)
        places.append(Place("", kept.id))
        await store.save(places[-1], kept)
        assert check_account(raw) <= 20_000
    present = [bool(raw.exists(place.key)) for place in places]
    assert present == [False, False, True, True, True], "the oldest make room"
    replaced = record("x" * 100)
    replaced.response["id"] = places[-1].id
    before = check_account(raw)
    await store.save(places[-1], replaced)
    assert check_account(raw) < before, "what is replaced does not count twice"
    with pytest.raises(PayloadTooLarge) as large:
        await store.save(Place("", kept.id), record("x" * 10_000))
    assert "9000" in large.value.message
    with pytest.raises(PayloadTooLarge):
        await opened(responses_max_bytes=500).save(Place("", kept.id), record("x" * 600))
    assert check_account(raw) > 500, "what cannot be kept drives nothing out"
    nothing = opened(responses_max_bytes=0)
    answered = record()
    await BestEffortStore(nothing).keep(Place("", answered.id), answered)
    assert answered.response["store"] is False


async def test_an_owner_pushes_out_its_own_only(opened: Open, raw: redis.Redis) -> None:
    store = opened(responses_key_max_bytes=12_000, responses_max_bytes=40_000, response_max_bytes=20_000)
    theirs = [Place("careful", record().id), Place("", record().id)]
    for place in theirs:
        kept = record("x" * 3_000)
        kept.response["id"] = place.id
        await store.save(place, kept)
    mine = []
    for _ in range(6):
        kept = record("x" * 4_000)
        mine.append(Place("greedy", kept.id))
        await store.save(mine[-1], kept)
        check_account(raw)
    assert all(raw.exists(place.key) for place in theirs)
    assert [bool(raw.exists(place.key)) for place in mine] == [False] * 4 + [True] * 2
    with pytest.raises(PayloadTooLarge) as large:
        await store.save(Place("greedy", record().id), record("x" * 12_500))
    assert "12000" in large.value.message
    everybody = record("x" * 12_500)
    assert await store.save(Place("", everybody.id), everybody), "without keys only the sum counts"
    for place in (*theirs, *mine[-2:]):
        await store.delete(place)
    check_account(raw)
    none = opened(responses_key_max_bytes=0)
    answered = record()
    await BestEffortStore(none).keep(Place("greedy", answered.id), answered)
    assert answered.response["store"] is False


async def test_expires(opened: Open, raw: redis.Redis) -> None:
    store = opened(responses_ttl_seconds=1)
    first = record()
    await store.save(Place("", first.id), first)
    deadline = time.monotonic() + 10
    while raw.exists(Place("", first.id).key):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    with pytest.raises(NotFound):
        await store.load(Place("", first.id))
    second = record()
    await store.save(Place("", second.id), second)
    assert raw.hkeys(keys.SIZES) == [Place("", second.id).key], "what has expired is not counted any more"
    check_account(raw)


async def test_cancel(opened: Open) -> None:
    store = opened()
    foreground, running = record(), record(background=True)
    done = record(background=True, status="completed")
    for kept in (foreground, running, done):
        await store.save(Place("", kept.id), kept)
    with pytest.raises(InvalidRequest):
        await store.cancel(Place("", foreground.id))
    assert (await store.cancel(Place("", done.id))).status == "completed"
    place = Place("", running.id)
    assert await store.beat([(place, "in_progress")]) == [True]
    assert (await store.load(place)).status == "in_progress"
    assert (await store.cancel(place)).status == "cancelled"
    assert (await store.cancel(place)).status == "cancelled"
    assert await store.beat([(place, "in_progress"), (Place("", "resp_x"), "queued")]) == [False, False]
    running.response["status"] = "completed"
    assert not await store.save(place, running, only_active=True), "the answer comes too late"
    assert (await store.load(place)).status == "cancelled"


async def test_silence_is_failure(opened: Open, raw: redis.Redis) -> None:
    store = opened(response_lease_seconds=60, response_beat_seconds=10)
    kept = record(background=True)
    place = Place("", kept.id)
    await store.save(place, kept)
    assert (await store.load(place)).status == "queued"
    for _ in range(4):
        raw.hincrbyfloat(place.key, "beat", -40)  # so long ago was the last one
        assert await store.beat([(place, "in_progress")]) == [True]
    assert (await store.load(place)).status == "in_progress"
    raw.hincrbyfloat(place.key, "beat", -61)
    lost = await store.load(place)
    assert lost.status == "failed"
    assert lost.response["error"] == {"code": "server_error", "message": keys.LOST}
    assert await store.beat([(place, "in_progress")]) == [False], "it stays so"


async def test_without_redis(opened: Open, valkey: RunningServer) -> None:
    store = opened()
    kept = record()
    await store.save(Place("", kept.id), kept)
    with valkey.down():
        with pytest.raises(Unavailable) as away:
            await store.load(Place("", kept.id))
        assert "redis://" not in away.value.message
    assert await store.load(Place("", kept.id)) == kept, "a restart loses nothing"


async def test_cancelled_by_another_gateway(opened: Open, gateway_settings: Callable[..., GatewaySettings]) -> None:
    store, other, stopping = opened(), opened(), asyncio.Event()
    background = BackgroundResponses(store, gateway_settings(response_beat_seconds=0.05), stopping)
    background.start()
    kept = record(background=True)
    place = Place("", kept.id)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def generate() -> None:
        kept.response["status"] = "in_progress"
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    await store.save(place, kept)
    background.begin(Work(place, kept, generate, lambda _: None, ()))
    async with asyncio.timeout(60):
        await begun.wait()
        while True:  # the beat tells it
            if (await other.load(place)).status == "in_progress":
                break
            await asyncio.sleep(0.02)
        assert (await other.cancel(place)).status == "cancelled"
        await ended.wait()
    assert (await other.load(place)).status == "cancelled"
    stopping.set()
    await background.stop()
    assert background.running == 0
