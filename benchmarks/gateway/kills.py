"""Kills the processes of a `temper up`: `python -m benchmarks.gateway.kills --seconds 600 --every 2,10 --out
kills.json`.

Starts one of its own with the tiny model on the CPU. One process after the other, drawn from all of them, is killed at
a random moment, asked to stop, or frozen and then killed, while clients stream answers and submit training jobs
(benchmarks.gateway.kill_clients). Afterwards `temper up` must still be there, answer within a minute of the last kill,
and have ended every job that it accepted once. Exit status 1 if anything of that failed, or any answer was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import enum
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.gateway.kill_clients import ANSWER_SECONDS, Jobs, Streams, known_questions
from benchmarks.lib.environment import environment
from benchmarks.lib.recorder import put_line
from tests.stack import TINY, Stack

_AUDIT_SECONDS = 120.0
_LISTED = 40
"""Breaches that are kept of a run in which everything breaks."""


class Way(enum.StrEnum):
    """Way of killing a process."""

    KILL = "kill"
    TERM = "term"
    """The process is asked to stop."""
    FREEZE = "freeze"
    """The process is there and does not answer, and is killed after a while."""


_WEIGHTS: Mapping[Way, float] = {Way.KILL: 0.7, Way.TERM: 0.15, Way.FREEZE: 0.15}


@dataclass(frozen=True, slots=True)
class Plan:
    """A campaign.

    Args:
        seconds: how long processes are killed.
        every: shortest and longest time between two kills.
        streams: clients that ask, all the time.
        jobs: training jobs that are unfinished at a time.
        recovery: seconds from the last kill to an answer, at most.
        settle: seconds from the last kill to the end of the last job, at most.
    """

    seconds: float
    every: tuple[float, float]
    seed: int = 0
    streams: int = 8
    jobs: int = 3
    recovery: float = 60.0
    settle: float = 300.0

    def __post_init__(self) -> None:
        if not 0 < self.every[0] <= self.every[1]:
            raise ValueError(f"--every must be two numbers of seconds, the shorter one first, got {self.every}")


@dataclass(slots=True)
class Outcome:
    """Result of a campaign."""

    kills: Counter[str] = field(default_factory=Counter)
    """Number of kills by process and way."""
    answers: Counter[str] = field(default_factory=Counter)
    unanswered: Counter[str] = field(default_factory=Counter)
    """Number of requests without an answer, by the reason."""
    jobs: Counter[str] = field(default_factory=Counter)
    """Accepted jobs by how they ended."""
    attempts: int = 0
    refusals: int = 0
    """Requests about jobs that had to be sent again."""
    restarts: Counter[str] = field(default_factory=Counter)
    first_answer: float | None = None
    """Seconds from the last kill to the first whole answer that was asked for behind it."""
    settled: float = 0.0
    """Seconds from the last kill to the end of the last job."""
    breaches: list[str] = field(default_factory=list)

    def processes(self) -> set[str]:
        """Processes that were killed at least once."""
        return {which.split()[0] for which in self.kills}


class Killer:
    """Ends a stack's processes: each once, in any order, then whichever the dice say."""

    def __init__(self, stack: Stack, plan: Plan, outcome: Outcome) -> None:
        self._stack = stack
        self._plan = plan
        self._outcome = outcome
        self._rng = random.Random(plan.seed)
        names = sorted(stack.state["pids"])
        self._turns = self._rng.sample(names, k=len(names))
        self._names = names
        self.last = time.monotonic()
        """Time at which the last kill was over."""

    async def run(self, progress: Progress | None = None) -> None:
        """Kills for as long as the plan says and each has had its turn, or until the supervisor is gone."""
        began = time.monotonic()
        task = progress.add_task("kills", total=self._plan.seconds) if progress is not None else None
        while self._alive():
            pause = self._rng.uniform(*self._plan.every)
            if not self._turns and time.monotonic() + pause > began + self._plan.seconds:
                return
            await asyncio.sleep(pause)
            await self._kill(self._turns.pop() if self._turns else self._rng.choice(self._names))
            if progress is not None and task is not None:
                done = f"kills: {self._outcome.kills.total()}"
                progress.update(task, completed=time.monotonic() - began, description=done)

    def _alive(self) -> bool:
        process = self._stack.process
        return process is not None and process.poll() is None

    async def _kill(self, name: str) -> None:
        (way,) = self._rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))
        frozen = self._rng.uniform(0.5, max(self._plan.every[0], 0.5))
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            victim = await self._victim(name)
            if victim is None:
                return
            if way is Way.TERM:
                victim.terminate()
            elif way is Way.KILL:
                victim.kill()
            else:
                victim.suspend()
                await asyncio.sleep(frozen)
                victim.kill()
            self.last = time.monotonic()
            self._outcome.kills[f"{name} {way}"] += 1

    async def _victim(self, name: str) -> psutil.Process | None:
        """The process of this name, once it is there; None if the supervisor is gone."""
        while self._alive():
            with suppress(KeyError, FileNotFoundError, psutil.NoSuchProcess):
                process = psutil.Process(self._stack.pid(name))
                # A process that the supervisor has not missed yet is none; its number may be somebody else's by now.
                if process.status() != psutil.STATUS_ZOMBIE and process.ppid() == self._stack.state["pid"]:
                    return process
            await asyncio.sleep(0.05)
        return None


