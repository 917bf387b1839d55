"""The judge of a soak tells growth from noise, and a short soak does everything that a long one does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.soak.flatness import Bound, judge, of_even_traffic, slope, spark
from tests.soak.run import LOG_BYTES_A_REQUEST, Plan, soak, stack_of
from tests.soak.samples import family

BOUND = Bound(0.05, 4.0)


def noisy(growth: float, *, count: int = 200, noise: float = 10.0) -> list[tuple[float, float]]:
    """A series around 100 that grows by so much in all, with noise and outliers."""
    rng = random.Random(1)
    shares = [number / count for number in range(count)]
    outliers = [300.0 if rng.random() < 0.05 else 0.0 for _ in shares]
    return [
        (600 * share, 100 + growth * share + rng.uniform(-noise, noise) + more)
        for share, more in zip(shares, outliers, strict=True)
    ]


def test_growth_is_told_from_noise() -> None:
    for growth, flat in ((0.0, True), (-50.0, True), (8.0, True), (60.0, False)):
        verdict = judge("rss engine", noisy(growth), BOUND, warm_up=0.4)
        assert verdict.flat is flat, verdict
        assert verdict.growth == pytest.approx(0.6 * growth, abs=4.0)
        assert verdict.limit == pytest.approx(9.0, abs=3.0)


def test_a_warm_up_does_not_count() -> None:
    points = [(float(at), min(at, 40) * 10.0) for at in range(101)]
    assert judge("keys all", points, BOUND, warm_up=0.4).flat
    assert not judge("keys all", points, BOUND, warm_up=0.0).flat
    assert slope(points[:41]) == pytest.approx(10.0)
    assert slope(points[:1]) == 0.0
    assert spark([0.0, 5.0, 10.0]) == "▁▅█"


@pytest.mark.parametrize("leak", [0.0, 0.5])
def test_what_stays_for_a_time_counts_beside_the_traffic_of_that_time(leak: float) -> None:
    """Traffic halves in the middle and comes back: keys that stay 60 seconds follow it, and a leak is still seen."""
    rate = [5.0 if 300 <= at < 450 else 10.0 for at in range(600)]
    done = [(float(at), sum(rate[:at])) for at in range(600)]
    keys = [(at, sum(rate[max(0, int(at) - 60) : int(at)]) + leak * at) for at, _ in done]
    verdict = judge("keys all", of_even_traffic(keys, done, 60.0), BOUND, warm_up=0.4)
    assert verdict.flat is (leak == 0.0), verdict


def test_keys_of_one_kind_are_one_series() -> None:
    assert family("temper:job:job-01") == "temper:job"
    assert family("temper:job:job-01:events") == "temper:job:events"
    assert family("temper:jobs:index") == "temper:jobs"
    assert family("temper:adapters") == "temper:adapters"


@pytest.mark.thorough
def test_a_short_soak(tmp_path: Path) -> None:
    """Of memory and keys it says nothing: caches are not full so soon, and retention has not begun."""
    plan = Plan(seconds=30.0, every=0.5, pause=0.05)
    with stack_of(tmp_path / "data", plan) as stack:
        outcome = soak(stack, plan)
    assert outcome.problems == []
    assert {"chat", "session", "response", "batch", "training_session", "swap"} <= set(outcome.done)
    assert 0 < outcome.log_bytes_a_request < LOG_BYTES_A_REQUEST
    judged = {one.name: one for one in outcome.verdicts}
    assert {"rss engine", "handles gateway", "threads s3", "disk valkey", "objects adapters"} <= set(judged)
    assert [one for name, one in judged.items() if name.startswith("threads") and not one.flat] == []
    assert judged["keys temper:batch"].peak > 0
