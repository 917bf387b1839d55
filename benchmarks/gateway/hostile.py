"""Throws hostile requests at a gateway: `python -m benchmarks.gateway.hostile --bodies 20000 --out hostile.jsonl`.

Starts a whole `temper up` with the tiny model (or takes --url), sends bodies of benchmarks.gateway.hostile_bodies and,
for each route of the OpenAPI description, cases of schemathesis, several at a time. Nothing may be answered with 500,
502 or 504, take longer than --patience, or show a path, a secret, or a stack trace; afterwards the gateway must still
answer, hold no request and no block of KV, and have grown by no more than it may. Exit status 1 if anything of that
failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.result import Ok

from benchmarks.gateway.hostile_bodies import Hostile, hostile_bodies
from benchmarks.lib.environment import ROOT, environment
from benchmarks.lib.recorder import put_line
from benchmarks.serving.http_latency import running_stack

SECRET = "tp-hostile-secret-4f1c9a7e"
"""Sent as a key with every request: no answer may repeat it."""
LEAKS = re.compile(
    r"Traceback|site-packages|File \\?\"|\.py\b|/usr/lib|/home/|/root/|/tmp/|0x[0-9a-f]{8,}|"
    + re.escape(str(ROOT))
    + "|"
    + re.escape(SECRET)
)
"""Words of the server's inside. Requests contain none of these."""
_NEVER = frozenset({500, 501, 502, 504})


@dataclass(slots=True)
class Report:
    """Answers that came back."""

    statuses: Counter[str] = field(default_factory=Counter)
    by_path: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    slowest: float = 0.0

    def take(self, sent: Hostile, status: int, text: str, seconds: float) -> None:
        """Judges one answer."""
        self.statuses[str(status)] += 1
        self.by_path[sent.path] += 1
        self.slowest = max(self.slowest, seconds)
        why = None
        if status in _NEVER:
            why = f"status {status}"
        elif found := LEAKS.search(text):
            why = f"leaks {found[0]!r}"
        elif status >= 400 and not _is_error(text):
            why = "not an error object"
        if why:
            self.fail(sent, why, text)

    def fail(self, sent: Hostile, why: str, text: str = "") -> None:
        """Keeps what is needed to send it again."""
        body = sent.body[:2000].decode("latin-1")
        self.failures.append({"why": why, "path": sent.path, "made": sent.made, "body": body, "answer": text[:500]})


def _is_error(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    error = value.get("error") if isinstance(value, dict) else None
    return isinstance(error, dict) and bool(error.get("message"))


async def send(client: httpx.AsyncClient, hostile: Hostile, report: Report) -> None:
    """Sends one request and judges the answer."""
    began = time.monotonic()
    try:
        answer = await client.post(hostile.path, content=hostile.body, headers=dict(hostile.headers))
    except httpx.TimeoutException:
        report.fail(hostile, "no answer in time")
    except httpx.TransportError as error:
        report.fail(hostile, f"connection: {type(error).__name__}")
    else:
        report.take(hostile, answer.status_code, answer.text, time.monotonic() - began)


async def own_corpus(url: str, model: str, options: argparse.Namespace, report: Report) -> None:
    """``options.bodies`` of our own, ``options.streams`` at a time."""
    bodies = islice(hostile_bodies(options.seed, model=model), options.bodies)

    async def worker(client: httpx.AsyncClient) -> None:
        for hostile in bodies:
            await send(client, hostile, report)

    headers = {"authorization": f"Bearer {SECRET}"}
    # Each on a connection of its own: one that the server is closing would look like an answer that was lost.
    alone = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=url, timeout=options.patience, trust_env=False, headers=headers, limits=alone
    ) as client:
        await asyncio.gather(*(worker(client) for _ in range(options.streams)))


def schema_cases(url: str, count: int, options: argparse.Namespace, report: Report) -> int:
    """Cases of schemathesis for every operation, ``count`` in all; returns how many were sent."""
    with httpx.Client(trust_env=False) as client:
        description = client.get(f"{url}/openapi.json").raise_for_status().json()
    operations = [
        operation
        for result in schemathesis.openapi.from_dict(description).get_all_operations()
        # The events of a job that nobody finishes have no end to wait for.
        if isinstance(result, Ok) and not (operation := result.ok()).path.endswith("/events")
    ]
    sent = 0
    for operation in operations:
        for mode in schemathesis.GenerationMode:

            @settings(
                max_examples=max(1, count // (2 * len(operations))),
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def exercise(case: Any) -> None:
                nonlocal sent
                hostile = Hostile(case.path, repr(case.body).encode()[:2000], made=f"schemathesis {case.method}")
                began = time.monotonic()
                try:
                    answer = case.call(base_url=url, timeout=options.patience)
                except OSError as error:
                    report.fail(hostile, f"connection: {type(error).__name__}")
                else:
                    report.take(hostile, answer.status_code, answer.text, time.monotonic() - began)
                sent += 1

            try:
                exercise()
            except Exception as error:  # a schema that cannot be violated has no negative cases
                report.statuses[f"not generated: {type(error).__name__}"] += 1
    return sent


def aftermath(url: str, model: str, report: Report) -> dict[str, Any]:
    """Gauges of the service, after a check that it is as it was: it answers, and holds nothing for hostile requests."""
    probe = Hostile("/v1/chat/completions", b"", made="probe afterwards")
    figures: dict[str, Any] = {}
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        body = {"model": model, "messages": [{"role": "user", "content": "What is 2 plus 3?"}], "max_tokens": 8}
        answer = client.post(probe.path, json=body)
        if answer.status_code != 200:
            report.fail(probe, f"status {answer.status_code}", answer.text)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            figures = dict(_gauges(client.get("/metrics").text))
            if not any(figures.values()):
                break
            time.sleep(0.5)
        for name, value in figures.items():
            if value:
                report.fail(probe, f"{name} is {value:g} after all requests ended")
    return figures


def _gauges(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name == "temper_gateway_in_flight":
            yield name, float(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running gateway; default: a `temper up` of its own")
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--bodies", type=int, default=20_000, help="of our own corpus")
    parser.add_argument("--cases", type=int, default=4_000, help="of schemathesis")
    parser.add_argument("--streams", type=int, default=8, help="requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds after which a request hangs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report()
    began = time.monotonic()
    with nullcontext((options.url, 0.0)) if options.url else running_stack(options.model) as (url, _):
        with httpx.Client(trust_env=False) as client:
            model = client.get(f"{url}/v1/models").json()["data"][0]["id"]
        asyncio.run(own_corpus(url, model, options, report))
        own_seconds = time.monotonic() - began
        cases = schema_cases(url, options.cases, options, report)
        aftermath(url, model, report)
    line = {
        "bodies": options.bodies,
        "schemathesis_cases": cases,
        "statuses": dict(sorted(report.statuses.items())),
        "slowest_s": round(report.slowest, 2),
        "failures": len(report.failures),
        "kinds": dict(Counter(failure["why"] for failure in report.failures).most_common(20)),
        "own_seconds": round(own_seconds, 1),
        "seconds": round(time.monotonic() - began, 1),
    }
    put_line(line | environment(), options.out)
    for failure in report.failures[:40]:
        sys.stderr.write(json.dumps(failure)[:3000] + "\n")
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
