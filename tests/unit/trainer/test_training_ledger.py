"""A job and sessions share the memory for training: what stays adds up, what computes does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import DoesNotFit
from services.trainer.ledger import MemoryTaken, Need, TrainingLedger

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
        # A job alone is checked against the plan before (services/trainer/memory.py).
        if others:
            assert sum(n.resident for n in held) + max(n.working for n in held) <= 100
