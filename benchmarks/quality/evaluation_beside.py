"""What users see of an evaluation: time between tokens of streamed chats, without and with one running beside them.

temper up --model models/tiny &
python -m benchmarks.quality.evaluation_beside --streams 4

Rounds alternate, because a shared machine changes. One JSON line: milliseconds between two tokens of a stream (p50,
p99), the median over the rounds and the least of them, which others disturbed
least; and the items that were answered a second.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.recorder import put_line
from benchmarks.quality.evaluation import suite

_ITEMS = 20_000
_TOKENS = 200
_BAR = 1.2
_ENDED = ("succeeded", "failed", "cancelled")


async def _stream(client: httpx.AsyncClient, model: str, number: int) -> list[float]:
    """Seconds between the tokens of one answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Tell me story number {number}."}],
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    times = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and any(choice["token_ids"] for choice in json.loads(line[6:])["choices"]):
                times.append(time.perf_counter())
    return [second - first for first, second in itertools.pairwise(times)]


async def _traffic(url: str, streams: int, seconds: float) -> list[float]:
    """Seconds between tokens of so many streams, each with the next chat once one has ended."""
    numbers = itertools.count()
    found: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        until = time.perf_counter() + seconds

        async def user() -> None:
            while time.perf_counter() < until:
                found.extend(await _stream(client, model, next(numbers)))

        await asyncio.gather(*(user() for _ in range(streams)))
    return found


@contextmanager
def _evaluation(client: httpx.Client, made: str) -> Iterator[dict[str, Any]]:
    """An evaluation of a suite that runs inside; the items that were answered a second are there at the end."""
    run = client.post("/v1/evaluations", json={"suites": [made]}).raise_for_status().json()["id"]

    def state() -> dict[str, Any]:
        found: dict[str, Any] = client.get(f"/v1/evaluations/{run}").raise_for_status().json()
        return found

    while not (state()["progress"] or {}).get("step"):
        time.sleep(0.1)
    report: dict[str, Any] = {}
    began, before = time.monotonic(), state()["progress"]["step"]
    try:
        yield report
        report["items_per_second"] = (state()["progress"]["step"] - before) / (time.monotonic() - began)
    finally:
        client.post(f"/v1/train/jobs/{run}/cancel")
        while state()["state"] not in _ENDED:
            time.sleep(0.1)


def _percentiles(gaps: list[float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds."""
    ordered = sorted(gaps)
    return 1000 * statistics.median(ordered), 1000 * ordered[int(0.99 * (len(ordered) - 1))]


def measure(url: str, *, streams: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Times between tokens in alternating rounds."""
    alone, beside, rates = [], [], []
    asyncio.run(_traffic(url, streams, 2.0))
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        body = suite(_ITEMS) | {"name": "twenty-thousand"}
        made = client.post("/v1/eval/suites", json=body).raise_for_status().json()["id"]
        for _ in range(rounds):
            alone.append(_percentiles(asyncio.run(_traffic(url, streams, seconds))))
            with _evaluation(client, made) as report:
                beside.append(_percentiles(asyncio.run(_traffic(url, streams, seconds))))
            rates.append(report["items_per_second"])

    found = {"alone_ms": _summary(alone), "beside_ms": _summary(beside)}
    ratios = {name: found["beside_ms"][name] / found["alone_ms"][name] for name in found["alone_ms"]}
    return {
        "streams": streams,
        "rounds": rounds,
        **{name: {key: round(value, 2) for key, value in values.items()} for name, values in found.items()},
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
        "bar": _BAR,
        "items_per_second": round(statistics.median(rates), 1),
    }


def _summary(rounds: list[tuple[float, float]]) -> dict[str, float]:
    halves, ends = [one[0] for one in rounds], [one[1] for one in rounds]
    return {"p50": statistics.median(halves), "p99": statistics.median(ends), "least_p99": min(ends)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8420")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0, help="of one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path, help="file of results, JSON lines")
    args = parser.parse_args()
    found = measure(args.url, streams=args.streams, seconds=args.seconds, rounds=args.rounds)
    put_line(found, args.save)


if __name__ == "__main__":
    main()
