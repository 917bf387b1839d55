"""Campaign: faults, traffic and jobs at once, and what they must have left intact."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import httpx

from benchmarks.gateway.kill_clients import ANSWER_SECONDS, Jobs, Streams, known_questions
from tests.chaos.faults import Event, events
from tests.chaos.fleet import Fleet, Sizes
from tests.chaos.link import Fault
from tests.stack import Stack

_CALM_SECONDS = 30.0
"""Longest time from the last fault to the first whole answer by each gateway."""
_AUDIT_SECONDS = 120.0
_MORE_HANDLES = 64
"""Open files that a process may have more than before the faults: connections of its pools."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a campaign does.

    Args:
        seconds: how long faults are made.
        streams: clients that ask, of each gateway.
        jobs: training jobs that are unfinished at a time.
        settle: seconds from the last fault to the end of the last job, at most.
    """

    seconds: float
    seed: int = 0
    streams: int = 3
    jobs: int = 2
    epochs: int = 24
    settle: float = 300.0
    sizes: Sizes = field(default_factory=Sizes)


@dataclass(slots=True)
class Ledger:
    """What happened."""

    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    """Questions by how they ended."""
    whys: Counter[str] = field(default_factory=Counter)
    jobs: Counter[str] = field(default_factory=Counter)
    refusals: int = 0
    first_answers: list[float] = field(default_factory=list)
    """Seconds from the last fault to a whole answer, by gateway."""
    settled: float = 0.0
    sequence: list[str] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """As it is printed and kept."""
        return {
            "faults": self.faults.total(),
            "by_kind": dict(sorted(self.faults.items())),
            "answers": dict(sorted(self.ends.items())),
            "unanswered": dict(self.whys.most_common(12)),
            "jobs": dict(sorted(self.jobs.items())),
            "refusals": self.refusals,
            "first_answers_s": self.first_answers,
            "settled_s": self.settled,
            "breaches": self.breaches[:40],
        }


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

    async def run(self) -> None:
        """Breaks for as long as the plan says. What ended is started again behind each fault."""
        until = time.monotonic() + self._plan.seconds
        names = sorted(self._fleet.processes)
        for event in events(self._plan.seed, names, sorted(self._fleet.links)):
            if time.monotonic() + event.after + event.seconds > until:
                break
            await asyncio.sleep(event.after)
            self._ledger.sequence.append(f"{event.kind} {event.what} {event.fault.weather} {event.seconds:.1f}")
            await self._break(event)
            self._ledger.faults[event.label] += 1
            self._fleet.start_what_ended()
        self.last = time.monotonic()

    async def _break(self, event: Event) -> None:
        if event.kind == "link":
            link = self._fleet.links[event.what]
            self._loop.call_soon_threadsafe(link.become, event.fault)
            await asyncio.sleep(event.seconds)
            self._loop.call_soon_threadsafe(link.become, Fault())
            return
        first = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "freeze": signal.SIGSTOP}[event.kind]
        self._fleet.kill(event.what, first)
        await asyncio.sleep(event.seconds)
        if event.kind == "freeze":
            self._fleet.kill(event.what, signal.SIGCONT)


async def _stopped(task: asyncio.Task[None]) -> None:
    """Cancels a client; whatever it died of is raised."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _run(fleet: Fleet, loop: asyncio.AbstractEventLoop, plan: Plan, ledger: Ledger) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.streams)
    async with ExitStackOfClients(fleet.urls, limits) as clients:
        jobs = Jobs(clients[0], f"chaos-{plan.seed}", epochs=plan.epochs)
        questions, curve = await asyncio.gather(known_questions(clients[0], fleet.model), jobs.curve())
        handles = fleet.handles()
        streams = [Streams(client, fleet.model, questions) for client in clients]
        asking = [
            asyncio.create_task(one.run(random.Random(f"{plan.seed} {number}")))
            for number, one in enumerate(itertools.chain.from_iterable([one] * plan.streams for one in streams))
        ]
        training = asyncio.create_task(jobs.run(plan.jobs))
        breaker = Breaker(fleet, loop, plan, ledger)
        breaking = asyncio.create_task(breaker.run())
        try:
            await asyncio.wait([*asking, training, breaking], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.gather(*(task for task in (*asking, training) if task.done()))
            await breaking
            await _stopped(training)
            for one in streams:
                seconds = await one.first_whole(breaker.last, _CALM_SECONDS)
                if seconds is None:
                    ledger.breaches.append(f"no whole answer within {_CALM_SECONDS:.0f} s of the last fault")
                else:
                    ledger.first_answers.append(round(seconds, 1))
            await jobs.settle(plan.settle)
            ledger.settled = round(time.monotonic() - breaker.last, 1)
            for task in asking:
                await _stopped(task)
            async with asyncio.timeout(_AUDIT_SECONDS):
                await jobs.audit(curve)
            await _look_at_books(fleet, handles, ledger)
        except TimeoutError:
            ledger.breaches.append(f"jobs could not be looked at within {_AUDIT_SECONDS:.0f} s after the faults")
        finally:
            for task in (*asking, training, breaking):
                await _stopped(task)
            for one in streams:
                ledger.ends.update({str(end): count for end, count in one.ends.items()})
                ledger.whys.update(one.whys)
                ledger.breaches += one.breaches
                ledger.breaches += [f"a 500: {why}" for why in one.whys if ": 500 " in why]
            ledger.jobs.update(jobs.ended.get(name, {"state": "unfinished"})["state"] for name in jobs.accepted)
            ledger.refusals = jobs.refusals
            ledger.breaches += jobs.breaches


async def _look_at_books(fleet: Fleet, handles: dict[str, int], ledger: Ledger) -> None:
    """Nothing is held by anybody, a while after everything has ended."""
    try:
        await asyncio.to_thread(fleet.wait_for, lambda: not fleet.left(), "clean books", _CALM_SECONDS)
    except TimeoutError:
        ledger.breaches += fleet.left()
    for name, count in fleet.handles().items():
        if count > handles.get(name, count) + _MORE_HANDLES:
            ledger.breaches.append(f"{name} has {count} open files, {handles[name]} before")


class ExitStackOfClients:
    """A client of each gateway."""

    def __init__(self, urls: list[str], limits: httpx.Limits) -> None:
        self._clients = [
            httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, limits=limits, trust_env=False) for url in urls
        ]

    async def __aenter__(self) -> list[httpx.AsyncClient]:
        return self._clients

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.aclose()


def campaign(stack: Stack, directory: Path, plan: Plan) -> Ledger:
    """Runs a fleet of its own on the stores of a running Temper, breaks it, and judges what its clients saw."""
    ledger = Ledger()
    with ExitStack() as exits:
        loop = exits.enter_context(running_loop())
        fleet = Fleet(stack, directory, plan.sizes, loop)
        exits.callback(fleet.stop_links)
        exits.enter_context(fleet)
        fleet.start_gateways()
        for url in fleet.urls:
            fleet.wait_for(lambda url=url: _ready(url), f"{url} to be ready", 60.0)
        asyncio.run(_run(fleet, loop, plan, ledger))
    return ledger


def _ready(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz", timeout=ANSWER_SECONDS, trust_env=False).status_code == 200
    return False
