"""The limits' arithmetic against its definition, and the limiter in memory."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.security.api_keys import MAX_PER_MINUTE
from services.gateway.rate_limits.limiter import _duration
from services.gateway.rate_limits.limits import Limits
from services.gateway.rate_limits.memory_limiter import MINUTE, Bucket, MemoryLimiter

LIMITS = st.one_of(st.integers(1, 20), st.integers(1, MAX_PER_MINUTE))
PAUSES = st.one_of(st.integers(0, 3), st.integers(0, 3 * MINUTE))


def conforms(granted: list[tuple[int, int]], limit: int, now: int, cost: int) -> bool:
    """The definition: in every time that ends now, at most a minute's worth and what leaked in that time is admitted
    (R. Cruz, "A calculus for network delay", IEEE Trans. Inf. Theory 37, 1991: an arrival curve sigma + rho t)."""
    sums = cost
    for then, amount in reversed([*granted, (now, 0)]):
        sums += amount
        if sums > limit + Fraction(limit * (now - then), MINUTE):
            return False
    return True


@settings(max_examples=150)
@given(limit=LIMITS, steps=st.lists(st.tuples(PAUSES, st.floats(0, 1.2)), max_size=40))
def test_admits_exactly_what_the_definition_does(limit: int, steps: list[tuple[int, float]]) -> None:
    bucket, granted, now = Bucket(), list[tuple[int, int]](), 10**15
    for pause, share in steps:
        now += pause
        cost = int(limit * share)
        bucket.leak(limit, now)
        wait = bucket.wait(limit, cost)
        assert (wait == 0) == conforms(granted, limit, now, cost)
        if wait and cost <= limit:  # the wait is right to the microsecond
            assert conforms(granted, limit, now + wait, cost)
            assert not conforms(granted, limit, now + wait - 1, cost)
        if not wait:
            bucket.add(cost)
            granted.append((now, cost))
        room = bucket.remaining(limit)
        assert bucket.wait(limit, room) == 0
        assert bucket.wait(limit, room + 1) > 0
        empty = now + bucket.empty_in(limit)
        assert conforms(granted, limit, empty, limit)
        assert bucket.level <= limit * MINUTE < 2**53


@settings(max_examples=100)
@given(
    limit=st.integers(1, 1000),
    steps=st.lists(st.tuples(PAUSES, st.integers(0, 1000), st.floats(0, 1.5)), max_size=30),
)
def test_corrections_against_exact_arithmetic(limit: int, steps: list[tuple[int, int, float]]) -> None:
    """Reserve, then use less or more: the level is that of a bucket of fractions, and over-use is paid before the next
    one is admitted."""
    bucket, level, now = Bucket(), Fraction(0), 10**15
    for pause, cost, used in steps:
        now += pause
        level = max(Fraction(0), level - Fraction(limit * pause, MINUTE))
        bucket.leak(limit, now)
        admitted = bucket.wait(limit, cost) == 0
        assert admitted == (level + cost <= limit)
        if admitted:
            spent = int(cost * used)
            bucket.add(cost)
            bucket.add(spent - cost)
            level = max(Fraction(0), level + spent)
        assert Fraction(bucket.level, MINUTE) == level


def test_a_clock_that_goes_back_leaks_nothing() -> None:
    bucket = Bucket()
    bucket.leak(60, 5_000_000)
    bucket.add(60)
    bucket.leak(60, 4_000_000)
    assert bucket.remaining(60) == 0


def test_three_limits_of_one_caller() -> None:
    limiter, limits = MemoryLimiter(), Limits(requests_per_minute=3, tokens_per_minute=100, concurrent_requests=2)
    assert limiter.acquire("a", limits, "1", 0).by is None
    assert limiter.acquire("a", limits, "2", 0).by is None
    busy = limiter.acquire("a", limits, "3", 0)
    assert (busy.by, busy.wait) == ("concurrency", 1_000_000)
    assert limiter.acquire("a", limits, "3", 0) == busy, "a refusal costs nothing"
    assert limiter.acquire("b", limits, "1", 0).by is None, "callers do not share"
    limiter.release("a", "1")
    assert limiter.acquire("a", limits, "3", 0).by is None
    limiter.release("a", "2")
    limiter.release("a", "3")
    full = limiter.acquire("a", limits, "4", 0)
    assert (full.by, full.wait) == ("requests", 20_000_000)
    later = limiter.acquire("a", limits, "4", 20_000_000)
    assert later.by is None
    limiter.release("a", "4")

    assert limiter.take("a", limits, 90, 20_000_000).by is None
    refused = limiter.take("a", limits, 11, 20_000_000)
    assert (refused.by, refused.wait) == ("tokens", 600_000)
    limiter.correct("a", limits, -80, 20_000_000)
    assert limiter.take("a", limits, 90, 20_000_000).by is None
    limiter.correct("a", limits, 60, 20_000_000)  # it used 150
    spent = limiter.acquire("a", limits, "5", 20_000_000 + 40_000_000)
    assert spent.by is None
    assert spent.tokens is not None
    assert spent.tokens.remaining == 6
    assert limiter.leases() == {"a": {"5"}, "b": {"1"}}


def test_durations() -> None:
    texts = {0: "0ms", 1: "1ms", 17_000: "17ms", 1_000_000: "1s", 1_500_000: "1.5s", 59_999_001: "1m0s"}
    assert {time: _duration(time) for time in texts} == texts
    assert _duration(360_000_000) == "6m0s"
