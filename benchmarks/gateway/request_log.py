"""What the request log and feedback cost a gateway: `python -m benchmarks.gateway.request_log --out log.jsonl`.

Three real gateways run at once, with a Valkey and an S3 server of this machine and engines without a model
(benchmarks.gateway.steady_engine): without the log; with all requests logged; with that, and feedback on a share of the
answers. They get the same load in turns of a few seconds, so that what else the machine does comes to all of them.
Told is each gateway's CPU, all its threads together: a second while nothing comes, and a request beside that, with what
is written behind the turn (medians of the turns); how much of it the event loop has; and the time to the first byte.
The last line has the differences, and how many gateways 2,000 requests a second need, with a core each. Goals: 5 % of
the CPU, 1 ms of the 99th percentile. `--tokens 1 --whole --connections 8 --rounds 100 --pause-ms 0` asks for short
answers without streams, as many as one core gives. With fewer cores than processes the times are those of the
scheduler of the operating system; CPU is counted all the same.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil
from pydantic import SecretStr

from benchmarks.gateway.exchanges import Exchanges, Told, exchange
from benchmarks.gateway.http.rates import await_ready, child, first_line
from benchmarks.lib.cases import milliseconds
from benchmarks.lib.environment import environment
from benchmarks.lib.recorder import put_line
from cli.local.ports import claim_ports, free_ports
from cli.local.store_processes import s3_server, valkey_server
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from tests.integration.servers import RunningServer

_VOCABULARY = 2000
_WANTED = 2000
"""Requests a second that the goal names."""
_ARMS = ("without", "log", "log and feedback")
_COUNTERS = {
    "written": "temper_gateway_logged_requests_total",
    "dropped": "temper_gateway_dropped_log_requests_total",
}


@dataclass(slots=True)
class Arm:
    """One of the gateways, and what it has done."""

    port: int
    process: psutil.Process
    feedback: float
    idle_us_s: float = 0.0
    """CPU a second while nothing comes."""
    told: list[Told] = field(default_factory=list)
    """Of each turn."""
    used: list[tuple[float, float]] = field(default_factory=list)
    """CPU of a request in each turn, in microseconds beside the idle process: of all threads, and of the event loop."""

    def count(self, before: tuple[float, float], seconds: float) -> None:
        """Notes what was used since ``before``, a ``cpu()``, for the last turn's requests."""
        total, loop = (
            (1e6 * (now - then) - self.idle_us_s * seconds) / len(self.told[-1].first_bytes)
            for now, then in zip(self.cpu(), before, strict=True)
        )
        self.used.append((total, loop))

    def cpu(self) -> tuple[float, float]:
        """CPU seconds since it began: of all threads, and of the one that runs the event loop."""
        times = self.process.cpu_times()
        loop = next(one for one in self.process.threads() if one.id == self.process.pid)
        return times.user + times.system, loop.user_time + loop.system_time

    def counts(self) -> dict[str, float]:
        """The log's counters."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as page:
            lines = page.read().decode().splitlines()
        return {
            name: sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))
            for name, series in _COUNTERS.items()
        }


@contextmanager
def stores(directory: Path) -> Iterator[Mapping[str, str]]:
    """A Valkey and an S3 server with a bucket, and the variables that name them."""
    redis_port, s3_port = claim_ports(2)
    for name in ("valkey", "s3"):
        (directory / name).mkdir()
    with ExitStack() as scope:
        for server in (
            valkey_server(directory / "valkey", redis_port),
            s3_server(directory / "s3", s3_port, access_key="temper", secret_key="temper-secret"),
        ):
            running = RunningServer(server)
            running.start()
            scope.callback(running.stop)
        redis, s3 = f"redis://127.0.0.1:{redis_port.number}/0", f"127.0.0.1:{s3_port.number}"
        ObjectStore(CommonSettings(redis_url=SecretStr(redis), s3_endpoint=s3)).check()
        yield {"TEMPER_REDIS_URL": redis, "TEMPER_S3_ENDPOINT": s3}


@contextmanager
def gateways(options: argparse.Namespace, environ: Mapping[str, str], spool: Path) -> Iterator[Mapping[str, Arm]]:
    """The gateways by name, in front of the same engines."""
    with ExitStack() as scope:
        arguments = ["--step-ms", str(options.step_ms), "--eager"]
        engines = [scope.enter_context(child("benchmarks.gateway.steady_engine", *arguments)) for _ in range(2)]
        common = {
            **environ,
            "TEMPER_ENGINES": ",".join(f"127.0.0.1:{int(first_line(engine))}" for engine in engines),
            "TEMPER_LOG_LEVEL": "warning",
            "TEMPER_MAX_IN_FLIGHT": "4096",
            "TEMPER_LEARNERS": "false",  # which one of them acts for learners is no difference that is measured
        }
        arms: dict[str, Arm] = {}
        for name, port in zip(_ARMS, free_ports(len(_ARMS)), strict=True):
            settings = {
                "TEMPER_PORT": str(port),
                "TEMPER_REQUEST_LOG": "false" if name == "without" else "true",
                "TEMPER_REQUEST_LOG_SPOOL": str(spool / str(port)),
            }
            process = scope.enter_context(child("services.gateway", **common, **settings))
            share = options.feedback if "feedback" in name else 0.0
            arms[name] = Arm(port, psutil.Process(process.pid), share)
        for arm in arms.values():
            await_ready(f"http://127.0.0.1:{arm.port}/readyz")
        yield arms


def measure(options: argparse.Namespace, arms: Mapping[str, Arm]) -> dict[str, dict[str, Any]]:
    """What each gateway used, by name, after all turns."""
    body: dict[str, Any] = {
        "model": "qwen3.5",
        "prompt": [(7 * number) % _VOCABULARY for number in range(options.prompt)],
        "max_tokens": options.tokens,
        "temperature": 1,
        "ignore_eos": True,
        "stream": not options.whole,
        "return_token_ids": True,  # so that each token is an event, also one that is no text
        "user": "u-1",
    }
    load = Exchanges(body, options.connections, options.rounds, pause_seconds=options.pause_ms / 1e3)
    with multiprocessing.get_context("spawn").Pool(1) as client:
        for arm in arms.values():
            _checked(client.apply(exchange, (arm.port, replace(load, rounds=2, feedback=arm.feedback), 0)))
        time.sleep(options.settle)
        began, before = time.monotonic(), {name: arm.cpu() for name, arm in arms.items()}
        time.sleep(options.idle)
        for name, arm in arms.items():
            arm.idle_us_s = 1e6 * (arm.cpu()[0] - before[name][0]) / (time.monotonic() - began)
        for turn in range(options.turns):
            began, before = time.monotonic(), {name: arm.cpu() for name, arm in arms.items()}
            names = _ARMS[turn % len(_ARMS) :] + _ARMS[: turn % len(_ARMS)]
            for name in names[:: -1 if turn % 2 else 1]:
                arm = arms[name]
                given = replace(load, feedback=arm.feedback)
                arm.told.append(_checked(client.apply(exchange, (arm.port, given, turn))))
            time.sleep(options.settle)  # what was logged last is written, which belongs to the costs
            for name, arm in arms.items():
                arm.count(before[name], time.monotonic() - began)
    return {name: _figures(arm) for name, arm in arms.items()}


def _checked(told: Told) -> Told:
    if told.failed:
        raise RuntimeError(f"{len(told.failed)} requests failed, the first with: {told.failed[0]}")
    return told


def _figures(arm: Arm) -> dict[str, Any]:
    firsts = [one for told in arm.told for one in told.first_bytes]
    said = [one for told in arm.told for one in told.feedback]
    return {
        "requests": len(firsts),
        "feedback": len(said),
        "requests_s": round(len(firsts) / sum(told.seconds for told in arm.told), 1),
        "cpu_us_a_request": round(median(total for total, _ in arm.used), 1),
        "of_that_event_loop_us": round(median(loop for _, loop in arm.used), 1),
        "cpu_us_by_turn": [round(total) for total, _ in arm.used],
        "idle_cpu_us_a_second": round(arm.idle_us_s),
        "first_byte_ms": milliseconds(firsts),
        **({"feedback_ms": milliseconds(said)} if said else {}),
        **arm.counts(),
    }


def compared(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Differences to the gateway without the log: medians over the turns, each of which all gateways had."""
    base = found["without"]
    more: dict[str, Any] = {}
    for name in _ARMS[1:]:
        one = found[name]
        pairs = list(zip(one["cpu_us_by_turn"], base["cpu_us_by_turn"], strict=True))
        shares = sorted(with_it / without - 1 for with_it, without in pairs)
        more[name] = {
            "cpu_more": round(median(shares), 4),
            "cpu_more_quartiles": [round(share, 4) for share in quantiles(shares, n=4)[::2]],
            "cpu_more_us": round(median(with_it - without for with_it, without in pairs), 1),
            "idle_more_us_a_second": one["idle_cpu_us_a_second"] - base["idle_cpu_us_a_second"],
            "first_byte_p99_more_ms": round(one["first_byte_ms"]["p99"] - base["first_byte_ms"]["p99"], 3),
        }
    needed = {name: math.ceil(_WANTED * one["cpu_us_a_request"] / 1e6) for name, one in found.items()}
    return {"more": more, f"gateways_for_{_WANTED}_a_second": needed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6, help="of each gateway")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="completions of a connection and turn")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--whole", action="store_true", help="answers are not streamed")
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens")
    parser.add_argument("--feedback", type=float, default=0.1, help="share of the answers that get feedback")
    parser.add_argument("--step-ms", type=float, default=15.0)
    parser.add_argument("--pause-ms", type=float, default=15.0, help="longest pause before a request")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds for which the idle gateways are watched")
    parser.add_argument("--settle", type=float, default=7.0, help="seconds in which what is logged is written")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    case = {name: getattr(options, name) for name in ("connections", "tokens", "whole", "prompt")}
    with (
        tempfile.TemporaryDirectory() as scratch,
        stores(Path(scratch)) as environ,
        gateways(options, environ, Path(scratch, "spool")) as arms,
    ):
        found = measure(options, arms)
    for name, figures in found.items():
        put_line({"arm": name, **case, **figures, **environment()}, options.out)
    put_line({**case, **compared(found), **environment()}, options.out)


if __name__ == "__main__":
    main()
