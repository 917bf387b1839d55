"""Kills processes of a Temper that learns: `python -m benchmarks.gateway.loop_kills --kills 100 --out FILE`.

A `temper up` with the tiny model and a second gateway; users who ask and say what they think of the answers; a learner
with short cycles, from feedback to a canary. One process after the other is killed with -9 at a random moment, half of
the time just after the learner has come into another state. Afterwards: all feedback is there once and was taught once,
every promoted version has its evidence and was promoted once, every cycle went a legal way, and a cycle that begins
after the last kill ends. Exit status 1 if anything of that does not hold. With `--switches` nothing is killed, and the
time is taken until both gateways answer as a promotion or a rollback says.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.gateway.loop_kills.audit import Audit
from benchmarks.gateway.loop_kills.fleet import PROCESSES, Client, Fleet
from benchmarks.gateway.loop_kills.loop import OUTCOMES, Person, Watch, apply, events
from benchmarks.gateway.loop_kills.switching import measured
from benchmarks.gateway.loop_kills.users import Users
from benchmarks.lib.environment import environment
from benchmarks.lib.recorder import put_line
from services.common.shutdown import cancel_and_wait

_STATES = ("collecting", "preparing", "training", "evaluating", "canary", "promoting")
_BETWEEN = (1.5, 9.0)
"""Seconds between two kills, at least and at most."""
_JUST_AFTER = 0.3
_CHANGE_SECONDS = 20.0
_GOES_ON_SECONDS = 240.0
_AUDIT_SECONDS = 300.0
_USERS = 6
_PAUSE, _HURRY = 1.5, 0.2
"""Seconds between two users of one kind, and while a canary needs them."""
_LISTED = 40


class Killer:
    """Kills a process after the other."""

    def __init__(self, fleet: Fleet, watch: Watch, seed: int, names: Sequence[str] = PROCESSES) -> None:
        self._fleet, self._watch, self._names = fleet, watch, names
        self._rng = random.Random(seed)
        self.kills: Counter[tuple[str, str]] = Counter()
        """By process and state of the learner."""

    async def run(self, count: int) -> None:
        """Kills so many times, each process about as often."""
        turns: list[str] = []
        while self.kills.total() < count:
            turns = turns or self._rng.sample(self._names, k=len(self._names))
            await asyncio.sleep(self._rng.uniform(*_BETWEEN))
            if self._rng.random() < 0.5:
                await self._watch.next_change(_CHANGE_SECONDS)
                await asyncio.sleep(self._rng.uniform(0, _JUST_AFTER))
            name = turns.pop()
            while (victim := self._fleet.process(name)) is None:  # noqa: ASYNC110 - a process tells nobody that it is there
                await asyncio.sleep(0.05)
            with suppress(psutil.NoSuchProcess):
                state = self._watch.state
                victim.kill()
                self.kills[name, state] += 1
                print(f"{self.kills.total()} of {count}: {name} while {state}", file=sys.stderr, flush=True)


async def campaign(fleet: Fleet, kills: int, seed: int, names: Sequence[str]) -> tuple[Counter[tuple[str, str]], Audit]:
    """Kills, waits for a whole cycle, and judges."""
    settings = fleet.stack.settings
    client, watch = Client(fleet.urls), Watch(settings)
    users, stop = Users(client, fleet.stack.served_model_name, seed), asyncio.Event()
    audit, killer = Audit(client, settings, users), Killer(fleet, watch, seed, names)
    await apply(client)
    beside = [asyncio.create_task(work) for work in (fleet.keep(), watch.run(), Person(client).run())]
    visits = [
        asyncio.create_task(users.run(stop, lambda: _HURRY if watch.state == "canary" else _PAUSE))
        for _ in range(_USERS)
    ]
    killing = asyncio.create_task(killer.run(kills))
    try:
        await asyncio.wait([killing, *beside, *visits], return_when=asyncio.FIRST_COMPLETED)
        for task in (*beside, *visits):
            if task.done():
                await task
        await killing
        audit.facts["seconds_to_a_whole_cycle"] = await _whole_cycle(client, audit)
        stop.set()
        await asyncio.gather(*visits)
        audit.facts["sent_again"] = client.again
        async with asyncio.timeout(_AUDIT_SECONDS):
            await audit.run()
    finally:
        for task in (killing, *visits, *beside):
            await cancel_and_wait(task, again_seconds=1.0)
        await client.aclose()
    return killer.kills, audit


async def _whole_cycle(client: Client, audit: Audit) -> float | None:
    """Seconds until a cycle that begins now has ended, and not by a failure."""
    began, last = time.monotonic(), (await events(client))[-1]["cycle"]
    while time.monotonic() - began < _GOES_ON_SECONDS:
        for event in await events(client):
            if event["cycle"] > last and event["kind"] in OUTCOMES and event["kind"] != "failed":
                return round(time.monotonic() - began, 1)
        await asyncio.sleep(0.5)
    audit.breaches.append(f"no cycle has ended in {_GOES_ON_SECONDS:.0f} s after the last kill")
    return None


def table(kills: Counter[tuple[str, str]]) -> Table:
    """Kills by process and by the learner's state."""
    shown = Table("killed while", *_STATES, "in all", title=f"{kills.total()} kills")
    for name in PROCESSES:
        of = [kills[name, state] for state in _STATES]
        shown.add_row(name, *map(str, of), str(sum(of)))
    shown.add_row(
        "in all", *(str(sum(kills[name, state] for name in PROCESSES)) for state in _STATES), str(kills.total())
    )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", nargs="+", choices=PROCESSES, default=PROCESSES, help="that are killed")
    parser.add_argument("--switches", type=int, default=0, help="measures so many promotions and rollbacks instead")
    parser.add_argument("--keep", type=Path, help="directory to keep data and logs in; default: none are kept")
    parser.add_argument("--out", type=Path, help="file to append the result to")
    options = parser.parse_args()
    console = Console(stderr=True, width=120)
    with tempfile.TemporaryDirectory() as scratch, Fleet(options.keep or Path(scratch), {}) as fleet:
        if options.switches:
            put_line(
                {"benchmark": "loop-switches"} | asyncio.run(measured(fleet, options.switches)) | environment(),
                options.out,
            )
            return
        began = time.monotonic()
        kills, audit = asyncio.run(campaign(fleet, options.kills, options.seed, options.processes))
        facts: dict[str, Any] = {"benchmark": "loop-kills", "kills": kills.total(), "seed": options.seed}
        facts["seconds"] = round(time.monotonic() - began)
        facts["killed"] = {f"{name} {state}": count for (name, state), count in sorted(kills.items())}
        facts |= audit.facts | {"breaches": len(audit.breaches), "first_breaches": audit.breaches[:_LISTED]}
    put_line(facts | environment(), options.out)
    console.print(table(kills))
    for breach in audit.breaches[:_LISTED]:
        console.print(f"breach: {breach}", soft_wrap=True, markup=False)
    sys.exit(1 if audit.breaches else 0)


if __name__ == "__main__":
    main()
