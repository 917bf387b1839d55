"""Claims and kept answers of Idempotency-Keys in a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis

from services.common.errors import Unavailable
from services.common.settings import CommonSettings
from services.gateway.api.base.idempotency import CLAIM_SECONDS, KEEP_SECONDS, Answer, RedisRecords
from tests.integration.servers import RunningServer


@pytest.fixture
async def records(settings: CommonSettings, valkey: RunningServer) -> AsyncIterator[RedisRecords]:
    records = RedisRecords(settings)
    yield records
    await records.aclose()


async def test_life_of_a_key(records: RedisRecords, raw: redis.Redis) -> None:
    assert await records.claim("k", "sha", "mine") == ("new", "")
    assert await records.claim("k", "sha", "mine") == ("new", ""), "the same claim again: its answer got lost"
    assert await records.claim("k", "sha", "other") == ("running", "")
    assert await records.claim("k", "another", "other") == ("other", "")
    assert 0 < raw.ttl("temper:answer:k") <= CLAIM_SECONDS

    raw.expire("temper:answer:k", 1)
    await records.renew("k", "other")
    assert raw.ttl("temper:answer:k") <= 1, "only who has claimed it renews it"
    await records.renew("k", "mine")
    assert raw.ttl("temper:answer:k") > 1

    packed = Answer(201, {"location": "/x"}, '{"ü": "\u2028"}'.encode()).pack()
    await records.finish("k", "other", "nonsense")
    await records.abandon("k", "other")
    await records.finish("k", "mine", packed)
    assert await records.claim("k", "sha", "other") == ("done", packed)
    assert await records.claim("k", "another", "other") == ("other", "")
    assert KEEP_SECONDS - 60 < raw.ttl("temper:answer:k") <= KEEP_SECONDS
    assert Answer.unpack(packed) == Answer(201, {"location": "/x"}, '{"ü": "\u2028"}'.encode())


async def test_one_of_many_wins_and_an_abandoned_key_is_free(records: RedisRecords) -> None:
    claims = await asyncio.gather(*(records.claim("k", "sha", str(number)) for number in range(30)))
    assert sorted(state for state, _ in claims) == ["new"] + ["running"] * 29
    winner = str([state for state, _ in claims].index("new"))
    await records.abandon("k", winner)
    assert await records.claim("k", "another", "next") == ("new", "")


async def test_a_dead_gateways_claim_ends(records: RedisRecords, raw: redis.Redis) -> None:
    assert (await records.claim("k", "sha", "dead"))[0] == "new"
    raw.pexpire("temper:answer:k", 20)
    await asyncio.sleep(0.05)
    assert (await records.claim("k", "sha", "next"))[0] == "new"
    await records.finish("k", "dead", "too late")
    assert (await records.claim("k", "sha", "third"))[0] == "running"


async def test_without_redis(records: RedisRecords, valkey: RunningServer) -> None:
    with valkey.down(), pytest.raises(Unavailable):
        await records.claim("k", "sha", "mine")
