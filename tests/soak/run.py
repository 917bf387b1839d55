"""One soak: traffic on a Temper with short retention, samples, and what they say."""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from tests.soak.flatness import Verdict, judge, of_even_traffic, spark
from tests.soak.samples import BOUNDS, Sampler
from tests.soak.traffic import Traffic
from tests.stack import PATIENCE, Stack

LOG_BYTES_A_REQUEST = 1500.0
"""Most bytes that all logs together grow by for each request."""
WARM_UP = 0.4
"""Share of the time in which caches fill, and retention has not begun to bite."""

AOF_BYTES = 8 * 2**20
"""Size from which Valkey writes its append-only file anew: an eighth of its own 64 MiB, as the hour is of eight."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A soak.

    Args:
        seconds: of traffic.
        every: seconds between two samples.
        pause: mean seconds between two rounds of a client.
    """

    seconds: float
    every: float
    seed: int = 0
    pause: float = 0.2

    @property
    def kept(self) -> int:
        """Seconds for which ended jobs, responses and feedback stay: they begin to go within the warm-up, but not
        before their clients have looked at them."""
        return max(20, int(self.seconds * WARM_UP / 3))


@dataclass(slots=True)
class Outcome:
    """What was seen."""

    seconds: float
    kept_seconds: int
    requests: int = 0
    done: dict[str, int] = field(default_factory=dict)
    log_bytes_a_request: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def breaches(self) -> list[str]:
        found = [f"{one.name} grows by {one.growth:.1f}, over {one.limit:.1f}" for one in self.verdicts if not one.flat]
        if self.log_bytes_a_request > LOG_BYTES_A_REQUEST:
            found.append(f"logs grow by {self.log_bytes_a_request:.0f} bytes a request, over {LOG_BYTES_A_REQUEST:.0f}")
        return [*found, *self.problems]

    def summary(self) -> dict[str, Any]:
        """What is written of it, without the samples."""
        said = asdict(self) | {"problems": self.problems[:40], "breaches": self.breaches[:40]}
        said["verdicts"] = [asdict(one) | {"growth": round(one.growth, 2), "flat": one.flat} for one in self.verdicts]
        return {name: value for name, value in said.items() if name != "series"}

    def rounded(self) -> dict[str, list[list[float]]]:
        """Every sample: seconds, value."""
        return {name: [[round(at, 1), round(value, 2)] for at, value in one] for name, one in self.series.items()}

    def show(self, console: Console) -> None:
        """A table with the course of each series."""
        table = Table("series", "behind warm-up", "last", "peak", "growth", "limit", "course")
        for one in self.verdicts:
            course = spark([value for _, value in self.series[one.name]])
            mark = "" if one.flat else "[red]"
            table.add_row(
                *(f"{mark}{one.name}", f"{one.first:g}", f"{one.last:g}", f"{one.peak:g}"),
                *(f"{one.growth:+.1f}", f"{one.limit:.1f}", course),
            )
        console.print(table)
        console.print(f"{self.requests} requests, {self.done}, {self.log_bytes_a_request:.0f} bytes of logs a request")


def stack_of(directory: Path, plan: Plan) -> Stack:
    """A Temper whose caches are small and whose retention bites within the time of the plan."""
    kept = str(plan.kept)
    env = {
        "TEMPER_DTYPE": "float32",
        "TEMPER_KV_CACHE_BYTES": "32MiB",
        "TEMPER_TIER_HOST_BYTES": "16MiB",
        "TEMPER_MAX_MODEL_LEN": "1024",
        "TEMPER_RESPONSES_TTL_SECONDS": kept,
        "TEMPER_FEEDBACK_TTL_SECONDS": kept,
        "TEMPER_JOBS_TTL_SECONDS": kept,
        "TEMPER_ADAPTER_VERSIONS_KEPT": "2",
    }
    return Stack(directory, env=env)


def soak(stack: Stack, plan: Plan) -> Outcome:
    """Runs traffic on a running stack. Blocking."""
    return asyncio.run(_soak(stack, plan))


async def _soak(stack: Stack, plan: Plan) -> Outcome:
    outcome = Outcome(plan.seconds, plan.kept)
    sampler = Sampler(stack)
    try:
        sampler.redis.config_set("auto-aof-rewrite-min-size", AOF_BYTES)
        async with httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE, trust_env=False) as client:
            traffic = Traffic(client, random.Random(plan.seed), stack.served_model_name, plan.pause)
            logged = sampler.log_bytes()
            running = asyncio.create_task(traffic.run())
            loop = asyncio.get_running_loop()
            end = loop.time() + plan.seconds
            while loop.time() < end and not running.done():
                await asyncio.to_thread(sampler.take, traffic.requests)
                await asyncio.sleep(plan.every)
            traffic.over.set()
            await asyncio.wait_for(running, 4 * PATIENCE)
            await asyncio.to_thread(sampler.take, traffic.requests)
        outcome.log_bytes_a_request = (sampler.log_bytes() - logged) / max(1, traffic.requests)
    finally:
        sampler.close()
    outcome.requests, outcome.done, outcome.problems = traffic.requests, dict(traffic.done), traffic.problems
    outcome.series = dict(sampler.series)
    for name, points in sorted(sampler.series.items()):
        kind = name.split()[0]
        judged = of_even_traffic(points, sampler.requests, plan.kept) if kind == "keys" else points
        outcome.verdicts.append(judge(name, judged, BOUNDS[kind], warm_up=WARM_UP))
    return outcome
