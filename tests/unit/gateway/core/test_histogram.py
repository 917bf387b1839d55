"""Ours says what the library's says of the same values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from services.gateway.core.metrics import LoopHistogram

BOUNDS = (0.0005, 0.001, 0.25, 1.0)


def exported(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]  # the library's has its age as well


@given(st.lists(st.one_of(st.floats(0, 2), st.sampled_from(BOUNDS)), max_size=30))
def test_equals_the_librarys(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = LoopHistogram("seconds", "Between two.", ("model", "stream"), buckets=BOUNDS, registry=ours)
    plain = Histogram("seconds", "Between two.", ("model", "stream"), buckets=BOUNDS, registry=theirs)
    assert exported(ours) == exported(theirs)
    for labels in (("m", "true"), ('a "b"', "false")):
        for value in values:
            fast.labels(*labels).observe(value)
            plain.labels(*labels).observe(value)
        fast.labels(*labels)
        plain.labels(*labels)
    assert exported(ours) == exported(theirs)
    assert f'seconds_bucket{{le="+Inf",model="m",stream="true"}} {float(len(values))}' in exported(ours)
    with pytest.raises(ValueError, match="labels"):
        fast.labels("m")


def test_the_newest_kept_trace_of_a_bucket_is_its_exemplar() -> None:
    registry = CollectorRegistry()
    fast = LoopHistogram("seconds", "Between two.", buckets=BOUNDS, registry=registry)
    kept, newer, dropped = (f"00-{digit * 32}-{digit * 16}-0{flag}" for digit, flag in (("a", 1), ("b", 1), ("c", 0)))
    for value, traceparent in ((0.1, kept), (0.2, newer), (0.15, dropped), (0.15, ""), (5.0, kept), (0.0001, "")):
        fast.labels().observe(value, traceparent)
    (family,) = text_string_to_metric_families(generate_openmetrics(registry).decode())
    shown = {sample.labels["le"]: sample.exemplar for sample in family.samples if sample.exemplar}
    assert {le: (example.labels["trace_id"], example.value) for le, example in shown.items()} == {
        "0.25": ("b" * 32, 0.2),
        "+Inf": ("a" * 32, 5.0),
    }
    assert "trace_id" not in generate_latest(registry).decode()
