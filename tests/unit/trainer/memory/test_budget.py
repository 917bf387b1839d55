"""A job and sessions share the memory for training: what stays adds up, what computes does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import DoesNotFit
from services.trainer.memory.budget import MemoryBudget, MemoryNeed, MemoryTaken

MIB = 2**20


def test_residents_add_up_and_working_memory_does_not() -> None:
    budget = MemoryBudget(100 * MIB)
    budget.reserve_session("a", MemoryNeed(20 * MIB, 50 * MIB))
    budget.reserve_session("b", MemoryNeed(20 * MIB, 40 * MIB))
    budget.reserve_job(MemoryNeed(10 * MIB, 50 * MIB))
    with pytest.raises(DoesNotFit) as refused:
        budget.reserve_session("c", MemoryNeed(1 * MIB, 1 * MIB))
    for part in ("1.0 MiB", "100.0 MiB", "2 open session(s) hold 40.0 MiB", "the running job holds 10.0 MiB"):
        assert part in refused.value.message
    budget.release_session("a")
    budget.reserve_session("c", MemoryNeed(20 * MIB, 1 * MIB))
    assert set(budget.held()) == {"b", "c", "the running job"}


def test_a_job_waits_for_sessions_and_no_new_one_overtakes_it() -> None:
    budget = MemoryBudget(100 * MIB)
    budget.reserve_session("a", MemoryNeed(50 * MIB, 10 * MIB))
    with pytest.raises(MemoryTaken, match=r"1 open session\(s\) hold 50.0 MiB"):
        budget.reserve_job(MemoryNeed(40 * MIB, 20 * MIB))
    with pytest.raises(MemoryTaken, match="a training job waits"):
        budget.reserve_session("b", MemoryNeed(1 * MIB, 1 * MIB))
    budget.reserve_session("a", MemoryNeed(45 * MIB, 10 * MIB))  # one that is open may still change
    budget.release_session("a")
    budget.reserve_job(MemoryNeed(40 * MIB, 20 * MIB))
    budget.reserve_session("b", MemoryNeed(1 * MIB, 1 * MIB))
    budget.release_job()
    assert set(budget.held()) == {"b"}


def test_a_job_that_gives_up_waiting_lets_sessions_in_again() -> None:
    budget = MemoryBudget(100 * MIB)
    budget.reserve_session("a", MemoryNeed(90 * MIB, 0))
    with pytest.raises(MemoryTaken):
        budget.reserve_job(MemoryNeed(20 * MIB, 0))
    budget.release_job()
    budget.reserve_session("b", MemoryNeed(5 * MIB, 0))


def test_a_refused_change_leaves_what_was_reserved() -> None:
    budget = MemoryBudget(100)
    budget.reserve_session("a", MemoryNeed(10, 10))
    with pytest.raises(DoesNotFit):
        budget.reserve_session("a", MemoryNeed(95, 10))
    assert budget.held() == {"a": MemoryNeed(10, 10)}


def test_one_long_datum_is_checked_against_what_the_residents_leave() -> None:
    budget = MemoryBudget(100 * MIB)
    budget.reserve_session("a", MemoryNeed(30 * MIB, 10 * MIB))
    budget.check_working(70 * MIB, what="data[0] with 9 tokens", param="data[0].token_ids")
    with pytest.raises(DoesNotFit, match=r"data\[0\] with 9 tokens needs 71.0 MiB") as refused:
        budget.check_working(71 * MIB, what="data[0] with 9 tokens", param="data[0].token_ids")
    assert refused.value.param == "data[0].token_ids"


needs = st.builds(MemoryNeed, st.integers(0, 60), st.integers(0, 60))


@given(st.lists(st.tuples(st.sampled_from("abc"), needs, st.booleans()), max_size=30))
def test_whatever_is_let_in_fits(steps: list[tuple[str, MemoryNeed, bool]]) -> None:
    budget = MemoryBudget(100)
    for owner, need, leaves in steps:
        before = budget.held()
        try:
            if leaves:
                budget.release_session(owner)
            elif owner == "c":
                budget.reserve_job(need)
            else:
                budget.reserve_session(owner, need)
        except (DoesNotFit, MemoryTaken):
            assert budget.held() == before
        held = budget.held().values()
        others = [name for name in budget.held() if name != "the running job"]
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

    def rest(self) -> int:
        return 100 - self.room

    def out_of_memory(self) -> None:
        """Nothing to give back."""

    def end(self) -> None:
        self.ended += 1


def test_captured_steps_share_what_they_compute_in() -> None:
    pools = Pools(50)
    budget = MemoryBudget(100, pools)
    assert budget.reserve_session("a", MemoryNeed(10, 5, captured=50)) == "graphs"
    assert budget.reserve_job(MemoryNeed(20, 5, captured=40)) == "graphs"
    assert pools.begun == [(50, 15, True), (40, 25, False)]
    # 10 and 20 stay, 5 and 50 are shared: 15 are left.
    assert budget.reserve_session("b", MemoryNeed(15, 5, captured=50)) == "graphs"
    with pytest.raises(DoesNotFit):
        budget.reserve_session("c", MemoryNeed(1, 0, captured=1))
    budget.release_session("b")
    with pytest.raises(DoesNotFit, match="something"):
        budget.check_working(21, what="something", param="data")
    budget.check_working(20, what="something", param="data")


def test_without_room_for_captured_steps_they_are_launched_one_by_one() -> None:
    """What they compute in is then needed beside what the others' captured steps do."""
    budget = MemoryBudget(100, Pools(30))
    budget.reserve_session("a", MemoryNeed(10, 5, captured=30))
    assert budget.reserve_job(MemoryNeed(10, 5, captured=40)) is None
    assert budget.held()["the running job"] == MemoryNeed(10, 45)
    with pytest.raises(DoesNotFit, match=r"to compute"):
        budget.reserve_session("b", MemoryNeed(6, 0))


