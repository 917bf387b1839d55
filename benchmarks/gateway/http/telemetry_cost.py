"""Cost of traces: `python -m benchmarks.gateway.http.telemetry_cost --cases 64x512x256 --rounds 3`.

One engine and two gateways in front of it, one of which sends every request's trace to a collector (ratio 1.0), the
engine with it; the same load goes to either in turn. The collector is a process that takes spans and forgets them.
With --steady-ms an engine without a model stands in, so that the gateway is what is measured. One JSON line a case:
tokens a second with and without, their ratio, and the CPU of both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks.gateway.http.rates import Stack, await_ready, child, first_line, measure
from benchmarks.lib.cases import Case
from benchmarks.lib.environment import environment
from benchmarks.lib.random_checkpoint import checkpoint
from benchmarks.lib.recorder import put_line
from cli.local.ports import free_ports


class _Sink(trace_service_pb2_grpc.TraceServiceServicer):
    """Forgets."""

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's
        return trace_service_pb2.ExportTraceServiceResponse()


def _collect() -> None:
    """Prints its port and takes what comes."""
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Sink(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    server.wait_for_termination()


def _stacks(options: argparse.Namespace, scope: ExitStack) -> tuple[Stack, Stack]:
    """Stacks without traces and with them."""
    sink = scope.enter_context(child("benchmarks.gateway.http.telemetry_cost", "--collect"))
    endpoint = f"http://127.0.0.1:{int(first_line(sink))}"
    if options.steady_ms:
        engine = scope.enter_context(child("benchmarks.gateway.steady_engine", "--step-ms", str(options.steady_ms)))
        engine_port, vocabulary = int(first_line(engine)), 2000
    else:
        model = str(checkpoint(options.model, options.scratch))
        arguments = ["--model", model, "--device", options.device, "--cases", ""]
        engine = scope.enter_context(
            child("benchmarks.gateway.http.engine_server", *arguments, TEMPER_OTLP_ENDPOINT=endpoint)
        )
        line = json.loads(first_line(engine))
        engine_port, vocabulary = line["port"], line["vocab_size"]
    made = []
    for extra in ({}, {"TEMPER_OTLP_ENDPOINT": endpoint}):
        (port,) = free_ports(1)
        settings = {"TEMPER_ENGINES": f"127.0.0.1:{engine_port}", "TEMPER_PORT": str(port), **extra}
        gateway = scope.enter_context(child("services.gateway", TEMPER_LOG_LEVEL="warning", **settings))
        await_ready(f"http://127.0.0.1:{port}/readyz")
        processes = {"engine": psutil.Process(engine.pid), "gateway": psutil.Process(gateway.pid)}
        made.append(Stack("127.0.0.1", port, "qwen3.5", vocabulary, {}, processes))
    return made[0], made[1]


def _case(case: Case, stacks: tuple[Stack, Stack], options: argparse.Namespace) -> dict[str, Any]:
    rates: tuple[list[float], list[float]] = ([], [])
    cores: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    for number in range(options.rounds):
        # Who goes first changes: what warms up between two measurements falls on either.
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            report = measure(stacks[which], case, options.clients)
            rates[which].append(report["tok_s"])
            cores[which].append(report["cpu_cores"])
    off, on = (statistics.median(found) for found in rates)
    return {
        "c": case.requests,
        "in": case.prompt_tokens,
        "out": case.new_tokens,
        "off_tok_s": off,
        "on_tok_s": on,
        "ratio": round(on / off, 4),
        "all_off": rates[0],
        "all_on": rates[1],
        "cpu_cores_off": cores[0][-1],
        "cpu_cores_on": cores[1][-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steady-ms", type=float, default=0.0, help="an engine without a model, this long a step")
    parser.add_argument("--model", default="models/tiny", help="directory or the name of a shape, as in serving")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/temper-bench"))
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--cases", default="64x512x256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.collect:
        _collect()
        return
    with ExitStack() as scope:
        stacks = _stacks(options, scope)
        for text in options.cases.split(","):
            figures = _case(Case.parse(text), stacks, options)
            put_line({"benchmark": "telemetry_cost", "model": options.model, **figures, **environment()}, options.out)


if __name__ == "__main__":
    main()
