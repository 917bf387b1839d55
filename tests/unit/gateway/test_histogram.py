"""Ours says what the library's says of the same values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from services.gateway.histogram import LoopHistogram

BOUNDS = (0.0005, 0.001, 0.25, 1.0)


def exported(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]  # the library's has its age as well


@given(st.lists(st.one_of(st.floats(0, 2), st.sampled_from(BOUNDS)), max_size=30))
def test_equals_the_librarys(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = LoopHistogram("seconds", "Between two.", buckets=BOUNDS, registry=ours)
    plain = Histogram("seconds", "Between two.", buckets=BOUNDS, registry=theirs)
    for value in values:
        fast.observe(value)
        plain.observe(value)
    assert exported(ours) == exported(theirs)
    assert f'seconds_bucket{{le="+Inf"}} {float(len(values))}' in exported(ours)
