"""When an engine that fails gets nothing, and how it proves itself."""

from __future__ import annotations

import pytest

from services.gateway.engines.circuit_breaker import BreakerPolicy, BreakerState, CircuitBreaker

POLICY = BreakerPolicy(failures=3, window_seconds=10.0, open_seconds=2.0, longest_seconds=7.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(POLICY, clock)


def fail(breaker: CircuitBreaker, times: int = 3) -> None:
    for _ in range(times):
        breaker.failed()


def test_it_opens_after_failures_in_a_row(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    breaker.sent("good")
    breaker.finished("good")
    fail(breaker, 2)
    assert breaker.admits
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.admits


def test_failures_far_apart_are_not_in_a_row(breaker: CircuitBreaker, clock: Clock) -> None:
    for _ in range(10):
        breaker.failed()
        clock.now += 11.0
    assert breaker.state is BreakerState.CLOSED


def test_refusals_and_first_tokens_are_not_successes(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    breaker.sent("begins")
    breaker.answered("begins")
    breaker.dropped("begins")
    breaker.failed()
    assert breaker.state is BreakerState.OPEN, "requests that begin and then fail are failures in a row"


def test_one_request_at_a_time_proves_it(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker)
    clock.now += 2.0
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.sent("probe")
    assert not breaker.admits
    breaker.finished("old")
    breaker.answered("old")
    assert not breaker.admits, "what was sent before says nothing"
    breaker.dropped("probe")
    assert breaker.admits, "a client that left says nothing either"
    breaker.sent("second")
    breaker.answered("second")
    assert breaker.state is BreakerState.CLOSED


def test_it_stays_open_for_longer_each_time(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker)
    pauses = []
    for number in range(4):
        start = clock.now
        while not breaker.admits:
            clock.now += 0.5
        pauses.append(clock.now - start)
        breaker.sent(f"probe-{number}")
        breaker.failed()
    assert pauses == [2.0, 4.0, 7.0, 7.0]
    clock.now += 7.0
    breaker.sent("good")
    breaker.finished("good")
    fail(breaker)
    clock.now += 2.0
    assert breaker.admits, "a whole answer makes it as new"


def test_a_lost_engine_that_is_open_is_no_news(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker)
    fail(breaker, 20)
    clock.now += 2.0
    assert breaker.admits


def test_the_least_bad_is_the_one_whose_turn_comes_first(clock: Clock) -> None:
    good, bad, worse = (CircuitBreaker(POLICY, clock) for _ in range(3))
    fail(bad)
    clock.now += 1.0
    fail(worse)
    assert sorted((worse, good, bad), key=lambda breaker: breaker.badness) == [good, bad, worse]


@pytest.mark.parametrize("numbers", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 2, 1)])
def test_senseless_policies_are_refused(numbers: tuple[int, float, float, float]) -> None:
    with pytest.raises(ValueError, match="failures"):
        BreakerPolicy(*numbers)
