"""The engine loop on a toy model: real threads, no sleeps; tests wait for updates, never for time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from queue import SimpleQueue

import pytest

from services.common.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TemperError,
    Unavailable,
)
from services.engine.compute_sharing.host_lock import SliceGate
from services.engine.kv_cache.block_pool import IntegrityError
from services.engine.kv_cache.keys import Tier
from services.engine.kv_offload.messages import Load
from services.engine.loop.kept_completions import RolloutMemory
from services.engine.loop.loop import EngineLoop
from services.engine.observability.events import EngineEvent, EventStream, RequestDone, StepDone, StepFailed
from services.engine.requests.adapter import BASE_PIN, AdapterChoice, AdapterPin
from services.engine.requests.outputs import Finished, SequenceUpdate
from services.engine.requests.request import FinishReason
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.step_plan import StepPlan, StepResult
from tests.unit.engine.machine import ToyRunner, reference
from tests.unit.engine.toy_tiers import ToyTiers

CONFIG = SchedulerConfig(max_num_seqs=4, token_budget=16, block_size=4, num_blocks=40, num_slots=8, max_model_len=64)
TIMEOUT = 30.0


class Adapters:
    """A resolver with one adapter, "a", that may be loading."""

    def __init__(self) -> None:
        self.loaded = True
        self.error: TemperError | None = None
        self.pins: list[AdapterPin] = []
        self.given_up: list[AdapterChoice] = []

    def pin(self, choice: AdapterChoice) -> AdapterPin | None:
        if choice.name is None:
            pin = BASE_PIN
        elif choice.name != "a":
            raise ModelNotFound(f"no adapter {choice.name}")
        elif self.error is not None:
            raise self.error
        elif not self.loaded:
            return None
        else:
            pin = AdapterPin("a@1", "digest", 1)
        self.pins.append(pin)
        return pin

    def release(self, pin: AdapterPin) -> None:
        self.pins.remove(pin)

    def give_up(self, choice: AdapterChoice) -> None:
        self.given_up.append(choice)

    def overdue(self, choice: AdapterChoice) -> TemperError:
        return Unavailable(f"{choice.name} is overdue")


class Client:
    """A sink whose updates a test can wait for."""

    def __init__(self) -> None:
        self.frames: SimpleQueue[list[SequenceUpdate]] = SimpleQueue()

    def __call__(self, updates: list[SequenceUpdate]) -> None:
        self.frames.put(updates)

    def wait(self, *names: str) -> dict[str, list[SequenceUpdate]]:
        """The updates so far, once all named requests have ended."""
        updates: dict[str, list[SequenceUpdate]] = {}
        open_names = set(names)
        while open_names:
            for update in self.frames.get(timeout=TIMEOUT):
                updates.setdefault(update.request_id, []).append(update)
                if update.finish_reason is not None:
                    open_names.discard(update.request_id)
        return updates


class Computing:
    """A step whose result comes when the runner is not held."""

    def __init__(self, runner: StoppableRunner, value: StepResult) -> None:
        self.runner = runner
        self.value = value

    def result(self) -> StepResult:
        self.runner.await_turn()
        self.runner.in_flight -= 1
        if self.runner.late_failures:
            self.runner.late_failures -= 1
            raise RuntimeError("device lost")
        return self.value


class StoppableRunner(ToyRunner):
    """Has no result before it may go on while it is held, and fails on demand, at the launch or later."""

    def __init__(self, depth: int) -> None:
        super().__init__(CONFIG, depth)
        self.failures = 0
        self.late_failures = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.entered: SimpleQueue[StepPlan] = SimpleQueue()
        self.one = threading.Semaphore(0)
        self.running = threading.Event()
        self.running.set()

    def launch(self, plan: StepPlan) -> Computing:
        if not self.running.is_set():
            self.entered.put(plan)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("device lost")
        computing = Computing(self, self.execute(plan))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return computing

    def await_turn(self) -> None:
        for _ in range(1000 * int(TIMEOUT)):
            if self.one.acquire(blocking=False) or self.running.wait(0.001):
                return
        raise AssertionError("the runner was held for good")

    def hold(self) -> None:
        self.running.clear()

    def go_on(self) -> None:
        self.running.set()

    def go_on_once(self) -> None:
        """Gives one result out."""
        self.one.release()


class Recorder:
    def __init__(self) -> None:
        self.steps: list[StepDone] = []
        self.done: list[Finished] = []
        self.failed = threading.Event()

    def listen(self, event: EngineEvent) -> None:
        if isinstance(event, StepDone):
            self.steps.append(event)
        elif isinstance(event, StepFailed):
            self.failed.set()
        elif isinstance(event, RequestDone):
            assert event.now >= event.submitted_at
            self.done.append(event.finished)


class Fixture:
    def __init__(self, depth: int = 1, **options: object) -> None:
        self.runner = StoppableRunner(depth)
        self.gate = SliceGate(0.05)
        self.adapters = Adapters()
        self.observer = Recorder()
        self.loop = EngineLoop(
            CONFIG,
            self.runner,
            self.adapters,
            self.gate,
            RolloutMemory(100, 60.0),
            events=EventStream(self.observer.listen),
            **options,
        )
        self.client = Client()

    def wait_until_held(self) -> None:
        """Until the loop waits for a result of the held runner: as many steps as may be are in flight, and commands
        that come now are met behind the first result."""
        for _ in range(self.runner.depth):
            self.runner.entered.get(timeout=TIMEOUT)

    def submit(self, name: str, prompt: tuple[int, ...] = (1, 2, 3), client: Client | None = None, **changes: object):
        sampling = SamplingParams(max_tokens=changes.pop("max_tokens", 5))
        adapter = changes.pop("adapter", AdapterChoice())
        self.loop.submit(Submission(name, prompt, sampling, adapter, **changes), client or self.client)

    def settle(self) -> None:
        """Returns when the loop is between two steps."""
        self.loop.call_at_boundary(lambda: None).result(TIMEOUT)

    def check_nothing_left(self) -> None:
        self.loop.call_at_boundary(self.loop._pipeline.scheduler.check_integrity).result(TIMEOUT)
        counts = self.loop.call_at_boundary(lambda: self.loop._pipeline.scheduler.counts()).result(TIMEOUT)
        assert counts.running == counts.waiting == counts.blocks_used == counts.slots_used == 0
        assert self.adapters.pins == []
        assert len(self.loop._tracker) == 0
        # A step of requests that ended meanwhile may still be in flight.
        for _ in range(1000):
            if not self.loop.call_at_boundary(lambda: self.loop._pipeline.busy).result(TIMEOUT):
                break
        assert self.runner.in_flight == 0


@contextmanager
def running(depth: int = 1, **options: object) -> Iterator[Fixture]:
    fixture = Fixture(depth, **options)
    fixture.loop.start()
    try:
        yield fixture
    finally:
        fixture.runner.go_on()
        fixture.loop.stop()
    assert not fixture.loop._thread.is_alive()


@pytest.fixture(params=[1, 2])
def depth(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def engine(depth: int) -> Iterator[Fixture]:
    with running(depth) as fixture:
        yield fixture


def tokens(updates: list[SequenceUpdate]) -> list[int]:
    return [update.token.token_id for update in updates if update.token is not None]


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
    engine.loop.abort("ended", keep_tokens=2, told=told.append)
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


def adapted() -> AdapterChoice:
    return AdapterChoice(name="a")


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


def _broken(waiting: int) -> list[SequenceUpdate]:
    raise IntegrityError("the books are broken")


class IdleGate(SliceGate):
    """Remembers when it was told that the engine idles."""

    def __init__(self) -> None:
        super().__init__(0.05)
        self.told: SimpleQueue[bool] = SimpleQueue()
        self.busy = False

    def engine_idle(self) -> None:
        self.told.put(self.busy)
        super().engine_idle()


def test_the_trainer_has_the_device_while_all_requests_wait_for_a_tier() -> None:
    fixture = Fixture()
    tiers = ToyTiers(fixture.runner, CONFIG.block_size)
    gate = IdleGate()
    config = replace(CONFIG, token_seconds=1.0)
    loop = EngineLoop(config, fixture.runner, fixture.adapters, gate, RolloutMemory(1, 60.0), tiers=tiers)
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
        while not any(isinstance(job, Load) for job in tiers.jobs):
            time.sleep(0.001)
        gate.busy = True
        while not gate.told.get(timeout=TIMEOUT):
            """Of the time before."""
        with gate.training():  # returns while the request waits: nobody else has the device
            pass
        assert any(isinstance(job, Load) for job in tiers.jobs), "it still waits"
        loop.call_with_scheduler(lambda scheduler: tiers.work()).result(TIMEOUT)
        assert fixture.client.wait("second")["second"][-1].finished.cached_from is Tier.HOST  # type: ignore[union-attr]
    finally:
        loop.stop()


class StuckTiers(ToyTiers):
    def settle(self) -> None:
        raise IntegrityError("the tiers still copy after 60 s")


def test_a_loop_that_cannot_have_clean_books_answers_everybody_and_ends() -> None:
    fixture = Fixture()
    tiers = StuckTiers(fixture.runner, CONFIG.block_size)
    loop = EngineLoop(CONFIG, fixture.runner, fixture.adapters, fixture.gate, RolloutMemory(1, 60.0), tiers=tiers)
    fixture.loop = loop
    loop.start()
    loop.call_at_boundary(lambda: setattr(loop._pipeline, "advance", _broken)).result(TIMEOUT)
    fixture.submit("r")
    assert isinstance(fixture.client.wait("r")["r"][-1].error, Unavailable)
    loop._thread.join(TIMEOUT)
    assert not loop.alive
    with pytest.raises(Unavailable):
        fixture.submit("later")
