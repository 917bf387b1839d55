"""How long loads take."""

from __future__ import annotations

import random

import pytest

from services.engine.memory.tiers.bandwidth import Bandwidth
from services.engine.memory.tiers.ports import Tier

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
