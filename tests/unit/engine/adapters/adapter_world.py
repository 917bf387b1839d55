"""Engines and clients that the tests of adapters share."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import Pointers
from services.common.errors import (
    AdapterRejected,
    ModelNotFound,
    Unavailable,
)
from services.engine.adapters.loader import AdapterLoader
from services.engine.adapters.manager import AdapterManager
from services.engine.adapters.slot_table import AdapterConfig
from services.engine.observability.events import (
    AdapterLoadFailed,
    AdapterPhase,
    AdapterPhaseDone,
    EngineEvent,
    EventStream,
    LoadFailure,
)
from services.engine.requests.adapter import AdapterChoice, AdapterPin

ATTACHED = AdapterChoice(attached=True)


@dataclass
class FakeManifest:
    digest: str
    base_digest: str = "base"
    kind: str = "adapter"


TIMEOUT = 30.0


@dataclass
class FakeRegistry:
    """Names to version counts; versions listed in ``corrupt`` do not bind."""

    current_versions: dict[str, int] = field(default_factory=dict)
    attachment: AdapterVersion | None = None
    corrupt: set[str] = field(default_factory=set)
    foreign: set[str] = field(default_factory=set)
    away: bool = False
    calls: list[str] = field(default_factory=list)

    def _touch(self, call: str) -> None:
        self.calls.append(call)
        if self.away:
            raise Unavailable("the store is away")

    def pointers(self) -> Pointers:
        self._touch("pointers")
        return Pointers(
            self.attachment, dict(self.current_versions), repr((self.attachment, sorted(self.current_versions.items())))
        )

    def current(self, name: str) -> AdapterVersion:
        self._touch(f"current {name}")
        if name not in self.current_versions:
            raise ModelNotFound("no")
        return AdapterVersion(name, self.current_versions[name])

    def manifest(self, version: AdapterVersion) -> FakeManifest:
        self._touch(f"manifest {version}")
        if version.version > self.current_versions.get(version.name, 0):
            raise ModelNotFound("no")
        return FakeManifest(f"digest {version}", "another" if str(version) in self.foreign else "base")

    def files(self, version: AdapterVersion) -> dict[str, bytes]:
        self._touch(f"files {version}")
        return {"weights": str(version).encode()}


class FakeLora:
    def __init__(self) -> None:
        self.slots: dict[int, str] = {}

    def load(self, slot: int, bound: str) -> None:
        self.slots[slot] = bound


class FakeLoop:
    """Runs boundary calls on its own thread, like the engine loop; counts retries."""

    def __init__(self) -> None:
        self.retries = threading.Semaphore(0)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def call_at_boundary(self, function: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._calls.put(lambda: future.set_result(function()))
        return future

    def retry_adapters(self) -> None:
        self.retries.release()

    def stop(self) -> None:
        self._calls.put(None)
        self._thread.join()


class Swaps:
    """Counts of the events of adapters."""

    def __init__(self) -> None:
        self.phases: list[AdapterPhase] = []
        self.failures: list[LoadFailure] = []

    def listen(self, event: EngineEvent) -> None:
        if isinstance(event, AdapterPhaseDone):
            assert event.seconds >= 0
            self.phases.append(event.phase)
        elif isinstance(event, AdapterLoadFailed):
            self.failures.append(event.reason)


class World:
    def __init__(
        self, slots: int = 3, wait_seconds: float = 5.0, turn_seconds: float = 1.0, drafter: Any = None
    ) -> None:
        self.swaps = Swaps()
        self.max_members = 16
        self.events = EventStream(self.swaps.listen)
        self.registry = FakeRegistry()
        self.lora = FakeLora()
        self.loop = FakeLoop()
        self.manager = AdapterManager(
            cast(Any, self.registry),
            None,
            AdapterLoader(cast(Any, self.registry), cast(Any, self.lora), self, base_digest="base", events=self.events),
            AdapterConfig(slots, poll_seconds=60.0, wait_seconds=wait_seconds, turn_seconds=turn_seconds),
            self.events,
            drafter,
        )

    def bind(self, files: Mapping[str, bytes]) -> Any:
        name = files["weights"].decode()
        if name in self.registry.corrupt:
            raise AdapterRejected("tensor x is missing")
        return name

    def compose(self, members: Sequence[tuple[str, Any, float]]) -> Any:
        if len(members) > self.max_members:
            raise AdapterRejected("the ranks are too many")
        return " ".join(f"{bound}*{scale:g}" for _, bound, scale in members)

    def start(self) -> World:
        self.manager.start(self.loop)
        return self

    def pin(self, choice: AdapterChoice) -> AdapterPin:
        """Pins like the engine loop does: asks again whenever it is told to."""
        for _ in range(20):
            pin = self.manager.pin(choice)
            if pin is not None:
                return pin
            assert self.loop.retries.acquire(timeout=TIMEOUT), "never told to try again"
        raise AssertionError("still loading after 20 tries")

    def publish(self, name: str, *, attach: bool = True) -> AdapterVersion:
        version = AdapterVersion(name, self.registry.current_versions.get(name, 0) + 1)
        self.registry.current_versions[name] = version.version
        if attach:
            self.registry.attachment = version
        return version

    def sync(self, version: AdapterVersion | None = None, timeout: float = TIMEOUT) -> None:
        self.manager.sync(version, timeout)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.manager.stop()
    world.loop.stop()


def named(name: str, version: int | None = None) -> AdapterChoice:
    return AdapterChoice(name=name, version=version)


def full(slots: int, **limits: float) -> tuple[World, list[AdapterPin]]:
    """A world whose slots are all in use, and the pins."""
    world = World(slots, **limits).start()
    pins = []
    for name in "abcdefgh"[:slots]:
        world.publish(name, attach=False)
        pins.append(world.pin(named(name)))
    return world, pins


@contextmanager
def in_use(slots: int, **limits: float) -> Iterator[tuple[World, list[AdapterPin]]]:
    world, pins = full(slots, **limits)
    yield world, pins
    world.manager.stop()
    world.loop.stop()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class FailingNudges:
    """Fails once as no client of Redis should, then tells of an event."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, timeout: float) -> bool:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("a bug")
        time.sleep(0.01)
        return True
