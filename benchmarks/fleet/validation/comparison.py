"""Validation: four real engines on this machine and a simulation of them play the same traces, and are compared.

The engines compute the tiny model on CPUs, each in a process of its own, behind the gateway's code as simulated ones
are. A first trace is played for the cost model: it is fitted to the steps that the engines took in it. Clients ask as
soon as they are answered, so that throughput says how fast the engines are.

Four engines that compute all the time on two cores would wait for each other, and for whatever else the machine does,
which no cost of a step tells. So each step is stretched to what it would take on a slower device: what is compared are
scheduler, caches, routing, transport and the loop between steps. With ``stretched=False`` steps are as fast as they
are, for a machine with a quiet core for each engine and two more.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean
from subprocess import Popen
from typing import Any

from benchmarks.fleet.cost import CostModel, MeasuredStep
from benchmarks.fleet.figures import percentile
from benchmarks.fleet.player import Answered, Player
from benchmarks.fleet.simulation import Fleet, only_errors, played
from benchmarks.fleet.subject import Subject
from benchmarks.fleet.traces import Session, Shape, draw
from benchmarks.fleet.virtual import clock
from benchmarks.gateway.http.rates import child, first_line
from services.engine.scheduler.config import SchedulerConfig
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.engines.pool import EnginePool
from services.gateway.settings import GatewaySettings

ENGINES = 4
TOLERANCE = 0.10
_CLIENTS = 8
_DEVICE_MS = ("120", "4", "8")
"""Milliseconds of a step, and more for each decode and each prompt token in it: some eight times what a core takes."""
_SHAPE = Shape(8, 256, 3.0, 40.0, 48.0, 0.0, most_output=96)
_SECONDS = 600.0
_START_SECONDS = 60.0


class _Closed(Player):
    """Clients that ask one session after the other, whenever those would begin."""

    async def play(self, sessions: Sequence[Session], seconds: float) -> None:
        await self.play_closed(sessions, _CLIENTS)


Outcome = tuple[Sequence[Answered], float]


def validate(seed: int, sessions: int = 48, *, traces: int = 1, stretched: bool = True) -> dict[str, Any]:
    """Plays traces of so many sessions against both, one after the other. The requests of all are compared: a slow
    first token is ten times the median, so that the mean of few is a matter of chance.

    Raises:
        RuntimeError: an answer of one of them is not whole.
    """
    only_errors()
    device = _DEVICE_MS if stretched else ("0", "0", "0")
    with ExitStack() as stack:
        engines = [stack.enter_context(child("benchmarks.fleet.validation.engine", *device)) for _ in range(ENGINES)]
        told = [json.loads(first_line(engine)) for engine in engines]
        ports = [json.loads(first_line(engine))["port"] for engine in engines]
        subject = _subject(told[0])
        first, *drawn = (_trace(subject, told[0]["vocab_size"], seed + at, sessions) for at in range(traces, -1, -1))
        asyncio.run(_real(ports, first))
        cost = CostModel.fit(_measured(_steps(engines)), 0.0, 0.0)
        real = _all([asyncio.run(_real(ports, trace)) for trace in drawn])
        error = cost.error(_measured(_steps(engines)))
    modelled = replace(subject, cost=cost)
    simulated = _all([clock.run(_simulated(modelled, trace), seed) for trace in drawn])
    rows = compared(real, simulated)
    return {
        "scenario": "validation",
        "stretched": stretched,
        "traces": traces,
        "requests": len(real[0]),
        "cost_error_of_real_steps": round(error, 3),
        "quantities": rows,
        "worst": max(abs(row["error"]) for row in rows.values()),
    }


def compared(real: Outcome, simulated: Outcome) -> dict[str, dict[str, float]]:
    """Each quantity of two outcomes, and the error of the second's relative to the first's.

    Raises:
        RuntimeError: an answer of one of them is not whole.
    """
    for answers, _ in (real, simulated):
        if broken := [one for one in answers if not one.whole]:
            raise RuntimeError(f"{len(broken)} of {len(answers)} answers are not whole, the first: {broken[0]}")
    rows = {}
    for name, quantity in _QUANTITIES.items():
        ours, theirs = quantity(*simulated), quantity(*real)
        rows[name] = {"real": round(theirs, 4), "simulated": round(ours, 4), "error": round(ours / theirs - 1.0, 3)}
    return rows


def _all(outcomes: Sequence[Outcome]) -> Outcome:
    """Outcomes of traces that were played one after the other."""
    return [one for answers, _ in outcomes for one in answers], sum(seconds for _, seconds in outcomes)


def _first_tokens(answers: Sequence[Answered]) -> list[float]:
    return [one.first - one.asked for one in answers if one.first is not None]


def _between(answers: Sequence[Answered]) -> list[float]:
    """Mean seconds between the tokens of each answer that has two."""
    return [
        (one.end - one.first) / (one.tokens - 1)
        for one in answers
        if one.first is not None and one.end is not None and one.tokens > 1
    ]


_QUANTITIES: Mapping[str, Callable[[Sequence[Answered], float], float]] = {
    "hit_rate": lambda answers, _: sum(one.cached for one in answers) / sum(one.prompt_tokens for one in answers),
    "output_tokens_per_s": lambda answers, seconds: sum(one.tokens for one in answers) / seconds,
    "first_token_mean_s": lambda answers, _: fmean(_first_tokens(answers)),
    "first_token_p50_s": lambda answers, _: percentile(_first_tokens(answers), 0.5),
    "first_token_p90_s": lambda answers, _: percentile(_first_tokens(answers), 0.9),
    "between_tokens_p50_s": lambda answers, _: percentile(_between(answers), 0.5),
    "between_tokens_p90_s": lambda answers, _: percentile(_between(answers), 0.9),
}


def _subject(told: dict[str, Any]) -> Subject:
    config = SchedulerConfig(**told["config"] | {"eos_token_ids": frozenset(told["config"]["eos_token_ids"])})
    nothing = CostModel((0.01,) * 9, (0.0,) * 4, 0.0, 0.0)
    return Subject("tiny", config, nothing, 0.0, 1, 1, 0.0, 0.0, depth=told["depth"])


def _trace(subject: Subject, vocabulary: int, seed: int, count: int) -> list[Session]:
    return draw(_SHAPE, subject, 1, _SECONDS, 10.0, seed, vocabulary)[:count]


async def _real(ports: Sequence[int], sessions: Sequence[Session]) -> Outcome:
    pool = EnginePool(GatewaySettings(engines=",".join(f"127.0.0.1:{port}" for port in ports)), GatewayMetrics())
    pool.start()
    loop = asyncio.get_running_loop()
    end = loop.time() + _START_SECONDS
    while not all(client.ready for client in pool.clients):
        if loop.time() > end:
            raise TimeoutError(f"the engines were not ready within {_START_SECONDS:g} s")
        await asyncio.sleep(0.02)
    began = loop.time()
    player = _Closed([pool])
    await player.play(sessions, _SECONDS)
    seconds = loop.time() - began
    await pool.stop()
    return player.answers, seconds


async def _simulated(subject: Subject, sessions: Sequence[Session]) -> Outcome:
    fleet = Fleet(subject, ENGINES, 1)
    outcome = await played(fleet, sessions, _SECONDS, player=_Closed(fleet.pools))
    return outcome.answers, outcome.seconds


def _steps(engines: Sequence[Popen[str]]) -> list[tuple[int, int, float]]:
    """Steps of all engines since they were last asked: decodes, prompt tokens, seconds."""
    found: list[tuple[int, int, float]] = []
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write("steps\n")
        engine.stdin.flush()
        found += [tuple(step) for step in json.loads(first_line(engine))]
    return found


def _measured(steps: Sequence[tuple[int, int, float]]) -> list[MeasuredStep]:
    kinds: dict[tuple[int, int], list[float]] = defaultdict(list)
    for decodes, prefill, seconds in steps:
        kinds[decodes, prefill].append(seconds)
    return [MeasuredStep(*kind, 0.0, 0.0, fmean(times), len(times)) for kind, times in kinds.items()]
