"""A simulated fleet: engines and gateways against which a trace is played while things happen to it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from benchmarks.fleet.player import Answered, Event, Player, happen
from benchmarks.fleet.subject import Subject
from benchmarks.fleet.traces import Session
from benchmarks.fleet.virtual import clock
from benchmarks.fleet.virtual.adapters import AdapterStore
from benchmarks.fleet.virtual.engine import SimulatedEngine
from benchmarks.fleet.virtual.transport import SimulatedNetwork
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.engines.pool import EnginePool
from services.gateway.settings import GatewaySettings

_NAME, _PORT = "fleet", 50051
GATEWAY_SECONDS = 0.0007
"""Of a gateway's core before a request is sent to an engine. Measured are 1.4 to 1.9 ms for the beginning and the end
of a stream (benchmarks/README.md, the gateway under load); that the beginning is half of the less is assumed."""
_PATIENCE = 60.0


@dataclass(slots=True)
class Outcome:
    """What came of a trace."""

    answers: list[Answered]
    engines: list[SimulatedEngine]
    """All that ever ran."""
    seconds: float
    """Virtual, from the trace's begin to the end of its last answer."""
    cpu_seconds: float
    """What simulating it took."""
    began: float
    """Loop time of the trace's begin."""
    routed: dict[str, int] = field(default_factory=dict)
    """Requests by what decided where they went."""
    retries: dict[str, int] = field(default_factory=dict)


class Fleet:
    """Engines and gateways of a simulation. To be made inside the running loop.

    Args:
        gateways: number of them.
        names: adapters; none: the engines serve the base only.
        skipped: see SimulatedEngine.
        pool: makes the gateways.
    """

    def __init__(
        self,
        subject: Subject,
        engines: int,
        gateways: int,
        *,
        names: Collection[str] = (),
        skipped: Mapping[str, int] | None = None,
        step_seconds: float | None = None,
        pool: type[EnginePool] = EnginePool,
    ) -> None:
        self._subject = subject
        self._skipped = skipped
        self._step_seconds = step_seconds
        self.store = AdapterStore(subject, names) if names else None
        self.engines: dict[str, SimulatedEngine] = {}
        self.all: list[SimulatedEngine] = []
        self.announced: set[str] = set()
        """Addresses that the name of the engines stands for."""
        for _ in range(engines):
            self.announced.add(self._start())
        network = SimulatedNetwork(self.engines, subject.config.max_model_len)
        settings = GatewaySettings(engines=f"dns:///{_NAME}:{_PORT}")
        self.metrics = [GatewayMetrics() for _ in range(gateways)]
        self.pools = [pool(settings, metrics, self._resolve, channels=network) for metrics in self.metrics]

    def _start(self) -> str:
        number = len(self.all)
        address = f"10.0.{number >> 8}.{number & 255}:{_PORT}"
        engine = SimulatedEngine(address, self._subject, self.store, self._skipped, self._step_seconds)
        self.engines[address] = engine
        self.all.append(engine)
        return address

    async def _resolve(self, host: str, port: int) -> Collection[str]:
        return frozenset(self.announced)

    async def connect(self) -> None:
        """Starts the gateways; returns when each is connected to every engine."""
        for pool in self.pools:
            pool.start()
        end = asyncio.get_running_loop().time() + _PATIENCE
        while not all(len([c for c in pool.clients if c.ready]) == len(self.announced) for pool in self.pools):
            if asyncio.get_running_loop().time() > end:
                raise TimeoutError(f"the gateways did not reach all engines within {_PATIENCE:g} s")
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Stops the gateways."""
        for pool in self.pools:
            await pool.stop()

    def kill(self, share: float, unannounced_after: float = 5.0) -> list[SimulatedEngine]:
        """Kills a share of the engines that run, spread over all of them.

        Args:
            unannounced_after: seconds until the engines' name does not stand for them any more.
        """
        alive = sorted(address for address, engine in self.engines.items() if engine.alive)
        count = max(1, round(share * len(alive)))
        killed = [alive[at * len(alive) // count] for at in range(count)]
        for address in killed:
            self.engines[address].kill()
        asyncio.get_running_loop().call_later(unannounced_after, self.announced.difference_update, killed)
        return [self.engines[address] for address in killed]

    def add(self, count: int) -> list[SimulatedEngine]:
        """Starts engines cold: they can be reached when a process of theirs would be."""
        loop = asyncio.get_running_loop()
        added = []

        def ready() -> None:
            self.announced.add(self._start())
            added.append(self.all[-1])

        for _ in range(count):
            loop.call_later(self._subject.start_seconds, ready)
        return added


@dataclass(frozen=True, slots=True)
class Setting:
    """A fleet to be simulated."""

    subject: Subject
    engines: int
    gateways: int
    seconds: float
    """For which the trace is played."""
    seed: int = 0
    names: Collection[str] = ()


Plan = Callable[[Fleet], Sequence[Event]]


def simulate(setting: Setting, sessions: Sequence[Session], plan: Plan | None = None) -> Outcome:
    """Plays a trace against a fleet.

    Args:
        plan: what happens to the fleet meanwhile.
    """
    only_errors()

    async def main() -> Outcome:
        fleet = Fleet(setting.subject, setting.engines, setting.gateways, names=setting.names)
        return await played(fleet, sessions, setting.seconds, plan, Player(fleet.pools, GATEWAY_SECONDS))

    return clock.run(main(), setting.seed)


async def played(
    fleet: Fleet,
    sessions: Sequence[Session],
    seconds: float,
    plan: Plan | None = None,
    player: Player | None = None,
) -> Outcome:
    began_cpu = time.process_time()
    await fleet.connect()
    loop = asyncio.get_running_loop()
    began = loop.time()
    player = player or Player(fleet.pools)
    async with asyncio.TaskGroup() as tasks:
        if plan is not None:
            tasks.create_task(happen(plan(fleet)))
        tasks.create_task(player.play(sessions, seconds))
    for one in player.answers:
        one.shift(began)
    lasted = loop.time() - began
    await fleet.close()
    return Outcome(
        player.answers,
        fleet.all,
        lasted,
        time.process_time() - began_cpu,
        began,
        _counts(fleet, "temper_gateway_routed_total", "by"),
        _counts(fleet, "temper_gateway_retries_total", "reason"),
    )


def _counts(fleet: Fleet, name: str, label: str) -> dict[str, int]:
    """A counter of all gateways together, by its label."""
    found: dict[str, int] = {}
    for metrics in fleet.metrics:
        for family in metrics.registry.collect():
            for sample in family.samples:
                if sample.name == name:
                    value = sample.labels[label]
                    found[value] = found.get(value, 0) + int(sample.value)
    return found


def only_errors() -> None:
    """Engines that come and go by hundreds are not worth a line of the log each."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
