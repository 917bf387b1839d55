"""Limits of keys in a real Valkey: shared by gateways, the same as in memory, and no outage when it is away."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator

import pytest
import redis

from services.common.errors import RateLimited
from services.common.settings import CommonSettings
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.rate_limits import redis_limiter as scripts
from services.gateway.rate_limits import redis_limiter as shared
from services.gateway.rate_limits.limiter import Grant, RateLimiter
from services.gateway.rate_limits.limits import Decision, Level, Limits
from services.gateway.rate_limits.memory_limiter import MemoryLimiter
from services.gateway.rate_limits.redis_limiter import CALL_SECONDS, PROBE_SECONDS
from tests.integration.servers import RunningServer

ME = "k-me"


@pytest.fixture
async def two(
    settings: CommonSettings, valkey: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[RateLimiter, RateLimiter]]:
    """The limiters of two gateways; patient ones, because a Valkey on a busy machine is slow without being away."""
    monkeypatch.setattr(shared, "CALL_SECONDS", 5.0)
    pair = RateLimiter(settings, GatewayMetrics()), RateLimiter(settings, GatewayMetrics())
    for quotas in pair:
        await quotas.start()
    yield pair
    for quotas in pair:
        await quotas.stop()


async def acquired(quotas: RateLimiter, limits: Limits) -> Grant | None:
    grant = Grant(quotas, ME, limits)
    try:
        await grant.acquire()
    except RateLimited:
        return None
    return grant


async def test_two_gateways_share_a_limit(two: tuple[RateLimiter, RateLimiter]) -> None:
    limits = Limits(requests_per_minute=100)
    grants = await asyncio.gather(*(acquired(two[number % 2], limits) for number in range(300)))
    assert sum(grant is not None for grant in grants) == 100
    assert {quotas._metrics.quota_shared._value.get() for quotas in two} == {1.0}


async def test_concurrency_is_shared_and_given_back(two: tuple[RateLimiter, RateLimiter], raw: redis.Redis) -> None:
    limits = Limits(concurrent_requests=3)
    first = [await acquired(two[number % 2], limits) for number in range(4)]
    assert [grant is not None for grant in first] == [True, True, True, False]
    for grant in first[:2]:
        assert grant is not None
        grant.release()
        grant.release()
    await asyncio.sleep(0.1)
    assert raw.zcard(scripts.leases_key(ME)) == 1
    second = [await acquired(two[number % 2], limits) for number in range(3)]
    assert [grant is not None for grant in second] == [True, True, False]


async def test_leases_of_a_killed_gateway_expire_and_those_of_a_live_one_do_not(
    two: tuple[RateLimiter, RateLimiter], raw: redis.Redis
) -> None:
    dead, live = two
    limits = Limits(concurrent_requests=2)
    assert await acquired(dead, limits)
    mine = await acquired(live, limits)
    assert mine is not None
    assert await acquired(live, limits) is None
    expires = dict(raw.zrange(scripts.leases_key(ME), 0, -1, withscores=True))
    now = raw.time()[0] * 1e6
    assert all(now < score < now + (scripts.LEASE_SECONDS + 5) * 1e6 for score in expires.values())
    # Half a minute later: only the live gateway has renewed its lease.
    raw.zadd(scripts.leases_key(ME), dict.fromkeys(expires, now - 1))
    live._shared.renew()
    assert await acquired(live, limits)
    assert await acquired(live, limits) is None


async def test_tokens_are_reserved_and_corrected(two: tuple[RateLimiter, RateLimiter]) -> None:
    limits = Limits(tokens_per_minute=1000)
    first, second = [await acquired(quotas, limits) for quotas in two]
    assert first is not None
    assert second is not None
    await first.take(900)
    with pytest.raises(RateLimited, match="1000 tokens a minute"):
        await second.take(200)
    first.correct(-800)
    while True:
        try:
            await second.take(880)
            break
        except RateLimited:
            await asyncio.sleep(0.01)
    second.correct(500)  # it used far more: nobody gets anything before that is paid
    await asyncio.sleep(0.1)
    assert await acquired(two[0], limits) is None
    assert int(second.headers()["x-ratelimit-remaining-tokens"]) <= 25


def test_lua_decides_as_python_does(raw: redis.Redis) -> None:
    """Random calls at the same times to both."""
    clock = {name: raw.register_script(_with_clock(script)) for name, script in _SCRIPTS.items()}
    rng = random.Random(5)
    for limits in (Limits(7, 1000, 3), Limits(100_000_000, 100_000_000, 0), Limits(0, 50, 1), Limits(1, 0, 0)):
        raw.flushall()
        local, now, running = MemoryLimiter(), 1_700_000_000_000_000, list[str]()
        for number in range(150):
            now += rng.choice((0, 1, 1000, 1_000_000, 30_000_000))
            # Leases would expire by the clock, which is not what is compared here.
            if running:
                raw.zadd(scripts.leases_key(ME), dict.fromkeys(running, now + 1))
            chosen = rng.random()
            budget = limits.tokens_per_minute
            if chosen < 0.4:
                args: list[str | int] = [
                    limits.requests_per_minute,
                    budget,
                    limits.concurrent_requests,
                    str(number),
                    now,
                ]
                reply = clock["acquire"](keys=[scripts.bucket_key(ME), scripts.leases_key(ME)], args=args)
                mine = local.acquire(ME, limits, str(number), now)
                if mine.by is None and limits.concurrent_requests:
                    running.append(str(number))
            elif chosen < 0.7 and budget:
                cost = rng.randint(0, budget)
                reply = clock["take"](keys=[scripts.bucket_key(ME)], args=[budget, cost, 0, now])
                mine = local.take(ME, limits, cost, now)
            elif chosen < 0.85 and budget:
                cost = rng.randint(-budget, budget)
                reply = clock["take"](keys=[scripts.bucket_key(ME)], args=[budget, cost, 1, now])
                local.correct(ME, limits, cost, now)
                mine = local.take(ME, limits, 0, now, force=True)
            elif running:
                lease = running.pop(rng.randrange(len(running)))
                raw.evalsha(raw.script_load(scripts.RELEASE), 1, scripts.leases_key(ME), lease)
                local.release(ME, lease)
                continue
            else:
                continue
            assert _comparable(reply, limits, chosen < 0.4) == mine


_SCRIPTS = {"acquire": scripts.ACQUIRE, "take": scripts.TAKE}


def _with_clock(script: str) -> str:
    """The script on a clock that the test sets: its last argument."""
    assert scripts.CLOCK in script
    return script.replace(scripts.CLOCK, "local function clock() return tonumber(ARGV[#ARGV]) end")


def _comparable(reply: list[str | int], limits: Limits, acquired: bool) -> Decision:
    by, wait, requests, requests_empty, tokens, tokens_empty = reply
    levels = Level(requests, requests_empty), Level(tokens, tokens_empty)  # type: ignore[arg-type]
    return Decision(
        by or None,  # type: ignore[arg-type]
        int(wait),
        levels[0] if limits.requests_per_minute and acquired else None,
        levels[1] if limits.tokens_per_minute else None,
    )


async def back(quotas: RateLimiter) -> None:
    """Until the limits are shared again."""
    deadline = time.monotonic() + 10
    while quotas._shared.away:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_valkey_killed(two: tuple[RateLimiter, RateLimiter], valkey: RunningServer, raw: redis.Redis) -> None:
    quotas, limits = two[0], Limits(requests_per_minute=10, concurrent_requests=5)
    held = [await acquired(quotas, limits) for _ in range(3)]
    with valkey.down():
        rest = [await acquired(quotas, limits) for _ in range(9)]
        assert sum(grant is not None for grant in rest) == 2, "three of five run already"
        assert quotas._shared.away
        for grant in [*held, *rest]:
            if grant is not None:
                grant.release()
        more = [await acquired(quotas, limits) for _ in range(9)]
        assert sum(grant is not None for grant in more) == 5, "ten a minute, of which five are used"
        assert quotas._metrics.quota_fallbacks._value.get() == 1
    await back(quotas)
    raw.delete(scripts.leases_key(ME))
    quotas._shared.renew()
    assert await acquired(quotas, limits) is None, "the requests that run count again in a Valkey that had lost them"
    assert await acquired(two[1], limits), "the other one notices by its broken connection, and goes on alone"
    await back(two[1])
    assert await acquired(two[1], limits) is None


async def test_a_frozen_valkey_costs_little(
    two: tuple[RateLimiter, RateLimiter], valkey: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas, limits = two[0], Limits(requests_per_minute=100_000, tokens_per_minute=10_000_000)

    async def timed() -> float:
        began = time.perf_counter()
        grant = await acquired(quotas, limits)
        assert grant is not None
        await grant.take(10)
        grant.correct(-5)
        grant.release()
        return time.perf_counter() - began

    await timed()
    monkeypatch.setattr(shared, "CALL_SECONDS", CALL_SECONDS)
    with valkey.frozen():
        first = await asyncio.gather(*(timed() for _ in range(200)))
        assert CALL_SECONDS < max(first) < 100 * CALL_SECONDS, "everybody waits once, at the same time"
        until = time.monotonic() + 1.5 * PROBE_SECONDS  # one probe falls into this time
        while time.monotonic() < until:
            with pytest.raises(StopIteration):
                timed().send(None)  # runs to its end without waiting for anything
            await asyncio.sleep(0.01)
        assert quotas._metrics.quota_fallbacks._value.get() == 1
    monkeypatch.setattr(shared, "CALL_SECONDS", 5.0)
    await back(quotas)
    # Answers to what was sent before the freeze are nobody's answers now.
    decision = await quotas._shared.acquire("k-other", Limits(requests_per_minute=7), "lease")
    assert decision is not None
    assert decision.requests is not None
    assert decision.requests.remaining == 6


async def test_scripts_that_valkey_has_forgotten(two: tuple[RateLimiter, RateLimiter], raw: redis.Redis) -> None:
    limits = Limits(requests_per_minute=3)
    assert await acquired(two[0], limits)
    raw.script_flush()
    grants = await asyncio.gather(*(acquired(two[0], limits) for _ in range(5)))
    assert sum(grant is not None for grant in grants) == 2
    assert not two[0]._shared.away


async def test_a_probe_that_gets_no_thread_is_not_the_last(
    two: tuple[RateLimiter, RateLimiter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is looked up in a thread, which the system may not give: limits are shared again when it does."""
    redis_side = two[0]._shared
    probes, greet = itertools.count(), redis_side._greet

    async def starved() -> None:
        if next(probes) == 0:
            raise RuntimeError("can't start new thread")
        await greet()

    monkeypatch.setattr(redis_side, "_greet", starved)
    redis_side._note_loss(OSError("a test says so"))
    redis_side._wake.set()
    await back(two[0])
    assert next(probes) > 1
    assert await acquired(two[0], Limits(requests_per_minute=1))
    assert await acquired(two[1], Limits(requests_per_minute=1)) is None


async def test_a_client_that_leaves_while_it_waits_holds_nothing(
    two: tuple[RateLimiter, RateLimiter], raw: redis.Redis
) -> None:
    limits = Limits(concurrent_requests=1)
    waiting = asyncio.ensure_future(acquired(two[0], limits))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await asyncio.sleep(0.1)
    assert raw.zcard(scripts.leases_key(ME)) == 0
    assert await acquired(two[1], limits)


def test_state_goes_away_by_itself(raw: redis.Redis) -> None:
    keys = [scripts.bucket_key(ME), scripts.leases_key(ME)]
    raw.register_script(scripts.ACQUIRE)(keys=keys, args=[10, 1000, 5, "lease"])
    raw.register_script(scripts.TAKE)(keys=keys[:1], args=[1000, 1000, 0])
    assert 60 < raw.ttl(keys[0]) <= 121
    assert 0 < raw.ttl(keys[1]) <= 2 * scripts.LEASE_SECONDS
