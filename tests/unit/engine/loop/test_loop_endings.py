"""Loop endings."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from services.common.errors import (
    DeadlineExceeded,
    Unavailable,
)
from services.engine.kv_cache.keys import Tier
from services.engine.kv_offload.messages import Load
from services.engine.loop.loop import EngineLoop
from services.engine.loop.rollout_buffer import RolloutBuffer
from services.engine.requests.adapter import AdapterChoice
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.request import FinishReason
from tests.unit.engine.loop.loop_fixture import (
    CONFIG,
    TIMEOUT,
    Client,
    Fixture,
    IdleGate,
    StuckTiers,
    _broken,
    adapted,
    running,
    tokens,
)
from tests.unit.engine.machine import reference
from tests.unit.engine.toy_tiers import ToyTiers


def test_deadline_ends_a_request(engine: Fixture) -> None:
    engine.submit("late", deadline=0.0)
    last = engine.client.wait("late")["late"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, DeadlineExceeded)
    engine.check_nothing_left()


def test_remembers_rollouts_that_were_asked_for(engine: Fixture) -> None:
    engine.submit("kept", adapter=AdapterChoice(name="a"), keep_rollout=True)
    engine.submit("not kept")
    engine.client.wait("kept", "not kept")
    found, missing = engine.loop.rollouts.get(["kept", "not kept"])
    assert missing == ["not kept"]
    assert list(found[0].prompt_token_ids) == [1, 2, 3]
    assert list(found[0].token_ids) == reference((1, 2, 3), 5)
    assert list(found[0].sampling_logprobs) == [-0.5] * 5
    assert found[0].adapter == "a@1"


def test_a_stop_string_ends_a_request_or_cuts_its_rollout(engine: Fixture) -> None:
    engine.runner.hold()
    engine.submit("running", keep_rollout=True, max_tokens=50)
    engine.wait_until_held()
    engine.loop.abort("running", keep_tokens=1)
    engine.runner.go_on()
    assert engine.client.wait("running")["running"][-1].finish_reason is FinishReason.STOP
    engine.submit("ended", keep_rollout=True)
    engine.client.wait("ended")
    told: list[list[SequenceUpdate]] = []
    engine.loop.abort("ended", keep_tokens=2, on_kept=told.append)
    engine.settle()
    assert told == [[SequenceUpdate("ended", kept=True)]]
    found, _ = engine.loop.rollouts.get(["running", "ended"])
    assert [list(rollout.token_ids) for rollout in found] == [reference((1, 2, 3), n) for n in (1, 2)]
    assert all(rollout.finish_reason is FinishReason.STOP for rollout in found)
    engine.check_nothing_left()


def test_boundary_calls_return_and_raise(engine: Fixture) -> None:
    assert engine.loop.call_at_boundary(lambda: 5).result(TIMEOUT) == 5
    with pytest.raises(ZeroDivisionError):
        engine.loop.call_at_boundary(lambda: 1 // 0).result(TIMEOUT)
    nested = engine.loop.call_at_boundary(lambda: engine.loop.call_at_boundary(lambda: 6).result(0))
    assert nested.result(TIMEOUT) == 6


def test_drain_finishes_what_runs_and_refuses_what_comes(engine: Fixture) -> None:
    engine.runner.hold()
    engine.submit("last")
    engine.runner.entered.get(timeout=TIMEOUT)
    assert not engine.loop.drain(0.0)
    with pytest.raises(Unavailable):
        engine.submit("too late")
    engine.runner.go_on()
    assert engine.loop.drain(TIMEOUT)
    assert tokens(engine.client.wait("last")["last"]) == reference((1, 2, 3), 5)
    assert not engine.loop.status().accepting


def test_stop_answers_everything(depth: int) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(running(depth))
        engine.runner.hold()
        engine.adapters.loaded = False
        engine.submit("runs", max_tokens=60)
        engine.submit("loads", adapter=AdapterChoice(name="a"))
        engine.runner.entered.get(timeout=TIMEOUT)
        engine.submit("queued", max_tokens=60)
        stopper = threading.Thread(target=engine.loop.stop)
        stopper.start()
        # Not until two commands wait: before a second step the loop may have taken the first of them.
        while engine.loop._accepting:
            threading.Event().wait(0.001)
        with engine.loop._lock:  # under which the end is queued
            pass
        engine.runner.go_on()
        stopper.join(TIMEOUT)
        updates = engine.client.wait("runs", "loads", "queued")
        assert all(isinstance(updates[name][-1].error, Unavailable) for name in ("runs", "loads", "queued"))
        assert engine.adapters.pins == []
        with pytest.raises(Unavailable):
            engine.submit("after")
        with pytest.raises(Unavailable):
            engine.loop.call_at_boundary(lambda: None).result(TIMEOUT)
        assert engine.loop.drain(0.0)
        assert not engine.loop.healthy


def test_two_hundred_clients_that_leave_at_random_leave_nothing(engine: Fixture) -> None:
    """Submissions and departures from several threads while the loop runs."""

    def crowd(first: int) -> None:
        for n in range(first, first + 50):
            client = Client()
            prompt = tuple(1 + (n * k) % 7 for k in range(1 + n % 23))
            engine.submit(f"c{n}", prompt, client=client, max_tokens=1 + n % 30)
            if n % 3 == 0:
                engine.loop.abort_all(client)
            elif n % 3 == 1:
                client.frames.get(timeout=TIMEOUT)
                engine.loop.abort(f"c{n}")
                client.wait(f"c{n}")
            else:
                updates = client.wait(f"c{n}")[f"c{n}"]
                assert tokens(updates) == reference(prompt, 1 + n % 30)

    failures: list[BaseException] = []

    def guarded(first: int) -> None:
        try:
            crowd(first)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(50 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not failures
    engine.check_nothing_left()


def test_a_trainer_gets_the_device_to_itself_between_steps(engine: Fixture) -> None:
    """Steps may overlap before and after, but while it trains each runs alone and never beside it."""
    engine.submit("r", max_tokens=60)
    engine.client.frames.get(timeout=TIMEOUT)
    with engine.gate.training():
        for _ in range(5):
            assert engine.runner.in_flight == 0
            engine.gate.give_way()
    updates = engine.client.wait("r")["r"]
    assert updates[-1].finish_reason is FinishReason.LENGTH
    engine.settle()
    engine.check_nothing_left()


def test_steps_overlap_as_far_as_the_runner_does(engine: Fixture) -> None:
    engine.submit("r", max_tokens=20)
    assert tokens(engine.client.wait("r")["r"]) == reference((1, 2, 3), 20)
    assert engine.runner.most_in_flight == engine.runner.depth


def test_a_step_that_fails_late_ends_its_requests_and_serving_goes_on(engine: Fixture) -> None:
    engine.runner.late_failures = 1
    engine.submit("unlucky", max_tokens=20)
    assert engine.client.wait("unlucky")["unlucky"][-1].error is not None
    engine.submit("lucky")
    assert tokens(engine.client.wait("lucky")["lucky"]) == reference((1, 2, 3), 5)
    engine.check_nothing_left()


def test_an_adapter_is_released_when_no_step_in_flight_computes_with_it() -> None:
    """A request that is aborted ends at once; the steps that were launched for it before go on reading its slot."""
    with running(depth=2) as engine:
        engine.runner.hold()
        engine.submit("r", tuple(range(1, 40)), adapter=adapted())
        engine.wait_until_held()
        engine.loop.abort("r")
        engine.runner.go_on_once()
        assert engine.client.wait("r")["r"][-1].finish_reason is FinishReason.ABORT
        assert engine.runner.in_flight == 1
        assert len(engine.adapters.pins) == 1, "the step that was launched behind the first one is still in flight"
        engine.runner.go_on()
        engine.check_nothing_left()


def test_an_adapter_of_a_request_that_no_step_computed_for_is_released_too() -> None:
    with running(depth=2) as engine:
        engine.submit("r", adapter=adapted(), max_tokens=2)
        engine.client.wait("r")
        engine.check_nothing_left()
        engine.adapters.loaded = False
        engine.submit("waits", adapter=adapted())
        engine.settle()
        engine.loop.abort("waits")
        assert engine.client.wait("waits")["waits"][-1].finish_reason is FinishReason.ABORT
        engine.check_nothing_left()


@pytest.mark.parametrize("how", ["late", "launch", "books", "stop"])
def test_adapters_are_released_however_the_steps_in_flight_end(how: str) -> None:
    with running(depth=2) as engine:
        engine.runner.hold()
        engine.submit("r", max_tokens=30, adapter=adapted())
        engine.wait_until_held()
        engine.loop.abort("r")
        if how == "late":
            engine.runner.late_failures = 2
        elif how == "launch":
            engine.submit("other", max_tokens=3)
            engine.runner.failures = 1
        elif how == "books":
            engine.loop.call_at_boundary(lambda: setattr(engine.loop._pipeline, "advance", _broken))
        engine.runner.go_on()
        engine.client.wait("r")
        if how != "stop":
            engine.settle()
    assert engine.adapters.pins == []


def test_the_trainer_has_the_device_while_all_requests_wait_for_a_tier() -> None:
    fixture = Fixture()
    tiers = ToyTiers(fixture.runner, CONFIG.block_size)
    gate = IdleGate()
    config = replace(CONFIG, token_seconds=1.0)
    loop = EngineLoop(config, fixture.runner, fixture.adapters, gate, RolloutBuffer(1, 60.0), tiers=tiers)
    fixture.loop, fixture.gate = loop, gate
    loop.start()
    try:
        prompt = tuple(range(1, 20))
        fixture.submit("first", prompt)
        fixture.client.wait("first")
        counts = loop.status().counts
        for _ in range(100):
            loop.call_with_scheduler(lambda scheduler: tiers.work()).result(TIMEOUT)
            loop.call_with_scheduler(lambda scheduler: scheduler.clear_cache()).result(TIMEOUT)
            counts = loop.call_with_scheduler(lambda scheduler: scheduler.counts()).result(TIMEOUT)
            if not counts.blocks_cached and tiers.entries:
                break
        assert (counts.blocks_cached, bool(tiers.entries)) == (0, True)
        fixture.submit("second", prompt)
        while not any(isinstance(job, Load) for job in tiers.commands):
            time.sleep(0.001)
        gate.busy = True
        while not gate.told.get(timeout=TIMEOUT):
            """Skips the notices from before the stall."""
        with gate.training():  # returns while the request waits: nobody else has the device
            pass
        assert any(isinstance(job, Load) for job in tiers.commands), "it still waits"
        loop.call_with_scheduler(lambda scheduler: tiers.work()).result(TIMEOUT)
        assert fixture.client.wait("second")["second"][-1].finished.cached_from is Tier.HOST  # type: ignore[union-attr]
    finally:
        loop.stop()


def test_a_loop_that_cannot_have_clean_books_answers_everybody_and_ends() -> None:
    fixture = Fixture()
    tiers = StuckTiers(fixture.runner, CONFIG.block_size)
    loop = EngineLoop(CONFIG, fixture.runner, fixture.adapters, fixture.gate, RolloutBuffer(1, 60.0), tiers=tiers)
    fixture.loop = loop
    loop.start()
    loop.call_at_boundary(lambda: setattr(loop._pipeline, "advance", _broken)).result(TIMEOUT)
    fixture.submit("r")
    assert isinstance(fixture.client.wait("r")["r"][-1].error, Unavailable)
    loop._thread.join(TIMEOUT)
    assert not loop.alive
    with pytest.raises(Unavailable):
        fixture.submit("later")
