"""Latency and rates through gateway and gRPC: `python -m benchmarks.gateway.http.rates --cases 1x512x256,64x512x256`.

Starts an engine process, which first measures the same cases in process, and a gateway process; neither needs Redis or
an object store. With --url a running stack is measured instead; with --steady-ms an engine without a model that gives
every request one token a step, to see what the gateway itself costs. The client is a few processes of its own. One
JSON line a case: decode = c · (out - 1) / (t(out) - t(1)) as in benchmarks.serving.rates, its ratio to in-process,
time to first token, time between events, and the CPU of each process.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gateway.http.client import Load, run_load
from benchmarks.lib.cases import Case, milliseconds
from benchmarks.lib.environment import environment
from benchmarks.lib.random_checkpoint import checkpoint
from benchmarks.lib.recorder import describe
from cli.http.load.streams import Answer

_READY_SECONDS = 60.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener without the proxy that the environment may name."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Stack that is measured."""

    host: str
    port: int
    model: str
    vocab_size: int
    in_process: dict[str, dict[str, Any]]
    """benchmarks.serving.rates's figures by case, where the engine was started here."""
    processes: dict[str, psutil.Process]


def measure(stack: Stack, case: Case, clients: int) -> dict[str, Any]:
    """Measures one case: a warm-up, t(1), t(out)."""
    load = Load(stack.host, stack.port, stack.model, case.prompt_tokens, case.new_tokens, stack.vocab_size)
    run_load(replace(load, new_tokens=min(8, case.new_tokens)), case.requests, processes=clients)
    one = min(
        seconds_of(run_load(replace(load, new_tokens=1), case.requests, processes=clients, seed=seed))
        for seed in (1, 2)
    )
    runs: list[tuple[float, list[Answer], dict[str, float]]] = []
    for seed in (3, 4):
        before = {name: sum(process.cpu_times()[:2]) for name, process in stack.processes.items()}
        answers = run_load(load, case.requests, processes=clients, seed=seed)
        seconds = seconds_of(answers)
        used = {name: sum(p.cpu_times()[:2]) - before[name] for name, p in stack.processes.items()}
        runs.append((seconds, answers, {name: round(cpu / seconds, 2) for name, cpu in used.items()}))
    seconds, answers, cores = min(runs, key=lambda run: run[0])
    decode = case.requests * (case.new_tokens - 1) / (seconds - one)
    report = {
        "c": case.requests,
        "in": case.prompt_tokens,
        "out": case.new_tokens,
        "decode_tok_s": round(decode, 1),
        "tok_s": round(case.requests * case.new_tokens / seconds, 1),
        "t1_s": round(one, 4),
        "t_out_s": round(seconds, 4),
        "ttft_ms": milliseconds([answer.first - answer.sent for answer in answers]),
        "itl_ms": milliseconds([b - a for answer in answers for a, b in pairwise(answer.times)]),
        "events": sum(answer.events for answer in answers),
        "cpu_cores": cores,
    }
    reference = stack.in_process.get(f"{case.requests}x{case.prompt_tokens}x{case.new_tokens}")
    if reference is not None:
        report["in_process"] = reference
        report["ratio"] = round(decode / reference["decode_tok_s"], 4)
    return report


def seconds_of(answers: list[Answer]) -> float:
    """From the first request to the last token."""
    return max(answer.last for answer in answers) - min(answer.sent for answer in answers)


