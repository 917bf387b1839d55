"""The host's memory in pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.kv_cache.block_pool import IntegrityError
from services.engine.kv_offload.host_memory import HostArena, Run


def arena(pages: int, unit: int = 4096) -> HostArena:
    return HostArena(np.zeros(pages * 4096 + 100, np.uint8), unit)


def test_pages_are_a_multiple_of_4_kib() -> None:
    assert arena(8).limit == 8 * 4096
    assert arena(8, 4097).limit == 4 * 8192
    assert arena(7, 8192).room(1) == 8192
    assert HostArena(np.zeros(10, np.uint8), 1).take(1) is None


def test_a_run_is_one_piece_where_there_is_one() -> None:
    memory = arena(10)
    runs = [memory.take(2 * 4096) for _ in range(5)]
    for run in (runs[0], runs[2], runs[3]):
        memory.give_back(run)
    assert len(memory.pieces(memory.take(2 * 4096))) == 1  # the smallest that is large enough
    assert len(memory.pieces(memory.take(3 * 4096 + 1))) == 1
    assert memory.take(1) is None


def test_otherwise_it_is_of_several_in_order() -> None:
    memory = arena(6)
    runs = [memory.take(4096) for _ in range(6)]
    for run in runs[::2]:
        memory.give_back(run)
    assert memory.take(3 * 4096 + 1) is None
    run = memory.take(2 * 4096 + 10)
    pieces = memory.pieces(run)
    assert [len(piece) for piece in pieces] == [4096, 4096, 10]
    for number, piece in enumerate(pieces):
        piece[:] = number + 1
    assert [len(piece) for piece in memory.pieces(run, 4000, 4100)] == [96, 4]
    assert np.concatenate(memory.pieces(run, 4095, 8193)).tolist() == [1] + 4096 * [2] + [3]
    assert memory.pieces(run, 5, 5) == []
    with pytest.raises(ValueError):
        memory.pieces(run, 0, run.size + 1)


def test_misuse_is_found() -> None:
    memory = arena(4)
    run = memory.take(8192)
    other = memory.take(4096)
    memory.check([run, other])
    for held in ([run], [run, run, other], [other]):
        with pytest.raises(IntegrityError):
            memory.check(held)
    memory.give_back(run)
    with pytest.raises(IntegrityError):
        memory.give_back(run)


@given(st.lists(st.integers(-6, 9)))
def test_nothing_is_lost_or_handed_out_twice(steps: list[int]) -> None:
    """Positive: take so many pages; others: give one back."""
    memory, held = arena(16), list[Run]()
    for step in steps:
        if step > 0:
            free = memory.free
            run = memory.take(step * 4096)
            assert (run is None) == (step * 4096 > free)
            if run is not None:
                held.append(run)
        elif held:
            memory.give_back(held.pop(step % len(held)))
        memory.check(held)
        assert memory.free == memory.limit - sum(run.size for run in held)
    for run in held:
        memory.give_back(run)
    assert len(memory.pieces(memory.take(memory.limit))) == 1