async def _campaign(stack: Stack, plan: Plan, outcome: Outcome, progress: Progress | None) -> None:
    alone = httpx.Limits(max_connections=None, max_keepalive_connections=plan.streams)
    async with httpx.AsyncClient(base_url=stack.url, timeout=ANSWER_SECONDS, limits=alone, trust_env=False) as client:
        model = stack.served_model_name
        jobs = Jobs(client, f"kills-{plan.seed}")
        questions, curve = await asyncio.gather(known_questions(client, model), jobs.curve())
        streams = Streams(client, model, questions)
        killer = Killer(stack, plan, outcome)
        asking = [
            asyncio.create_task(streams.run(random.Random(f"{plan.seed} {number}"))) for number in range(plan.streams)
        ]
        training = asyncio.create_task(jobs.run(plan.jobs))
        working = [*asking, training]
        killing = asyncio.create_task(killer.run(progress))
        try:
            # A client that has a bug of its own ends the campaign.
            await asyncio.wait([*working, killing], return_when=asyncio.FIRST_COMPLETED)
            if not killing.done():
                await asyncio.gather(*(task for task in working if task.done()))
            await killing
            await _stopped(training)
            seconds = await streams.first_whole(killer.last, plan.recovery)
            if seconds is None:
                outcome.breaches.append(f"no whole answer within {plan.recovery:.0f} s of the last kill")
            else:
                outcome.first_answer = round(seconds, 1)
            await jobs.settle(plan.settle)
            outcome.settled = round(time.monotonic() - killer.last, 1)
            for task in asking:
                await _stopped(task)
            async with asyncio.timeout(_AUDIT_SECONDS):
                await jobs.audit(curve)
        except TimeoutError:
            outcome.breaches.append(f"jobs could not be looked at within {_AUDIT_SECONDS:.0f} s after the kills")
        finally:
            for task in (*working, killing):
                await _stopped(task)
            outcome.answers.update({str(end): count for end, count in streams.ends.items()})
            outcome.unanswered.update(streams.whys)
            outcome.jobs.update(jobs.ended.get(adapter, {"state": "unfinished"})["state"] for adapter in jobs.accepted)
            outcome.attempts = sum(int(job.get("attempts", 0)) for job in jobs.ended.values())
            outcome.refusals = jobs.refusals
            outcome.breaches += streams.breaches + jobs.breaches


async def _stopped(task: asyncio.Task[None]) -> None:
    """Cancels a client; whatever it died of is raised."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def campaign(stack: Stack, plan: Plan, progress: Progress | None = None) -> Outcome:
    """Kills processes of a running stack and judges what its clients saw. The stack still runs afterwards, if it can.

    Its restarts are counted from the beginning of its log.
    """
    outcome = Outcome()
    supervisor = stack.process
    asyncio.run(_campaign(stack, plan, outcome, progress))
    if supervisor is None or supervisor.poll() is not None:
        outcome.breaches.append(f"`temper up` has ended: {stack.stderr_file.read_text(errors='replace')[-1000:]}")
    told = (line.split() for line in stack.stderr_file.read_text(errors="replace").splitlines())
    outcome.restarts.update(words[0] for words in told if words[1:2] == ["restarting"])
    return outcome


def summary(outcome: Outcome) -> dict[str, Any]:
    """The result as it is printed."""
    return {
        "kills": outcome.kills.total(),
        "killed": dict(sorted(outcome.kills.items())),
        "restarts": dict(sorted(outcome.restarts.items())),
        "answers": dict(sorted(outcome.answers.items())),
        "unanswered": dict(outcome.unanswered.most_common(12)),
        "jobs": dict(sorted(outcome.jobs.items())),
        "attempts": outcome.attempts,
        "refusals": outcome.refusals,
        "first_answer_s": outcome.first_answer,
        "settled_s": outcome.settled,
        "breaches": len(outcome.breaches),
        "first_breaches": outcome.breaches[:_LISTED],
    }


def table(outcome: Outcome) -> Table:
    """Kills by process and way."""
    names = sorted(outcome.processes())
    shown = Table("", *names, title=f"{outcome.kills.total()} kills")
    for way in Way:
        shown.add_row(way.value, *(str(outcome.kills[f"{name} {way}"]) for name in names))
    shown.add_row("restarts", *(str(outcome.restarts[name]) for name in names), end_section=True)
    for title, counts in (("answers", outcome.answers), ("jobs", outcome.jobs)):
        shown.caption = (
            f"{shown.caption or ''}{title}: " + ", ".join(f"{n} {what}" for what, n in counts.items()) + "\n"
        )
    return shown


def _every(text: str) -> tuple[float, float]:
    shortest, _, longest = text.partition(",")
    return float(shortest), float(longest or shortest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=_every, default=(2.0, 10.0), help="seconds between two kills: at least,at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=3, help="training jobs that are unfinished at a time")
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--keep", type=Path, help="directory to keep data and logs in; default: none are kept")
    parser.add_argument("--out", type=Path, help="file to append the result to")
    options = parser.parse_args()
    plan = Plan(options.seconds, options.every, options.seed, options.streams, options.jobs)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as scratch, Progress(console=console, disable=not sys.stderr.isatty()) as bar:
        stack = Stack((options.keep or Path(scratch)) / "data", model=options.model)
        with stack:
            outcome = campaign(stack, plan, bar)
            if outcome.breaches and options.keep is None:
                console.print(stack.describe(), markup=False, soft_wrap=True)
            status = stack.stop(signal.SIGTERM)
    if status != os.EX_OK:
        outcome.breaches.append(f"`temper up` ended with status {status}")
    console.print(table(outcome))
    facts = {"benchmark": "kills", "seconds": plan.seconds, "every": plan.every, "seed": plan.seed}
    facts |= {"streams": plan.streams, "unfinished_jobs": plan.jobs}
    put_line(facts | summary(outcome) | environment(), options.out)
    for breach in outcome.breaches[:_LISTED]:
        console.print(f"[red]breach:[/] {breach}", soft_wrap=True)
    sys.exit(1 if outcome.breaches else 0)


if __name__ == "__main__":
    main()
