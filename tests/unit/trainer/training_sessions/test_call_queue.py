"""A session's calls run strictly in order, each once, however they arrive."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.common.errors import Conflict, InvalidRequest, Overloaded, Unavailable
from services.trainer.training_sessions.call_queue import CallQueue, CallQueueLimits, CallState, QueuedCall

LIMITS = CallQueueLimits(pending=8, pending_tokens=100, gap_seconds=5.0, results=4, result_seconds=60.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def queue(limits: CallQueueLimits = LIMITS) -> tuple[CallQueue[str], Clock]:
    clock, numbers = Clock(), itertools.count()
    return CallQueue[str](limits, lambda seq: f"f{seq}-{next(numbers)}", clock), clock


def put(target: CallQueue[str], seq: int, body: str = "", tokens: int = 1) -> QueuedCall[str]:
    found = target.submit(seq, body or f"body {seq}", "forward", body or f"body {seq}", tokens)
    assert isinstance(found, QueuedCall)
    return found


def drain(target: CallQueue[str]) -> list[int]:
    """Runs whatever can run; the sequence numbers in the order they ran."""
    order = []
    while (entry := target.begin()) is not None:
        assert target.begin() is None, "one at a time"
        assert entry.call is not None
        order.append(entry.seq)
        target.end(entry, b"{}", None)
    return order


@given(st.permutations(range(1, 9)), st.data())
def test_any_order_of_arrival_runs_in_sequence_and_once(arrival: list[int], data: st.DataObject) -> None:
    target, _ = queue(CallQueueLimits(pending=8, pending_tokens=100, gap_seconds=5.0, results=100, result_seconds=60.0))
    ran: list[int] = []
    ids: dict[int, str] = {}
    for seq in arrival:
        ids[seq] = put(target, seq).id
        repeated = data.draw(st.sampled_from(arrival[: arrival.index(seq) + 1]))
        assert put(target, repeated).id == ids[repeated], "the same call is the same future"
        with pytest.raises(Conflict):
            target.submit(repeated, "another body", "forward", "x", 1)
        if data.draw(st.booleans()):
            ran += drain(target)
    ran += drain(target)
    assert ran == sorted(arrival)
    for seq in arrival:
        entry = target.find(ids[seq])
        assert entry is not None
        assert entry.state is CallState.DONE
    assert drain(target) == []


def test_a_gap_fails_the_waiting_calls_and_leaves_their_places_free() -> None:
    target, clock = queue()
    first = put(target, 1)
    third, fourth = put(target, 3), put(target, 4)
    assert (target.missing_before(first), target.missing_before(third)) == (None, 2)
    told: list[str] = []
    third.watchers.append(lambda: told.append("third"))
    assert drain(target) == [1]
    clock.now += 4.9
    assert target.sweep() == []
    clock.now += 0.2
    for tell in target.sweep():
        tell()
    assert told == ["third"]
    assert (third.state, fourth.state) == (CallState.FAILED, CallState.FAILED)
    assert isinstance(third.error, Conflict)
    assert "seq 3 waited 5 s for seq 2, which never came" in str(third.error)
    # Sent again, with another body, they are new calls; the failed future still says what happened.
    again = put(target, 3, "another body")
    assert again.id != third.id
    assert target.find(third.id) is third
    put(target, 2)
    assert drain(target) == [2, 3]


def test_the_wait_for_a_gap_begins_when_the_line_is_free() -> None:
    target, clock = queue()
    running = put(target, 1)
    assert target.begin() is running
    waiting = put(target, 3)
    clock.now += 100
    assert target.sweep() == []
    assert waiting.state is CallState.PENDING
    target.end(running, b"{}", None)
    clock.now += 4
    target.sweep()
    assert waiting.state is CallState.PENDING
    clock.now += 2
    target.sweep()
    assert waiting.state is CallState.FAILED


def test_bounds() -> None:
    target, _ = queue()
    for seq in range(2, 10):
        put(target, seq)
    with pytest.raises(Overloaded, match="8 calls of this session wait"):
        put(target, 10)
    put(target, 1)  # all others wait for this one
    tokens, _ = queue()
    put(tokens, 2, tokens=60)
    with pytest.raises(Overloaded, match="calls with 60 tokens wait"):
        put(tokens, 3, tokens=60)
    with pytest.raises(InvalidRequest, match="far ahead"):
        put(tokens, 10**6)


def test_results_are_kept_by_count_and_by_time() -> None:
    target, clock = queue()
    entries = [put(target, seq) for seq in range(1, 7)]
    drain(target)
    assert [target.find(entry.id) is not None for entry in entries] == [False, False, True, True, True, True]
    assert target.executed(entries[0].id)
    assert not target.executed("f9-9")
    # A repeated call whose result is gone is still known by its future's id, and never runs twice.
    assert target.submit(1, "body 1", "forward", "body 1", 1) == entries[0].id
    assert drain(target) == []
    clock.now += 61
    target.sweep()
    assert target.find(entries[-1].id) is None


def test_ended_calls_keep_no_data() -> None:
    target, _ = queue()
    entry = put(target, 1, "megabytes")
    drain(target)
    assert entry.call is None
    assert entry.result == b"{}"


def test_the_end_of_a_session_fails_what_is_left() -> None:
    target, _ = queue()
    running, waiting = put(target, 1), put(target, 2)
    assert target.begin() is running
    told: list[int] = []
    for entry in (running, waiting):
        entry.watchers.append(lambda seq=entry.seq: told.append(seq))  # type: ignore[misc]
    for tell in target.fail_all(Unavailable("gone")):
        tell()
    assert sorted(told) == [1, 2]
    assert (running.state, waiting.state, target.pending) == (CallState.FAILED, CallState.FAILED, 0)
    with pytest.raises(ValueError, match="does not run"):
        target.end(running, b"{}", None)


class LineMachine(RuleBasedStateMachine):
    """Submissions, repeats, starts, ends and time in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.clock = queue()
        self.ran: list[int] = []
        self.running: QueuedCall[str] | None = None

    @rule(ahead=st.integers(0, 4), body=st.sampled_from(["a", "b"]))
    def submit(self, ahead: int, body: str) -> None:
        seq = max(1, self.queue.next_seq - 2 + ahead)
        pending = self.queue.pending
        try:
            self.queue.submit(seq, body, "forward", body, 1)
        except (Conflict, Overloaded):
            assert self.queue.pending == pending, "what is refused leaves nothing behind"

    @precondition(lambda self: self.running is None)
    @rule()
    def begin(self) -> None:
        expected = self.queue.next_seq
        self.running = self.queue.begin()
        if self.running is not None:
            assert self.running.seq == expected
            self.ran.append(self.running.seq)

    @precondition(lambda self: self.running is not None)
    @rule(good=st.booleans())
    def end(self, good: bool) -> None:
        assert self.running is not None
        self.queue.end(self.running, b"{}" if good else None, None if good else InvalidRequest("no"))
        assert self.running.state is (CallState.DONE if good else CallState.FAILED)
        self.running = None

    @rule(seconds=st.floats(0.1, 10.0))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.queue.sweep()

    @invariant()
    def in_order_and_once(self) -> None:
        assert self.ran == list(range(1, len(self.ran) + 1))
        assert self.queue.next_seq == len(self.ran) + 1


TestLineMachine = LineMachine.TestCase
