"""The engine loop on a toy model: real threads, no sleeps; tests wait for updates, never for time."""

from __future__ import annotations

import pytest

from services.common.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from services.engine.observability.status import Phase
from services.engine.requests.adapter import AdapterChoice
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.request import FinishReason
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from tests.unit.engine.loop.loop_fixture import (
    CONFIG,
    TIMEOUT,
    Client,
    Fixture,
    running,
    tokens,
)
from tests.unit.engine.machine import reference


def test_answers_are_those_of_a_lone_request(engine: Fixture) -> None:
    prompts = {f"r{n}": tuple(range(1, 2 + 3 * n)) for n in range(10)}
    for name, prompt in prompts.items():
        engine.submit(name, prompt)
    updates = engine.client.wait(*prompts)
    for name, prompt in prompts.items():
        assert tokens(updates[name]) == reference(prompt, 5)
        assert updates[name][-1].finish_reason is FinishReason.LENGTH
        assert updates[name][0].adapter == ""
        assert updates[name][0].cached_tokens is not None
        assert all(update.adapter is update.cached_tokens is None for update in updates[name][1:])
    engine.check_nothing_left()
    assert len(engine.observer.done) == len(prompts)
    assert sum(step.decodes + step.prefill_tokens for step in engine.observer.steps) == engine.runner.computed_tokens
    assert engine.loop.status().steps == engine.runner.steps


def test_a_pause_keeps_requests_as_they_are(engine: Fixture) -> None:
    engine.runner.hold()
    engine.submit("before", max_tokens=20)
    engine.runner.entered.get(timeout=TIMEOUT)
    paused = engine.loop.pause(600)
    engine.runner.go_on()
    paused.result(TIMEOUT)
    engine.submit("during", (5, 6), max_tokens=2)
    # Steps that were in flight end; after them nothing runs, and calls are served nevertheless.
    for _ in range(3):
        steps = engine.loop.call_at_boundary(lambda: engine.runner.steps).result(TIMEOUT)
    live = engine.loop.live_requests().result(TIMEOUT)
    assert {request.request_id for request in live} == {"before", "during"}
    assert engine.loop.call_at_boundary(lambda: engine.runner.steps).result(TIMEOUT) == steps
    assert engine.loop.status().paused
    engine.loop.resume().result(TIMEOUT)
    updates = engine.client.wait("before", "during")
    assert tokens(updates["before"]) == reference((1, 2, 3), 20)
    assert tokens(updates["during"]) == reference((5, 6), 2)
    assert not engine.loop.status().paused
    engine.check_nothing_left()


def test_a_pause_that_nobody_ends(engine: Fixture) -> None:
    engine.loop.pause(0.05).result(TIMEOUT)
    engine.submit("r", max_tokens=2)
    engine.client.wait("r")
    engine.loop.pause(600).result(TIMEOUT)
    engine.submit("s", max_tokens=2)
    assert engine.loop.drain(TIMEOUT), "draining ends a pause"
    engine.client.wait("s")


def test_one_call_per_step_and_sink(engine: Fixture) -> None:
    engine.runner.hold()
    engine.submit("warm", max_tokens=1)
    engine.runner.entered.get(timeout=TIMEOUT)
    other = Client()
    for n in range(3):
        engine.submit(f"a{n}", max_tokens=2)
    engine.submit("b", client=other, max_tokens=2)
    engine.runner.go_on()
    engine.client.wait("a0", "a1", "a2")
    other.wait("b")
    assert engine.client.frames.empty()
    frames = Client()
    engine.runner.hold()
    engine.submit("warm", client=other, max_tokens=1)
    engine.runner.entered.get(timeout=TIMEOUT)
    for n in range(3):
        engine.submit(f"c{n}", client=frames, max_tokens=2)
    engine.runner.go_on()
    first, second = (frames.frames.get(timeout=TIMEOUT) for _ in range(2))
    assert [update.request_id for update in first] == [update.request_id for update in second] == ["c0", "c1", "c2"]


def test_refuses_what_never_fits_at_once(engine: Fixture) -> None:
    with pytest.raises(ContextLengthExceeded, match="64"):
        engine.submit("long", tuple(range(1, 65)))
    with pytest.raises(InvalidRequest):
        engine.submit("", (1,))
    engine.check_nothing_left()


def test_refuses_ids_in_use(engine: Fixture) -> None:
    engine.runner.hold()
    engine.submit("same")
    engine.runner.entered.get(timeout=TIMEOUT)
    other = Client()
    engine.submit("same", client=other)
    engine.runner.go_on()
    assert isinstance(other.wait("same")["same"][0].error, InvalidRequest)
    assert tokens(engine.client.wait("same")["same"]) == reference((1, 2, 3), 5)
    engine.check_nothing_left()