def test_the_memory_ends_when_nobody_holds_any() -> None:
    pools = Pools(0)
    budget = MemoryBudget(100, pools)
    budget.reserve_job(MemoryNeed(10, 5))
    budget.settle()
    assert pools.ended == 0
    budget.release_job()
    budget.settle()
    assert pools.ended == 1
    budget.reserve_session("a", MemoryNeed(10, 5))
    assert pools.begun[-1] == (0, 15, True)


def test_jobs_that_run_at_the_same_time_hold_their_own_and_work_in_one_place() -> None:
    budget = MemoryBudget(100)
    budget.reserve_job(MemoryNeed(20, 10))
    budget.hold_job("a")
    budget.reserve_job(MemoryNeed(20, 10))
    budget.hold_job("b")
    assert budget.reserve_together(60)
    with pytest.raises(MemoryTaken, match=r"2 running jobs hold 0.0 MiB"):
        budget.reserve_job(MemoryNeed(1, 10))
    budget.release_job("b")
    budget.reserve_job(MemoryNeed(20, 10))
    budget.hold_job("c")
    assert not budget.reserve_together(61)
    with pytest.raises(DoesNotFit):
        budget.reserve_session("s", MemoryNeed(1, 0))
    budget.release_together()
    budget.reserve_session("s", MemoryNeed(50, 10))
    budget.release_job("a")
    budget.release_job("c")
    assert set(budget.held()) == {"s"}


def test_shared_steps_compute_outside_of_what_captured_steps_take() -> None:
    budget = MemoryBudget(100, Pools(50))
    budget.reserve_job(MemoryNeed(20, 0, captured=10))
    budget.hold_job("a")
    assert budget.reserve_together(30)
    assert not budget.reserve_together(31), "50 are for captured steps, 20 for the job"


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_launching_needs_as_much_as_capturing(resident: int, working: int, captured: int) -> None:
    need = MemoryNeed(resident, working, captured)
    assert need.uncaptured().peak == need.peak
    assert need.uncaptured().captured == 0
