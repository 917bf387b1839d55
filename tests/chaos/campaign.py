"""Campaign: faults, traffic and jobs at once, and what they must have left intact."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread

import httpx

from benchmarks.gateway.kill_clients import ANSWER_SECONDS, Jobs
from tests.chaos.faults import Event, events
from tests.chaos.fleet import Fleet, Sizes
from tests.chaos.ledger import Ledger
from tests.chaos.limits import limited
from tests.chaos.link import Fault
from tests.chaos.stores import Stores
from tests.chaos.traffic.batches import Batches
from tests.chaos.traffic.ground import ATTACHED, MOVED, Ground, prepared
from tests.chaos.traffic.jobs import Kinds, Steering
from tests.chaos.traffic.part import Part
from tests.chaos.traffic.stored import Feedback, Responses
from tests.chaos.traffic.streams import Conversations, Streams
from tests.chaos.traffic.swaps import Publications, Swaps

_CALM_SECONDS = 30.0
"""Longest time from the last fault to the first whole answer by each gateway."""
_AUDIT_SECONDS = 120.0
_SUPERVISE_SECONDS = 0.2
_AGAIN_SECONDS = 2.5
_SIGNALS: Mapping[str, signal.Signals] = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "twice": signal.SIGTERM,
    "hang up": signal.SIGHUP,
    "freeze": signal.SIGSTOP,
}
_MORE_HANDLES = 64
"""Open files that a process may have more than before the faults: connections of its pools."""
_MORE_BYTES = 256 * 2**20
"""Memory that it may have more: caches that fill, and arenas of threads."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a campaign does.

    Args:
        seconds: how long faults are made.
        streams: clients that ask, of each gateway.
        jobs: training jobs of one kind, whose losses are compared, that are unfinished at a time.
        settle: seconds from the last fault to the end of everything that was begun, at most.
        parts: of the traffic besides streams and jobs; empty: all.
        questions: of each shape that are asked, at most.
        pace: times the pauses of clients.
        sequence: faults that are made, in the place of those of the seed.
    """

    seconds: float
    seed: int = 0
    streams: int = 2
    jobs: int = 1
    epochs: int = 24
    settle: float = 300.0
    sizes: Sizes = field(default_factory=Sizes)
    parts: frozenset[str] = frozenset()
    questions: int = 4
    pace: float = 1.0
    sequence: Sequence[Event] = ()


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own, for links: they must not wait for what starts processes."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="links", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Breaker:
    """Makes the faults of a seed, one at a time, and mends each."""

    def __init__(self, fleet: Fleet, loop: asyncio.AbstractEventLoop, plan: Plan, ledger: Ledger) -> None:
        self._fleet, self._loop, self._plan, self._ledger = fleet, loop, plan, ledger
        self.last = time.monotonic()
        """Time at which the last fault was over."""
        self._gone: str | None = None
        """Process that a fault has ended, while it lasts."""

    async def supervise(self) -> None:
        """Starts again what has ended, as a supervisor does, until it is cancelled; what is meant to be gone stays so
        for as long as its fault lasts."""
        while True:
            await asyncio.to_thread(self._fleet.start_what_ended, self._gone)
            await asyncio.sleep(_SUPERVISE_SECONDS)

    async def run(self) -> None:
        """Breaks for as long as the plan says."""
        until = time.monotonic() + self._plan.seconds
        names = sorted(self._fleet.processes)
        for event in self._plan.sequence or events(self._plan.seed, names, sorted(self._fleet.links)):
            if not self._plan.sequence and time.monotonic() + event.after + event.seconds > until:
                break
            await asyncio.sleep(event.after)
            self._ledger.sequence.append(str(event))
            await self._break(event)
            self._ledger.faults[event.label] += 1
        self.last = time.monotonic()

    async def _break(self, event: Event) -> None:
        match event.kind:
            case "link":
                link = self._fleet.links[event.what]
                self._loop.call_soon_threadsafe(link.become, event.fault)
                await asyncio.sleep(event.seconds)
                self._loop.call_soon_threadsafe(link.become, Fault())
            case "disk" | "memory":
                if (pid := self._fleet.pid(event.what)) is not None:
                    with limited(pid, event.kind, event.amount):
                        await asyncio.sleep(event.seconds)
            case "refuses":
                with ExitStack() as refusal:
                    await asyncio.to_thread(refusal.enter_context, self._fleet.refusing(event.code))
                    await asyncio.sleep(event.seconds)
                    await asyncio.to_thread(refusal.close)
            case "clock":
                self._fleet.offsets[event.what].seconds = event.amount
                await asyncio.sleep(event.seconds)
                self._fleet.offsets[event.what].seconds = 0.0
            case "renew":
                await asyncio.to_thread(self._fleet.renew, event.seconds)
            case "roll":
                await asyncio.to_thread(self._fleet.roll, event.what)
            case "kill" | "term" | "twice" | "hang up" | "freeze":
                await self._end(event)

    async def _end(self, event: Event) -> None:
        self._gone = event.what
        self._fleet.kill(event.what, _SIGNALS[event.kind])
        if event.kind == "twice":  # later than both are one request
            await asyncio.sleep(_AGAIN_SECONDS)
            self._fleet.kill(event.what, signal.SIGTERM)
        await asyncio.sleep(event.seconds)
        self._gone = None
        if event.kind == "freeze":
            self._fleet.kill(event.what, signal.SIGCONT)


async def _stopped(task: asyncio.Task[None]) -> None:
    """Cancels a client; whatever it died of is raised."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


