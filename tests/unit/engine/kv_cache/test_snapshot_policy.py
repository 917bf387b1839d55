"""Snapshot positions, common prefixes of waiting prompts, and the cost of computing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.gpu.segments import TILE
from services.engine.kv_cache.compute_cost import ComputeCost
from services.engine.kv_cache.keys import bytes_to_tokens, common_tokens, tokens_to_bytes
from services.engine.kv_cache.snapshot_policy import _TILE, SnapshotPolicy, interval
from services.engine.scheduler.pending_prefixes import PendingPrefixes
from services.engine.scheduler.sequence import Sequence
from tests.unit.engine.machine import request


def sequence(number: int, prompt: tuple[int, ...], **changes: object) -> Sequence:
    return Sequence(request(f"r{number}", prompt, **changes), 4, number, frozenset())


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(0, 3), max_size=40), st.integers(0, 5))
def test_tokens_as_bytes(ids: list[int], others: list[int], at: int) -> None:
    assert bytes_to_tokens(tokens_to_bytes(ids)) == ids
    label, tokens = tokens_to_bytes(others[:20]), tokens_to_bytes(([9] * at) + others[20:])
    expected = 0
    for one, other in zip(others[:20], others[20:], strict=False):
        if one != other:
            break
        expected += 1
    assert common_tokens(label, tokens, at) == expected


def test_an_interval_by_what_states_and_tokens_take() -> None:
    assert interval(48 * 2**20, 32 * 2**10) == 3072


def test_positions() -> None:
    policy = SnapshotPolicy(unit=1, gap=16, interval=1000)
    assert policy.positions(0, 99, (), ()) == (99,)
    assert policy.positions(90, 99, (), ()) == (), "too little to compute"
    assert policy.positions(0, 99, (), (70, 80, 95)) == (64, 95), "the last message ends near the end"
    assert policy.positions(0, 99, (200,), ()) == (99,), "of an equal prompt all but its last token"
    assert policy.positions(0, 3500, (), ()) == (1000, 2000, 3499 + 1)
    assert policy.positions(2500, 3500, (), ()) == (3500,)
    aligned = SnapshotPolicy(unit=64, gap=64, interval=1000)
    assert aligned.positions(0, 200, (70,), (130,)) == (64, 128, 192)


def test_a_short_prompt_is_a_tile_longer_at_most() -> None:
    assert TILE == _TILE
    policy = SnapshotPolicy(unit=1, gap=16, interval=3072)
    assert policy.positions(0, 2000, (), (500, 1995)) == (448, 1995), "the first message's end, up to a tile before"
    assert policy.positions(10, 2010, (700,), (500, 1995)) == (10 + 448, 700, 10 + 1984), "what others share is exact"
    assert policy.positions(10, 2010, (10 + 640,), (500, 1995)) == (10 + 448, 650, 1995), "tiles count from what was"
    assert policy.positions(0, 2048, (), (500, 2040)) == (500, 2040), "of a longer one it is next to nothing"


@given(
    st.integers(0, 300),
    st.integers(0, 600),
    st.lists(st.integers(1, 700), max_size=4),
    st.sets(st.integers(1, 700), max_size=20),
    st.sampled_from([1, 16]),
    st.integers(16, 200),
)
def test_positions_are_possible(
    computed: int, limit: int, shares: list[int], marks: set[int], unit: int, every: int
) -> None:
    chosen = SnapshotPolicy(unit=unit, gap=16, interval=every).positions(computed, limit, shares, sorted(marks))
    assert list(chosen) == sorted(set(chosen))
    assert all(computed + 16 <= position <= limit and position % unit == 0 for position in chosen)
    if unit == 1:
        assert sum((position - computed) % TILE != 0 for position in chosen) <= 1


def test_what_waits_shares_the_longest_beginning() -> None:
    sharing = PendingPrefixes()
    one, two, three = (sequence(n, (1, 2, 3, *tail)) for n, tail in enumerate(((4, 5), (4, 6), (7,))))
    other = sequence(3, (1, 2, 3, 4, 5), cache_salt="other")
    for each in (one, two, three, other):
        sharing.add(each)
    assert sharing.branches(one) == [4, 3]
    assert sharing.branches(three) == [3]
    assert sharing.branches(other) == []
    sharing.promise(one, (3, 4))
    assert sharing.promised(two, 4) == 4
    assert sharing.promised(two, 3) == 3
    assert sharing.promised(three, 3) == 3
    assert sharing.promised(one, 4) == 0, "nobody waits for itself"
    sharing.kept(one, 4)
    assert sharing.promised(two, 4) == 3
    sharing.withdraw(one)
    assert sharing.promised(two, 4) == 0
    for each in (one, two, three, other):
        sharing.remove(each)
    assert len(sharing) == 0


def test_a_promise_stays_where_its_tokens_are() -> None:
    """A prompt that comes later parts from the one that promises before, or behind, the place that was promised."""
    sharing = PendingPrefixes()
    first = sequence(0, tuple(range(20)))
    sharing.add(first)
    sharing.promise(first, (8, 16))
    early, late = sequence(1, (*range(10), 99)), sequence(2, (*range(18), 99))
    sharing.add(early)
    sharing.add(late)
    assert (sharing.promised(early, 10), sharing.promised(late, 18)) == (8, 16)
    sharing.remove(first)
    assert (sharing.promised(early, 10), sharing.promised(late, 18)) == (8, 16)
    sharing.remove(late)
    sharing.remove(early)
    sharing.withdraw(first)
    assert len(sharing) == 0


def test_a_worse_rank_promises_nothing_to_a_better_one() -> None:
    sharing = PendingPrefixes()
    patient, urgent = sequence(0, (1, 2, 3, 4), priority=1), sequence(1, (1, 2, 3, 4), priority=0)
    sharing.add(patient)
    sharing.add(urgent)
    sharing.promise(patient, (3,))
    assert sharing.promised(urgent, 3) == 0


def test_the_cost_of_computing_is_learned() -> None:
    cost = ComputeCost(1.0, 0.0)
    for _ in range(200):
        cost.observe([(0, 500), (100, 600)], 0.01)
    assert cost.seconds(0, 1000) == pytest.approx(0.01, rel=0.01)
    before = cost.token_seconds
    cost.observe([(0, 10)], 1.0)
    assert cost.token_seconds == before, "a short step says nothing"
    far = ComputeCost(1e-5, 1e-4)
    assert far.seconds(10_000, 11_000) > 1.9 * far.seconds(0, 1000)
    with pytest.raises(ValueError, match="token_seconds"):
        ComputeCost(0.0, 0.0)
