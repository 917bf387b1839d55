"""What the request log costs a gateway: `python -m benchmarks.gateway.request_log --out log.jsonl`.

A real gateway in front of engines without a model (benchmarks.gateway.steady_engine), with a Valkey and an S3 server of
this machine, in turns without the log and with all requests logged. One JSON line a run: CPU of the gateway's process a
request, its threads included, time to the first byte, and what was logged and dropped; then a line with the medians of
both, the difference in CPU, and that of the 99th percentile. Goals: 5 % of the CPU, 1 ms. With fewer cores than
processes the times are those of the scheduler of the operating system; CPU is counted all the same.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from pydantic import SecretStr

from benchmarks.gateway.load import CpuUse, Gateways, Schedule, run
from benchmarks.http.client import Load
from benchmarks.http.rates import await_ready, child, first_line
from benchmarks.lib.cases import milliseconds
from benchmarks.lib.environment import environment
from benchmarks.lib.recorder import put_line
from cli.local.ports import claim_ports, free_ports
from cli.local.store_processes import s3_server, valkey_server
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from tests.integration.servers import RunningServer

_VOCABULARY = 2000
_COUNTERS = {
    "written": "temper_gateway_logged_requests_total",
    "dropped": "temper_gateway_dropped_log_requests_total",
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


def measure(options: argparse.Namespace, environ: Mapping[str, str], *, logged: bool, spool: Path) -> dict[str, Any]:
    """One gateway under the load, with or without its log."""
    (port,) = free_ports(1)
    with ExitStack() as scope:
        arguments = ["--step-ms", str(options.step_ms), "--eager"]
        engines = [scope.enter_context(child("benchmarks.gateway.steady_engine", *arguments)) for _ in range(2)]
        settings = {
            **environ,
            "TEMPER_ENGINES": ",".join(f"127.0.0.1:{int(first_line(engine))}" for engine in engines),
            "TEMPER_PORT": str(port),
            "TEMPER_LOG_LEVEL": "warning",
            "TEMPER_MAX_IN_FLIGHT": "4096",
            "TEMPER_REQUEST_LOG": "true" if logged else "false",
            "TEMPER_REQUEST_LOG_SPOOL": str(spool),
        }
        process = scope.enter_context(child("services.gateway", **settings))
        await_ready(f"http://127.0.0.1:{port}/readyz")
        measured = Gateways((port,), (psutil.Process(process.pid),))
        load = Load("127.0.0.1", port, "qwen3.5", options.prompt, options.tokens, _VOCABULARY)
        pause = options.step_ms / 1e3
        run([load], Schedule(options.connections, 2, 0.1), options)
        before = measured.cpu_seconds()
        answers = run([load], Schedule(options.connections, options.rounds, 0.5, pause_seconds=pause), options)
        time.sleep(7)  # what was logged last is written, which belongs to the costs
        cpu = CpuUse.since(before, measured)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            counts = _counted(page.read().decode())
    if failed := [answer.status for answer in answers if answer.status]:
        raise RuntimeError(f"{len(failed)} of {len(answers)} streams failed, the first with: {failed[0]}")
    span = max(answer.last for answer in answers) - min(answer.sent for answer in answers)
    return {
        "logged": logged,
        "requests": len(answers),
        "requests_s": round(len(answers) / span, 1),
        "cpu_us_a_request": round(1e6 * (cpu.user + cpu.system) / len(answers), 1),
        "first_byte_ms": milliseconds([answer.first - answer.sent for answer in answers]),
        **counts,
    }


def _counted(text: str) -> dict[str, float]:
    found = {}
    for name, series in _COUNTERS.items():
        found[name] = sum(float(line.split(" ")[1]) for line in text.splitlines() if line.startswith(series))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens")
    parser.add_argument("--step-ms", type=float, default=15.0)
    parser.add_argument("--clients", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.sleeping = True
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, stores(Path(scratch)) as environ:
        for turn in range(options.turns):
            for logged in (turn % 2 == 0, turn % 2 == 1):
                runs.append(measure(options, environ, logged=logged, spool=Path(scratch, "spool")))
                put_line(runs[-1] | environment(), options.out)
    found: dict[str, Any] = {}
    for logged in (False, True):
        those = [one for one in runs if one["logged"] is logged]
        found["with" if logged else "without"] = {
            "cpu_us_a_request": median(one["cpu_us_a_request"] for one in those),
            "first_byte_p99_ms": median(one["first_byte_ms"]["p99"] for one in those),
        }
    cpu = found["with"]["cpu_us_a_request"] / found["without"]["cpu_us_a_request"] - 1
    p99 = found["with"]["first_byte_p99_ms"] - found["without"]["first_byte_p99_ms"]
    put_line({**found, "cpu_more": round(cpu, 4), "p99_more_ms": round(p99, 3), **environment()}, options.out)


if __name__ == "__main__":
    main()
