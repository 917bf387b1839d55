"""Engines and clients that the tests of loop share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from services.common.errors import (
    ModelNotFound,
    TemperError,
    Unavailable,
)
from services.engine.compute_sharing.host_lock import SliceGate
from services.engine.kv_cache.block_pool import IntegrityError
from services.engine.loop.loop import EngineLoop
from services.engine.loop.rollout_buffer import RolloutBuffer
from services.engine.observability.events import EngineEvent, EventStream, RequestDone, StepDone, StepFailed
from services.engine.requests.adapter import BASE_PIN, AdapterChoice, AdapterPin
from services.engine.requests.outputs import Finished, SequenceUpdate
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.step_plan import StepPlan, StepResult
from tests.unit.engine.machine import ToyRunner
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
            RolloutBuffer(100, 60.0),
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


def adapted() -> AdapterChoice:
    return AdapterChoice(name="a")


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


class StuckTiers(ToyTiers):
    def settle(self, seconds: float = 0.0) -> None:
        raise IntegrityError("the tiers still copy after 60 s")
