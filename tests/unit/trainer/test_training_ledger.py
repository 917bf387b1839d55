"""A job and sessions share the memory for training: what stays adds up, what computes does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import DoesNotFit
from services.trainer.memory.budget import MemoryTaken, Need, TrainingLedger

MIB = 2**20


def test_residents_add_up_and_working_memory_does_not() -> None:
    ledger = TrainingLedger(100 * MIB)
    ledger.reserve_session("a", Need(20 * MIB, 50 * MIB))
    ledger.reserve_session("b", Need(20 * MIB, 40 * MIB))
    ledger.reserve_job(Need(10 * MIB, 50 * MIB))
    with pytest.raises(DoesNotFit) as refused:
        ledger.reserve_session("c", Need(1 * MIB, 1 * MIB))
    for part in ("1.0 MiB", "100.0 MiB", "2 open session(s) hold 40.0 MiB", "the running job holds 10.0 MiB"):
        assert part in refused.value.message
    ledger.release_session("a")
    ledger.reserve_session("c", Need(20 * MIB, 1 * MIB))
    assert set(ledger.held()) == {"b", "c", "the running job"}


def test_a_job_waits_for_sessions_and_no_new_one_overtakes_it() -> None:
    ledger = TrainingLedger(100 * MIB)
    ledger.reserve_session("a", Need(50 * MIB, 10 * MIB))
    with pytest.raises(MemoryTaken, match=r"1 open session\(s\) hold 50.0 MiB"):
        ledger.reserve_job(Need(40 * MIB, 20 * MIB))
    with pytest.raises(MemoryTaken, match="a training job waits"):
        ledger.reserve_session("b", Need(1 * MIB, 1 * MIB))
    ledger.reserve_session("a", Need(45 * MIB, 10 * MIB))  # one that is open may still change
    ledger.release_session("a")
    ledger.reserve_job(Need(40 * MIB, 20 * MIB))
    ledger.reserve_session("b", Need(1 * MIB, 1 * MIB))
    ledger.release_job()
    assert set(ledger.held()) == {"b"}


def test_a_job_that_gives_up_waiting_lets_sessions_in_again() -> None:
    ledger = TrainingLedger(100 * MIB)
    ledger.reserve_session("a", Need(90 * MIB, 0))
    with pytest.raises(MemoryTaken):
        ledger.reserve_job(Need(20 * MIB, 0))
    ledger.release_job()
    ledger.reserve_session("b", Need(5 * MIB, 0))


def test_a_refused_change_leaves_what_was_reserved() -> None:
    ledger = TrainingLedger(100)
    ledger.reserve_session("a", Need(10, 10))
    with pytest.raises(DoesNotFit):
        ledger.reserve_session("a", Need(95, 10))
    assert ledger.held() == {"a": Need(10, 10)}


def test_one_long_datum_is_checked_against_what_the_residents_leave() -> None:
    ledger = TrainingLedger(100 * MIB)
    ledger.reserve_session("a", Need(30 * MIB, 10 * MIB))
    ledger.check_working(70 * MIB, what="data[0] with 9 tokens", param="data[0].token_ids")
    with pytest.raises(DoesNotFit, match=r"data\[0\] with 9 tokens needs 71.0 MiB") as refused:
        ledger.check_working(71 * MIB, what="data[0] with 9 tokens", param="data[0].token_ids")
    assert refused.value.param == "data[0].token_ids"


needs = st.builds(Need, st.integers(0, 60), st.integers(0, 60))


@given(st.lists(st.tuples(st.sampled_from("abc"), needs, st.booleans()), max_size=30))
def test_whatever_is_let_in_fits(steps: list[tuple[str, Need, bool]]) -> None:
    ledger = TrainingLedger(100)
    for owner, need, leaves in steps:
        before = ledger.held()
        try:
            if leaves:
                ledger.release_session(owner)
            elif owner == "c":
                ledger.reserve_job(need)
            else:
                ledger.reserve_session(owner, need)
        except (DoesNotFit, MemoryTaken):
            assert ledger.held() == before
        held = ledger.held().values()
        others = [name for name in ledger.held() if name != "the running job"]
        # A job alone is checked against the plan before (services/trainer/memory/estimate.py).
        if others:
            assert sum(n.resident for n in held) + max(n.working for n in held) <= 100


class Pools:
    """A WorkingMemory of so many bytes for captured steps."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.begun: list[tuple[int, int, bool]] = []
        self.ended = 0

    def start(self) -> None:
        """Nothing to prepare."""

    def begin(self, graphs: int, rest: int, *, alone: bool) -> Any:
        self.begun.append((graphs, rest, alone))
        return "graphs" if 0 < graphs <= self.room else None

    def out_of_memory(self) -> None:
        """Nothing to give back."""

    def end(self) -> None:
        self.ended += 1


def test_captured_steps_share_what_they_compute_in() -> None:
    pools = Pools(50)
    ledger = TrainingLedger(100, pools)
    assert ledger.reserve_session("a", Need(10, 5, captured=50)) == "graphs"
    assert ledger.reserve_job(Need(20, 5, captured=40)) == "graphs"
    assert pools.begun == [(50, 15, True), (40, 25, False)]
    # 10 and 20 stay, 5 and 50 are shared: 15 are left.
    assert ledger.reserve_session("b", Need(15, 5, captured=50)) == "graphs"
    with pytest.raises(DoesNotFit):
        ledger.reserve_session("c", Need(1, 0, captured=1))
    ledger.release_session("b")
    with pytest.raises(DoesNotFit, match="something"):
        ledger.check_working(21, what="something", param="data")
    ledger.check_working(20, what="something", param="data")


def test_without_room_for_captured_steps_they_are_launched_one_by_one() -> None:
    """What they compute in is then needed beside what the others' captured steps do."""
    ledger = TrainingLedger(100, Pools(30))
    ledger.reserve_session("a", Need(10, 5, captured=30))
    assert ledger.reserve_job(Need(10, 5, captured=40)) is None
    assert ledger.held()["the running job"] == Need(10, 45)
    with pytest.raises(DoesNotFit, match=r"to compute"):
        ledger.reserve_session("b", Need(6, 0))


def test_the_memory_ends_when_nobody_holds_any() -> None:
    pools = Pools(0)
    ledger = TrainingLedger(100, pools)
    ledger.reserve_job(Need(10, 5))
    ledger.settle()
    assert pools.ended == 0
    ledger.release_job()
    ledger.settle()
    assert pools.ended == 1
    ledger.reserve_session("a", Need(10, 5))
    assert pools.begun[-1] == (0, 15, True)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_launching_needs_as_much_as_capturing(resident: int, working: int, captured: int) -> None:
    need = Need(resident, working, captured)
    assert need.uncaptured().peak == need.peak
    assert need.uncaptured().captured == 0