def test_bounds_the_queue(depth: int) -> None:
    with running(depth, max_waiting=2) as engine:
        engine.runner.hold()
        engine.submit("r0")
        engine.runner.entered.get(timeout=TIMEOUT)
        for n in range(1, 6):
            engine.submit(f"r{n}")
        with pytest.raises(Overloaded, match="limit is 2"):
            engine.submit("r6")
        engine.runner.go_on()
        engine.client.wait(*(f"r{n}" for n in range(6)))
        engine.settle()
        engine.submit("r6")
        engine.client.wait("r6")
        engine.check_nothing_left()


def test_abort_frees_everything_and_says_so(engine: Fixture) -> None:
    engine.runner.hold()
    engine.submit("gone", max_tokens=50)
    engine.submit("stays")
    engine.wait_until_held()
    engine.loop.abort("gone")
    engine.loop.abort("never was")
    engine.runner.go_on()
    updates = engine.client.wait("gone", "stays")
    assert updates["gone"][-1].finish_reason is FinishReason.ABORT
    assert len(updates["gone"]) == 2
    assert tokens(updates["stays"]) == reference((1, 2, 3), 5)
    engine.check_nothing_left()


def test_abort_all_ends_only_that_sink(engine: Fixture) -> None:
    gone = Client()
    engine.adapters.loaded = False
    engine.runner.hold()
    engine.submit("g0", client=gone, max_tokens=50)
    engine.submit("g1", client=gone, adapter=AdapterChoice(name="a"))
    engine.submit("s0")
    engine.wait_until_held()
    engine.loop.abort_all(gone)
    engine.runner.go_on()
    engine.client.wait("s0")
    engine.settle()
    assert all(update.finish_reason is None for update in gone.frames.get(timeout=TIMEOUT))
    assert gone.frames.empty()
    engine.check_nothing_left()


def test_a_failing_sink_loses_only_its_own_requests(engine: Fixture) -> None:
    calls = []

    def broken(updates: list[SequenceUpdate]) -> None:
        calls.append(updates)
        raise ConnectionError("stream is gone")

    engine.loop.submit(Submission("b", (1,), SamplingParams(max_tokens=50), AdapterChoice()), broken)
    engine.submit("fine")
    assert tokens(engine.client.wait("fine")["fine"]) == reference((1, 2, 3), 5)
    engine.settle()
    assert len(calls) == 1
    engine.check_nothing_left()


def test_a_failed_step_ends_its_requests_and_serving_goes_on(engine: Fixture) -> None:
    engine.runner.failures = 1
    engine.submit("unlucky")
    last = engine.client.wait("unlucky")["unlucky"][-1]
    assert last.error is not None
    assert last.error.code == "internal_error"
    assert "device lost" not in last.error.message
    engine.submit("lucky")
    assert tokens(engine.client.wait("lucky")["lucky"]) == reference((1, 2, 3), 5)
    engine.check_nothing_left()
    assert engine.loop.healthy


def test_failures_in_a_row_make_it_unhealthy_until_a_step_succeeds(engine: Fixture) -> None:
    engine.runner.failures = 3
    for n in range(3):
        engine.submit(f"r{n}")
        engine.client.wait(f"r{n}")
    engine.settle()
    engine.settle()
    assert not engine.loop.healthy
    assert engine.loop.status().failed_steps == 3
    engine.submit("good")
    engine.client.wait("good")
    engine.settle()
    assert engine.loop.healthy
    engine.check_nothing_left()


def test_broken_books_end_all_requests_and_serving_goes_on(engine: Fixture) -> None:
    engine.runner.hold()
    engine.submit("r0", max_tokens=20)
    engine.runner.entered.get(timeout=TIMEOUT)

    def break_books() -> None:
        engine.loop._pipeline.scheduler._memory._slots.release(engine.loop._pipeline.scheduler._queue.running[0].slot)

    engine.loop.call_at_boundary(break_books)
    engine.loop.abort("r0")
    engine.runner.go_on()
    assert engine.client.wait("r0")["r0"][-1].error is not None
    engine.submit("r1")
    assert tokens(engine.client.wait("r1")["r1"]) == reference((1, 2, 3), 5)
    engine.check_nothing_left()


def test_idle_moments_are_used_to_check_the_books(engine: Fixture) -> None:
    """A leak that no request runs into is found by the check, and the next request gets clean books."""
    engine.submit("r0")
    engine.client.wait("r0")
    leaky = engine.loop.call_at_boundary(lambda: engine.loop._pipeline.scheduler).result(TIMEOUT)
    engine.loop.call_at_boundary(lambda: leaky._memory._slots.take()).result(TIMEOUT)
    assert engine.observer.failed.wait(TIMEOUT)
    engine.settle()
    assert engine.loop._pipeline.scheduler is not leaky
    engine.submit("r1")
    assert tokens(engine.client.wait("r1")["r1"]) == reference((1, 2, 3), 5)
    engine.check_nothing_left()


