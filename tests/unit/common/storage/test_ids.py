"""Names that sort by the time they were made."""

from __future__ import annotations

import re

import pytest

from services.common.storage.ids import PATTERN, milliseconds_of, ulid, ulid_of

NOW = 1_796_056_061_610_999_900
"""Nanoseconds, shortly before the next millisecond."""


def test_what_is_made_in_one_millisecond_sorts_as_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(NOW, NOW + 2_000_000, 1000))
    monkeypatch.setattr("time.time_ns", lambda: next(times))
    made = [ulid() for _ in range(2000)]
    assert made == sorted(made)
    assert len(set(made)) == 2000
    assert all(re.fullmatch(PATTERN, one) for one in made)
    assert {milliseconds_of(one) - NOW // 1_000_000 for one in made} == {0, 1, 2}


def test_at_a_time_that_is_given() -> None:
    assert milliseconds_of(ulid(5)) == 5
    assert ulid(5) != ulid(5)
    assert ulid(5, 1) == ulid(5, 1) < ulid(5, 2) < ulid(6, 0)
    assert ulid_of("a", 5) == ulid_of("a", 5) != ulid_of("b", 5)