@contextmanager
def child(*command: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A Python module as a child process that is ended with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environ,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def first_line(process: subprocess.Popen[str]) -> str:
    """The next line that a child prints.

    Raises:
        RuntimeError: it has ended.
    """
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        raise RuntimeError(f"{process.args!r} ended; its log above has the reason")
    return line


def _engine(options: argparse.Namespace, stack: ExitStack) -> tuple[psutil.Process, int, int, dict[str, Any]]:
    """Starts an engine: its process, port, vocabulary and in-process figures."""
    if options.steady_ms:
        arguments = ["--model", "models/tiny", "--step-ms", str(options.steady_ms)]
        process = stack.enter_context(child("benchmarks.gateway.steady_engine", *arguments))
        return psutil.Process(process.pid), int(first_line(process)), 2000, {}
    arguments = ["--model", str(checkpoint(options.model, options.scratch)), "--device", options.device]
    arguments += ["--cases", options.cases, "--quant", options.quant, "--kv", options.kv]
    process = stack.enter_context(child("benchmarks.gateway.http.engine_server", *arguments))
    figures: dict[str, Any] = {}
    while "port" not in (line := json.loads(first_line(process))):
        figures[f"{line['c']}x{line['in']}x{line['out']}"] = line
    return psutil.Process(process.pid), line["port"], line["vocab_size"], figures


def _own_stack(options: argparse.Namespace, stack: ExitStack) -> Stack:
    engine, engine_port, vocab_size, figures = _engine(options, stack)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"TEMPER_ENGINES": f"127.0.0.1:{engine_port}", "TEMPER_PORT": str(port), "TEMPER_LOG_LEVEL": "warning"}
    gateway = stack.enter_context(child("services.gateway", **settings))
    await_ready(f"http://127.0.0.1:{port}/readyz")
    processes = {"engine": engine, "gateway": psutil.Process(gateway.pid)}
    return Stack("127.0.0.1", port, "qwen3.5", vocab_size, figures, processes)


def await_ready(url: str) -> None:
    """Returns when the URL answers.

    Raises:
        RuntimeError: it does not.
    """
    until = time.monotonic() + _READY_SECONDS
    while True:
        try:
            with _DIRECT.open(url, timeout=2):
                return
        except OSError as error:
            if time.monotonic() > until:
                raise RuntimeError(f"{url} was not ready within {_READY_SECONDS:g} s") from error
            time.sleep(0.05)


def stack_of(options: argparse.Namespace, scope: ExitStack) -> Stack:
    """The stack of --url, else one that is ended with the scope."""
    return _running_stack(options.url) if options.url else _own_stack(options, scope)


def _running_stack(url: str) -> Stack:
    parts = urllib.parse.urlsplit(url)
    with _DIRECT.open(f"{url}/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]
    return Stack(parts.hostname or "127.0.0.1", parts.port or 80, model, 2000, {}, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running gateway, e.g. http://127.0.0.1:8420")
    parser.add_argument("--steady-ms", type=float, default=0.0, help="an engine without a model, this long a step")
    parser.add_argument("--model", default="models/tiny", help="directory or the name of a shape, as in serving")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/temper-bench"))
    parser.add_argument("--cases", default="1x512x128,8x512x128,16x512x256,64x512x256,128x512x256,256x512x256")
    parser.add_argument("--quant", choices=("none", "fp8", "int4"), default="none")
    parser.add_argument("--kv", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--seconds", type=float, default=540.0, help="start no case after this")
    parser.add_argument("--out", type=Path, help="directory for http.jsonl")
    options = parser.parse_args()
    cases = [Case.parse(part) for part in options.cases.split(",")]
    began = time.monotonic()
    with ExitStack() as scope:
        stack = stack_of(options, scope)
        common = {"model": options.model, "quant": options.quant, "kv": options.kv, "steady_ms": options.steady_ms}
        common |= environment()
        for case in cases:
            if time.monotonic() - began > options.seconds:
                sys.stderr.write(f"no time left for {case}\n")
                break
            report = common | {"case": asdict(case)}
            try:
                report |= measure(stack, case, options.clients)
            except Exception as error:  # the other cases' figures are still wanted
                report["failed"] = describe(error)
            line = json.dumps(report)
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
            if options.out is not None:
                options.out.mkdir(parents=True, exist_ok=True)
                with (options.out / "http.jsonl").open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