def test_waits_for_an_adapter_outside_the_scheduler(engine: Fixture) -> None:
    engine.adapters.loaded = False
    engine.submit("waits", adapter=AdapterChoice(name="a"))
    engine.submit("passes")
    engine.client.wait("passes")
    engine.settle()
    assert engine.loop.status().waiting_for_adapters == 1
    engine.adapters.loaded = True
    engine.loop.retry_adapters()
    updates = engine.client.wait("waits")["waits"]
    assert updates[0].adapter == "a@1"
    assert tokens(updates) == reference((1, 2, 3), 5)
    engine.check_nothing_left()


def test_a_boundary_call_flips_adapters_for_waiting_requests(engine: Fixture) -> None:
    engine.adapters.loaded = False
    engine.submit("waits", adapter=AdapterChoice(name="a"))
    engine.loop.call_at_boundary(lambda: setattr(engine.adapters, "loaded", True)).result(TIMEOUT)
    assert engine.client.wait("waits")["waits"][0].adapter == "a@1"


def test_unknown_and_unloadable_adapters_end_with_their_error(engine: Fixture) -> None:
    engine.submit("unknown", adapter=AdapterChoice(name="nope"))
    assert isinstance(engine.client.wait("unknown")["unknown"][0].error, ModelNotFound)
    engine.adapters.loaded = False
    engine.submit("waits", adapter=AdapterChoice(name="a"))
    engine.settle()
    engine.adapters.error = Unavailable("store away")
    engine.loop.retry_adapters()
    assert isinstance(engine.client.wait("waits")["waits"][0].error, Unavailable)
    engine.check_nothing_left()


def test_gives_up_waiting_for_an_adapter() -> None:
    with running(adapter_wait_seconds=0.01) as engine:
        engine.adapters.loaded = False
        engine.submit("waits", adapter=AdapterChoice(name="a"))
        error = engine.client.wait("waits")["waits"][0].error
        assert isinstance(error, Unavailable)
        assert error.message == "a is overdue"
        engine.submit("late", adapter=AdapterChoice(name="a"), deadline=0.0)
        assert isinstance(engine.client.wait("late")["late"][0].error, DeadlineExceeded)
        engine.check_nothing_left()


def test_the_adapters_are_told_when_nobody_waits_for_a_choice_any_more(engine: Fixture) -> None:
    engine.adapters.loaded = False
    choice = AdapterChoice(name="a")
    for name in ("first", "second"):
        engine.submit(name, adapter=choice)
    engine.loop.abort("first")
    engine.settle()
    assert engine.adapters.given_up == []
    engine.loop.abort("second")
    engine.settle()
    assert engine.adapters.given_up == [choice]
    engine.check_nothing_left()


def test_live_requests_and_their_phases(depth: int) -> None:
    with running(depth) as engine:
        engine.runner.hold()
        engine.submit("long", tuple(range(1, 31)), max_tokens=20, owner="k-1")
        engine.wait_until_held()
        engine.adapters.loaded = False
        engine.submit("loading", (1, 2), adapter=AdapterChoice(name="a", version=3))
        for n in range(CONFIG.max_num_seqs):
            engine.submit(f"short{n}", (1, 2), priority=1, background=n == 0)
        asked = engine.loop.live_requests()
        engine.runner.go_on_once()
        found = {live.request_id: live for live in asked.result(TIMEOUT)}
        assert next(iter(found)) == "long"
        long, loading = found["long"], found["loading"]
        assert (long.owner, long.prompt_tokens, long.cached_tokens) == ("k-1", 30, 0)
        assert long.phase in (Phase.PREFILL, Phase.DECODE)
        assert 0 < long.computed_tokens <= 30
        assert (loading.phase, loading.adapter, loading.computed_tokens) == (Phase.LOADING, "a@3", 0)
        waits = found["short3"]
        assert (waits.phase, waits.priority, waits.output_tokens) == (Phase.WAITING, 1, 0)
        assert found["short0"].background
        assert long.age_seconds >= loading.age_seconds >= 0
        engine.runner.go_on()
        engine.adapters.loaded = True
        engine.loop.retry_adapters()
        engine.client.wait("long", "loading", *(f"short{n}" for n in range(CONFIG.max_num_seqs)))
        assert engine.loop.live_requests().result(TIMEOUT) == []
