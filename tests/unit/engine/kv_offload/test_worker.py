"""Threads that do what they are given."""

from __future__ import annotations

import threading
import time

from services.engine.kv_offload.worker import Worker


def soon() -> float:
    return time.monotonic() + 10


def test_low_ranks_first_and_equal_ones_in_order() -> None:
    worker, done = Worker("w"), list[int]()
    for number, rank in enumerate((2, 1, 2, 0, 1)):
        worker.put(lambda number=number: done.append(number), rank=rank)
    worker.start()
    assert worker.wait_idle(soon())
    assert done == [3, 1, 4, 0, 2]
    assert worker.close(soon())


def test_a_call_that_raises_is_answered_and_the_next_is_done() -> None:
    worker, done = Worker("w"), list[str]()

    def fail() -> None:
        raise RuntimeError

    worker.put(fail, failed=lambda: done.append("failed"))
    worker.put(fail, failed=fail)
    worker.put(lambda: done.append("next"), failed=lambda: done.append("wrong"))
    worker.start()
    assert worker.wait_idle(soon())
    assert done == ["failed", "next"]
    assert worker.close(soon())


def test_what_is_left_at_the_end_is_answered() -> None:
    worker, answered = Worker("w"), list[str]()
    began, go = threading.Event(), threading.Event()
    worker.start()
    worker.put(lambda: (began.set(), go.wait(10)))
    began.wait(10)
    worker.put(lambda: None, failed=lambda: answered.append("waiting"))
    worker.put(lambda: None, at=soon() + 100, failed=lambda: answered.append("later"))
    worker.put(lambda: None, rank=3, failed=lambda: answered.append("forgone"))
    worker.cancel(3)
    assert answered == ["forgone"]
    assert not worker.wait_idle(time.monotonic())
    assert not worker.close(time.monotonic() + 0.05)
    assert answered == ["forgone", "waiting", "later"]
    worker.put(lambda: None, failed=lambda: answered.append("closed"))
    assert answered[-1] == "closed"
    go.set()
    assert worker.close(soon())


def test_calls_for_later() -> None:
    worker, done = Worker("w", 2), list[str]()
    worker.start()
    late = threading.Event()
    worker.put(lambda: (done.append("later"), late.set()), at=time.monotonic() + 0.1)
    worker.put(lambda: done.append("now"))
    assert worker.wait_idle(soon())
    assert done == ["now"]
    assert late.wait(10)
    assert done == ["now", "later"]
    assert worker.close(soon())
