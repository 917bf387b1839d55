"""The checker agrees with trying every order, accepts what a real object did, and finds planted violations."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos.histories.checker import LOST, Model, Operation, Undecided, check
from tests.chaos.histories.models import ABSENT, Forgetful, Pointer, Queue, Register, Versions
from tests.chaos.histories.recorder import Recorder
from tests.stack import PATIENCE

Ops = list[Operation]


def op(name: str, argument: Any, result: Any, called: float, answered: float = LOST) -> Operation:
    return Operation(name, argument, None if answered == LOST else result, called, answered)


def in_turn(*told: tuple[str, Any, Any]) -> Ops:
    """A history in which each operation begins behind the end of the one before."""
    return [op(name, argument, result, 2.0 * n, 2.0 * n + 1) for n, (name, argument, result) in enumerate(told)]


def tried_every_order(model: Model[Any], history: Sequence[Operation]) -> bool:
    """What the checker is to say, found without any cleverness."""
    lost = [o for o in history if o.lost]
    known = [o for o in history if not o.lost]
    for chosen in itertools.chain.from_iterable(itertools.combinations(lost, n) for n in range(len(lost) + 1)):
        for order in itertools.permutations([*known, *chosen]):
            if any(later.answered < earlier.called for earlier, later in itertools.combinations(order, 2)):
                continue
            states = {model.initial(history)}
            for o in order:
                states = {after for state in states for after in model.after(state, o)}
            if states:
                return True
    return False


@st.composite
def registers(draw: st.DrawFn) -> Ops:
    history = []
    for _ in range(draw(st.integers(1, 6))):
        called = draw(st.integers(0, 8))
        answered = draw(st.one_of(st.just(LOST), st.integers(called, called + 5)))
        name = draw(st.sampled_from(("write", "read", "remove")))
        value = draw(st.sampled_from((1, 2, ABSENT)))
        history.append(
            op(name, value if name == "write" else None, value if name == "read" else True, called, answered)
        )
    return history


@given(registers(), st.sampled_from((Register(), Forgetful())))
@settings(max_examples=150, deadline=None)
def test_the_checker_says_what_trying_every_order_says(history: Ops, model: Model[Any]) -> None:
    assert check(model, history).linearizable == tried_every_order(model, history)


def simulated(seed: int, model: Register, clients: int = 3, operations: int = 30) -> Ops:
    """What clients see of an object that does one thing at a time, at a moment within each call."""
    rng = random.Random(seed)
    calls = []
    for _ in range(clients):
        now = 0.0
        for _ in range(operations // clients):
            called = now + rng.random()
            moment = called + rng.random()
            now = moment + rng.random()
            calls.append((moment, called, now, rng.choice(("write", "read", "read", "remove")), rng.randrange(3)))
    value: Any = ABSENT
    history = []
    for _, called, answered, name, argument in sorted(calls):
        lost = rng.random() < 0.1
        if name != "read" and not (lost and rng.random() < 0.5):  # a lost one may never have happened
            value = argument if name == "write" else ABSENT
        result = value if name == "read" else True
        history.append(op(name, argument if name == "write" else None, result, called, LOST if lost else answered))
    return history


@pytest.mark.parametrize("seed", range(8))
def test_what_one_object_did_is_linearizable_and_a_planted_stale_read_is_not(seed: int) -> None:
    history = simulated(seed, Register())
    verdict = check(Register(), history)
    assert verdict.linearizable
    assert {o for o in history if not o.lost} <= set(verdict.longest)
    end = max(o.answered for o in history if not o.lost)
    # A value that was overwritten for good is read again.
    planted = [
        *history,
        op("write", "old", True, end + 1, end + 2),
        op("write", "new", True, end + 3, end + 4),
        op("read", None, "old", end + 5, end + 6),
    ]
    found = check(Register(), planted)
    assert not found.linearizable
    assert found.stuck


VIOLATIONS: dict[str, tuple[Model[Any], Ops]] = {
    "a lost update": (Register(), in_turn(("write", 1, True), ("write", 2, True), ("read", None, 1))),
    "a removed document comes back": (
        Register(),
        in_turn(("write", 1, True), ("remove", None, True), ("read", None, 1)),
    ),
    "a stored document is gone": (Register(), in_turn(("write", 1, True), ("read", None, ABSENT))),
    "a lost write is seen, then not": (
        Register(),
        [op("write", 1, None, 0), *in_turn(("read", None, ABSENT), ("read", None, 1), ("read", None, ABSENT))],
    ),
    "a deleted session comes back": (
        Forgetful(),
        in_turn(("write", "kept", True), ("remove", None, True), ("read", None, "kept")),
    ),
    "two gateways differ on what is current": (
        Pointer(),
        in_turn(("begin", "a@1", True), ("move", "a@2", "a@1"), ("read", None, "a@2"), ("read", None, "a@1")),
    ),
    "two moves from one version": (
        Pointer(),
        [*in_turn(("begin", "a@1", True)), op("move", "a@2", "a@1", 5, 9), op("move", "a@3", "a@1", 5, 9)],
    ),
    "detached by who had nothing attached": (
        Pointer(),
        in_turn(("begin", "b@1", True), ("leave", "a", True)),
    ),
    "one number for two versions": (Versions(), in_turn(("publish", "x", 1), ("publish", "y", 1))),
    "a version that is not listed": (Versions(), in_turn(("publish", "x", 1), ("list", None, ()))),
    "one key, two jobs": (Queue(), in_turn(("submit", None, "j1"), ("submit", None, "j2"))),
    "an accepted job is lost": (Queue(), in_turn(("submit", None, "j1"), ("look", None, ABSENT))),
    "a job that ended runs": (
        Queue(),
        in_turn(("submit", None, "j1"), ("look", None, "succeeded"), ("look", None, "running")),
    ),
    "a job ends twice": (
        Queue(),
        in_turn(("submit", None, "j1"), ("look", None, "failed"), ("look", None, "succeeded")),
    ),
    "a cancelled job succeeds": (
        Queue(),
        in_turn(("submit", None, "j1"), ("cancel", None, "running"), ("look", None, "succeeded")),
    ),
    "a paused job runs": (
        Queue(),
        in_turn(("submit", None, "j1"), ("pause", None, "queued"), ("look", None, "running")),
    ),
}


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_a_planted_violation_is_found(violation: str) -> None:
    model, history = VIOLATIONS[violation]
    recorder = Recorder("object", model)
    recorder.histories["it"] = history
    counts, wrong = recorder.judge()
    assert counts["operations"] == len(history)
    assert len(wrong) == 1, violation
    assert "it is not linearizable" in wrong[0]


SENSIBLE: dict[str, tuple[Model[Any], Ops]] = {
    "a write that overlaps": (
        Register(),
        [op("write", 1, True, 0, 10), op("read", None, ABSENT, 1, 2), op("read", None, 1, 3, 4)],
    ),
    "a write whose answer was lost": (Register(), [op("write", 1, True, 0), op("read", None, 1, 5, 6)]),
    "a session that an engine took with it": (
        Forgetful(),
        in_turn(("write", "kept", True), ("read", None, ABSENT), ("read", None, "kept")),
    ),
    "a publication whose answer was lost": (
        Versions(),
        [op("publish", "x", None, 0), op("publish", "y", 2, 5, 6), op("list", None, (1, 2), 7, 8)],
    ),
    "a job paused, resumed and done": (
        Queue(),
        in_turn(
            ("submit", None, "j1"),
            ("look", None, "running"),
            ("pause", None, "running"),
            ("look", None, "queued"),
            ("resume", None, "queued"),
            ("look", None, "running"),
            ("look", None, "succeeded"),
            ("pause", None, "ended"),
        ),
    ),
    "a pause whose answer was lost": (
        Queue(),
        [
            *in_turn(("submit", None, "j1")),
            op("pause", None, None, 2),
            op("look", None, "queued", 5, 6),
            op("resume", None, "queued", 7, 8),
            op("cancel", None, "running", 9, 10),
            op("cancel", None, "cancelled", 11, 12),
        ],
    ),
    "too late to cancel": (
        Queue(),
        in_turn(("submit", None, "j1"), ("cancel", None, "late"), ("look", None, "succeeded")),
    ),
    "a move back, and what was attached leaves": (
        Pointer(),
        in_turn(("begin", "a@2", True), ("move", "a@1", "a@2"), ("leave", "b", False), ("leave", "a", True)),
    ),
}


@pytest.mark.parametrize("history", SENSIBLE)
def test_what_may_happen_is_no_violation(history: str) -> None:
    assert check(*SENSIBLE[history]).linearizable


def test_a_search_that_takes_too_long_says_so() -> None:
    history = [op("write", number, True, 0, 100) for number in range(12)] + [op("read", None, 99, 0, 100)]
    with pytest.raises(Undecided):
        check(Register(), history, most_steps=1000)
    recorder = Recorder("object", Register())
    recorder.histories["it"] = [op("write", number, True, 0, 100) for number in range(40)] + [
        op("read", None, 99, 0, 100)
    ]
    assert recorder.judge()[0]["undecided"] == 1


def test_no_answer_comes_before_its_call() -> None:
    with pytest.raises(ValueError, match="before"):
        op("read", None, 1, 2, 1)


async def test_a_request_that_nobody_waits_for_any_more_may_still_happen() -> None:
    """Its client is cancelled when the campaign is over, and the gateway is not."""
    arrived = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        arrived.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    recorder = Recorder("pointer", Pointer())
    host, port = server.sockets[0].getsockname()[:2]
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=PATIENCE, trust_env=False) as client:
        asking = asyncio.create_task(
            recorder.send(client, "it", "move", "a@1", "POST", "/", lambda response: response.status_code)
        )
        await asyncio.wait_for(arrived.wait(), PATIENCE)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    server.close()
    (noted,) = recorder.histories["it"]
    assert (noted.name, noted.argument, noted.lost) == ("move", "a@1", True)
    recorder.note("it", "read", None, "a@1", noted.called + 1, noted.called + 2)
    assert recorder.judge()[1] == []
