"""Entrance of training(): real threads."""

from __future__ import annotations

import threading
import time

import pytest

from services.engine.compute_sharing.entrance import Entrance

TIMEOUT = 30.0


def test_threads_are_let_in_one_at_a_time_in_the_order_in_which_they_came() -> None:
    entrance, log = Entrance(), []

    def pass_through(name: int) -> None:
        with entrance.passed():
            log.append(name)

    with entrance.passed():
        threads = []
        for name in range(4):
            threads.append(threading.Thread(target=pass_through, args=(name,), daemon=True))
            threads[-1].start()
            until = time.monotonic() + TIMEOUT
            while len(entrance._threads) < name + 2 and time.monotonic() < until:
                time.sleep(0.001)
        assert not log
    for thread in threads:
        thread.join(TIMEOUT)
    assert log == [0, 1, 2, 3]


def test_a_thread_that_would_wait_for_itself_is_refused_and_one_that_fails_lets_others_in() -> None:
    entrance = Entrance()
    with entrance.passed(), pytest.raises(RuntimeError, match="twice"), entrance.passed():
        pass
    with pytest.raises(ZeroDivisionError), entrance.passed():
        raise ZeroDivisionError
    with entrance.passed():
        pass