class Campaign:
    """One campaign on a fleet that runs."""

    def __init__(self, fleet: Fleet, loop: asyncio.AbstractEventLoop, plan: Plan, ledger: Ledger) -> None:
        self._fleet, self._plan, self._ledger = fleet, plan, ledger
        self._breaker = Breaker(fleet, loop, plan, ledger)

    async def run(self) -> None:
        """Prepares, breaks, waits, and judges."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        async with AsyncExitStack() as exits:
            clients = [
                await exits.enter_async_context(
                    httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, limits=limits, trust_env=False)
                )
                for url in self._fleet.urls
            ]
            jobs = Jobs(clients[0], f"chaos-{self._plan.seed}", epochs=self._plan.epochs)
            ground = await prepared(clients[0], self._fleet.model, self._plan.questions)
            curve = await jobs.curve() if self._plan.jobs else {}
            streams, parts = self._parts(clients, ground)
            for part in (streams, *parts):
                part.pace = self._plan.pace
            measured = self._fleet.measured()
            tasks = [asyncio.create_task(self._breaker.supervise())]
            tasks += [asyncio.create_task(part.run(0)) for part in parts]
            tasks += [asyncio.create_task(streams.run(n)) for n in range(self._plan.streams * len(clients))]
            if self._plan.jobs:
                tasks.append(asyncio.create_task(jobs.run(self._plan.jobs)))
            breaking = asyncio.create_task(self._breaker.run())
            try:
                await asyncio.wait([*tasks, breaking], return_when=asyncio.FIRST_COMPLETED)
                await asyncio.gather(*(task for task in tasks if task.done()))
                await breaking
                for task in tasks[1 : 1 + len(parts)] + tasks[-1:] * bool(self._plan.jobs):
                    await _stopped(task)
                for client in clients:
                    await self._answers_again(streams, client)
                await self._settle(jobs, parts, curve)
                for task in tasks[1:]:
                    await _stopped(task)
                await streams.finish()
                await self._look_at_books(measured)
            finally:
                for task in (*tasks, breaking):
                    await _stopped(task)
                self._close(jobs, [streams, *parts])

    def _parts(self, clients: Sequence[httpx.AsyncClient], ground: Ground) -> tuple[Streams, list[Part]]:
        seed, models = str(self._plan.seed), ground.models
        parts: list[Part] = [
            Conversations(clients, seed, models, ground.questions),
            Swaps(clients, seed, MOVED, ATTACHED),
            Publications(clients, seed, ground.files),
            Responses(clients, seed, models, ground.responses),
            Feedback(clients, seed),
            Batches(clients, seed, models, ground.questions),
            Kinds(clients, seed, ground.versions),
            Steering(clients, seed),
        ]
        wanted = self._plan.parts or {part.name for part in parts}
        if unknown := wanted - {part.name for part in parts}:
            raise ValueError(f"no such part: {', '.join(sorted(unknown))}; there are {[part.name for part in parts]}")
        return Streams(clients, seed, models, ground.questions), [part for part in parts if part.name in wanted]

    async def _answers_again(self, streams: Streams, client: httpx.AsyncClient) -> None:
        seconds = await streams.first_whole(client, self._breaker.last, _CALM_SECONDS)
        if seconds is None:
            self._ledger.breaches.append(f"no whole answer within {_CALM_SECONDS:.0f} s of the last fault")
        else:
            self._ledger.first_answers.append(round(seconds, 1))

    async def _settle(self, jobs: Jobs, parts: Sequence[Part], curve: dict[int, float]) -> None:
        """Everything that was begun ends, and is as it should be."""
        for part in [*parts, None]:
            try:
                async with asyncio.timeout(self._plan.settle):
                    await (part.finish() if part is not None else jobs.settle(self._plan.settle))
            except TimeoutError:
                what = part.name if part is not None else "jobs"
                self._ledger.breaches.append(f"{what} did not end within {self._plan.settle:.0f} s of the last fault")
        self._ledger.settled = round(time.monotonic() - self._breaker.last, 1)
        try:
            async with asyncio.timeout(_AUDIT_SECONDS):
                await jobs.audit(curve)
        except TimeoutError:
            self._ledger.breaches.append(f"jobs could not be looked at within {_AUDIT_SECONDS:.0f} s after the faults")

    async def _look_at_books(self, before: dict[int, tuple[str, int, int]]) -> None:
        """Nothing is held by anybody, a while after everything has ended."""
        try:
            await asyncio.to_thread(self._fleet.wait_for, lambda: not self._fleet.left(), "clean books", _CALM_SECONDS)
        except TimeoutError:
            self._ledger.breaches += self._fleet.left()
        first = {name: handles for name, handles, _ in before.values()}
        for pid, (name, handles, resident) in self._fleet.measured().items():
            if handles > first.get(name, handles) + _MORE_HANDLES:
                self._ledger.breaches.append(f"{name} has {handles} open files, {first[name]} before")
            if pid in before:
                grown = resident - before[pid][2]
                self._ledger.grown[name] = round(grown / 2**20, 1)
                if grown > _MORE_BYTES:
                    self._ledger.breaches.append(f"{name} has grown by {grown >> 20} MiB")

    def _close(self, jobs: Jobs, parts: Sequence[Part]) -> None:
        ends = Counter(jobs.ended.get(name, {"state": "unfinished"})["state"] for name in jobs.accepted)
        self._ledger.parts = {part.name: part.counts for part in parts} | {"compared jobs": ends}
        for part in parts:
            self._ledger.breaches += part.breaches
            for recorder in part.recorders:
                self._ledger.wrong |= {f"{recorder.kind} {key}": found for key, found in recorder.wrong.items()}
        self._ledger.breaches += jobs.breaches


def campaign(stores: Stores, directory: Path, plan: Plan) -> Ledger:
    """Runs a fleet of its own on stores, breaks both, and judges what its clients saw."""
    ledger = Ledger()
    with ExitStack() as exits:
        loop = exits.enter_context(running_loop())
        began = time.monotonic()
        fleet = Fleet(stores, directory, plan.sizes, loop)
        exits.callback(fleet.stop_links)
        exits.enter_context(fleet)
        fleet.start_gateways()
        for url in fleet.urls:
            fleet.wait_for(partial(_ready, url), f"{url} to be ready", 60.0)
        ledger.start = round(time.monotonic() - began, 1)
        asyncio.run(Campaign(fleet, loop, plan, ledger).run())
    return ledger


def _ready(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz", timeout=ANSWER_SECONDS, trust_env=False).status_code == 200
    return False
