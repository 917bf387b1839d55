"""Bandwidth: expected durations of loads."""

from __future__ import annotations

import random

import pytest

from services.engine.kv_cache.keys import Tier
from services.engine.kv_offload.worker import Bandwidth

_GB = 10**9


def test_first_guesses() -> None:
    bandwidth = Bandwidth(40 * _GB)
    assert bandwidth.seconds(Tier.HOST, _GB) == pytest.approx(0.025, rel=0.01)
    assert bandwidth.seconds(Tier.DISK, 3 * _GB) == pytest.approx(1.075, rel=0.01)
    assert bandwidth.seconds(Tier.STORE, 3 * _GB) == pytest.approx(10.1, rel=0.01)
    assert bandwidth.seconds(Tier.STORE, 0) == pytest.approx(0.02, rel=0.01)


def test_latency_and_bandwidth_are_learnt_from_loads_of_all_sizes() -> None:
    bandwidth, sizes = Bandwidth(40 * _GB), random.Random(1)
    for _ in range(200):
        size = sizes.choice([50_000, 50_000_000, 500_000_000])
        bandwidth.measured(Tier.DISK, size, (0.004 + size / (0.5 * _GB)) * sizes.uniform(0.9, 1.1))
    for size in (50_000, 50_000_000, 500_000_000):
        assert bandwidth.price(Tier.DISK, size) == pytest.approx(0.004 + size / (0.5 * _GB), rel=0.2)


def test_a_hiccup_is_no_rule() -> None:
    bandwidth = Bandwidth(40 * _GB)
    for _ in range(4):
        bandwidth.measured(Tier.DISK, _GB, 0.5)
    before = bandwidth.price(Tier.DISK, _GB)
    bandwidth.measured(Tier.DISK, _GB, 1000.0)
    assert before < bandwidth.price(Tier.DISK, _GB) < 4 * before
    bandwidth.measured(Tier.DISK, _GB, 0.0)
    assert bandwidth.price(Tier.DISK, _GB) > 0


def test_what_is_under_way_comes_first() -> None:
    bandwidth = Bandwidth(40 * _GB)
    alone = bandwidth.seconds(Tier.DISK, _GB)
    bandwidth.begin(Tier.DISK, 3 * _GB)
    assert bandwidth.seconds(Tier.DISK, _GB) == pytest.approx(alone + 1, rel=0.01)
    assert bandwidth.price(Tier.DISK, _GB) == pytest.approx(alone)
    bandwidth.end(Tier.DISK, 3 * _GB)
    assert bandwidth.seconds(Tier.DISK, _GB) == pytest.approx(alone)


def test_the_first_measurement_counts_more_than_the_guess() -> None:
    bandwidth = Bandwidth(40 * _GB)
    host = bandwidth.price(Tier.HOST, _GB)
    bandwidth.measured(Tier.DISK, _GB, 2.0)
    assert bandwidth.price(Tier.DISK, _GB) - host == pytest.approx(2.0, rel=0.02)
    bandwidth.measured(Tier.DISK, _GB, 1.0)
    assert bandwidth.price(Tier.DISK, _GB) - host == pytest.approx(1.5, rel=0.02)
    # A bus is what it is said to be.
    bandwidth.measured(Tier.HOST, _GB, 2 * host)
    assert bandwidth.price(Tier.HOST, _GB) < 1.5 * host


def test_what_has_not_come_in_time_teaches_as_well() -> None:
    bandwidth = Bandwidth(40 * _GB)
    host = bandwidth.price(Tier.HOST, _GB)
    before = bandwidth.price(Tier.DISK, _GB)
    bandwidth.begin(Tier.DISK, _GB)
    bandwidth.late(Tier.DISK, 0.1)
    assert bandwidth.price(Tier.DISK, _GB) == pytest.approx(before, rel=1e-3), "that is not late"
    bandwidth.late(Tier.DISK, 1.0)
    assert bandwidth.price(Tier.DISK, _GB) - host == pytest.approx(1.0, rel=0.02)


def test_a_slow_time_is_forgotten_and_then_the_first_guess_holds() -> None:
    """A tier that seems slow is not loaded from, so nothing else would ever correct that."""
    now = [0.0]
    bandwidth = Bandwidth(40 * _GB, lambda: now[0])
    guess = bandwidth.price(Tier.DISK, _GB)
    bandwidth.measured(Tier.DISK, _GB, 2.0)
    slow = bandwidth.price(Tier.DISK, _GB)
    now[0] = 60.0
    assert bandwidth.price(Tier.DISK, _GB) == pytest.approx((slow + guess) / 2)
    now[0] = 3600.0
    assert bandwidth.price(Tier.DISK, _GB) == pytest.approx(guess)
    bandwidth.measured(Tier.DISK, _GB, 0.1)
    fast = bandwidth.price(Tier.DISK, _GB)
    now[0] = 7200.0
    assert fast < guess
    assert bandwidth.price(Tier.DISK, _GB) == pytest.approx(fast), "a fast one is used, and learnt anew when it is"
