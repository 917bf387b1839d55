"""One gateway, or several, under thousands of streams: `python -m benchmarks.gateway.load --out load.jsonl`.

Real gateway processes in front of engines without a model (benchmarks.gateway.steady_engine), clients in processes of
their own on bare sockets. No GPU, Redis or object store is needed; cores are: with fewer than `gateways + engines +
clients` of them the figures are those of the scheduler of the operating system. With --pin each gateway has a core for
itself, both of its hardware threads, and everything else shares the others. Clients poll instead of sleeping: to wake a
process that sleeps on another core of a virtual machine costs its writer more than the write (`--sleeping` for that).

held      `--connections` streams are open, each of `--tokens` tokens at `--rate` tokens a second. Each of `--engines`
          engines gives its share of the streams a token at a time, and new ones their first token at once. Once, all
          begin within a quarter of their time: told is the CPU that a token takes while all are open and none begins
          or ends. Then who ends is followed by a new one, `--rounds` of them: told are the time to the first byte of
          those that begin while all are open, how much of it an idle engine takes that is asked without a gateway, the
          CPU of it all and the most memory.
excess    more streams at once than the admission limit: how many are answered, how many refused, and how.
scaling   as many streams as keep one gateway busy, on one and on two gateways: tokens a second and core of each.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from grpc import aio

from benchmarks.gateway.http.client import Load, request_bytes
from benchmarks.gateway.http.rates import await_ready, child, first_line
from benchmarks.lib.cases import milliseconds
from benchmarks.lib.environment import environment
from benchmarks.lib.recorder import put_line
from cli.http.load.streams import Answer, Connection
from cli.local.ports import free_ports
from services.common.pb import engine_pb2, engine_pb2_grpc

_VOCABULARY = 2000
_SAMPLES_A_SECOND = 5


@dataclass(frozen=True, slots=True)
class Schedule:
    """Start times of the streams of one client process."""

    slots: int
    """Streams at a time."""
    rounds: int
    """Streams one after the other in each slot."""
    ramp_seconds: float
    """The slots begin evenly over so long."""
    sleeping: bool = False
    """Clients sleep while nothing comes."""
    pause_seconds: float = 0.0
    """Longest pause between two streams of a slot, drawn at random: a stream that began when the last one ends would
    always begin behind the tokens of all the others, in the middle of a step of its engine."""


@dataclass(frozen=True, slots=True)
class Gateways:
    """Gateway processes that are measured."""

    ports: tuple[int, ...]
    processes: tuple[psutil.Process, ...]

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU seconds of all of them together, since they began: the program's own, and the kernel's for it."""
        times = [process.cpu_times() for process in self.processes]
        return sum(time.user for time in times), sum(time.system for time in times)


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Seconds of a run."""

    user: float
    system: float

    @classmethod
    def since(cls, before: tuple[float, float], measured: Gateways) -> CpuUse:
        """CPU time used since ``before``, an earlier ``cpu_seconds``."""
        user, system = measured.cpu_seconds()
        return cls(user - before[0], system - before[1])

    def figures(self, tokens: int, seconds: float) -> dict[str, float]:
        """Figures for the report."""
        used = self.user + self.system
        return {
            "cpu_us_a_token": round(1e6 * used / tokens, 2),
            "of_that_kernel_us": round(1e6 * self.system / tokens, 2),
            "tok_s_a_core": round(tokens / used, 1),
            "cores": round(used / seconds, 3),
        }


class Watch(threading.Thread):
    """Sampler of what gateways use while it runs; a context manager."""

    def __init__(self, measured: Gateways) -> None:
        super().__init__(daemon=True)
        self._measured = measured
        self._ended = threading.Event()
        self.most = 0
        """Bytes of resident memory, of all of them together."""
        self.times: list[tuple[float, tuple[float, float]]] = []
        """(monotonic(), cpu_seconds())"""

    def run(self) -> None:
        while not self._ended.wait(1 / _SAMPLES_A_SECOND):
            self.most = max(self.most, sum(process.memory_info().rss for process in self._measured.processes))
            self.times.append((time.monotonic(), self._measured.cpu_seconds()))

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


@contextmanager
def gateways(
    options: argparse.Namespace, count: int, *, step_ms: float, eager: bool, admit: int, engines: int
) -> Iterator[Gateways]:
    """Starts ``count`` gateways with ``options.engines`` engines each."""
    with ExitStack() as scope:
        ports = free_ports(count)
        processes: list[psutil.Process] = []
        own, shared = _cores(count) if options.pin else ([], [])
        if shared:
            os.sched_setaffinity(0, shared)  # of what is started from here on, too
        for port in ports:
            arguments = ["--step-ms", str(step_ms), *(["--eager"] if eager else [])]
            started = [
                scope.enter_context(child("benchmarks.gateway.steady_engine", *arguments)) for _ in range(engines)
            ]
            settings = {
                "TEMPER_ENGINES": ",".join(f"127.0.0.1:{int(first_line(engine))}" for engine in started),
                "TEMPER_PORT": str(port),
                "TEMPER_LOG_LEVEL": "warning",
                "TEMPER_MAX_IN_FLIGHT": str(admit),
            }
            process = scope.enter_context(child("services.gateway", **settings))
            await_ready(f"http://127.0.0.1:{port}/readyz")
            if own:
                for thread in psutil.Process(process.pid).threads():
                    os.sched_setaffinity(thread.id, own[len(processes)])
            processes.append(psutil.Process(process.pid))
        yield Gateways(tuple(ports), tuple(processes))


def _cores(count: int) -> tuple[list[set[int]], set[int]]:
    """The hardware threads of ``count`` whole cores, and all others.

    Raises:
        RuntimeError: there are not twice as many cores.
    """
    available = set(range(os.cpu_count() or 1))
    siblings: list[set[int]] = []
    for number in sorted(available):
        text = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list").read_text()
        core = {n for part in text.split(",") for n in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)}
        if core not in siblings:
            siblings.append(core)
    if len(siblings) < 2 * count:
        raise RuntimeError(f"--pin needs {2 * count} cores and there are {len(siblings)}")
    own = siblings[:count]
    return own, available - set().union(*own)


async def _slot(load: Load, request: bytes, schedule: Schedule, begins: float, rng: random.Random) -> list[Answer]:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, begins - time.monotonic()))
    answers: list[Answer] = []
    for _ in range(schedule.rounds):
        if answers:
            await asyncio.sleep(rng.uniform(0.0, schedule.pause_seconds))
        done = loop.create_future()
        _, connection = await loop.create_connection(partial(Connection, done), load.host, load.port)
        connection.send(request)
        await done
        connection.close()
        answers.append(connection.answer)
    return answers


def _poll(loop: asyncio.AbstractEventLoop) -> None:
    """Keeps a loop from sleeping."""
    loop.call_soon(_poll, loop)


async def _client(load: Load, schedule: Schedule, seed: int, go: Any) -> list[Answer]:
    if not schedule.sleeping:
        _poll(asyncio.get_running_loop())
    rng = random.Random(seed)
    requests = [request_bytes(load, rng) for _ in range(schedule.slots)]
    await asyncio.to_thread(go.wait)
    now = time.monotonic()
    begins = [now + schedule.ramp_seconds * (index + rng.random()) / schedule.slots for index in range(schedule.slots)]
    slots = [_slot(load, request, schedule, at, rng) for request, at in zip(requests, begins, strict=True)]
    return [answer for part in await asyncio.gather(*slots) for answer in part]


def _client_process(load: Load, schedule: Schedule, seed: int, go: Any, results: Any) -> None:
    import uvloop

    try:
        results.put(uvloop.run(_client(load, schedule, seed, go)))
    except Exception as error:  # the parent tells it
        results.put(f"{type(error).__name__}: {error}")


def run(loads: Sequence[Load], schedule: Schedule, options: argparse.Namespace) -> list[Answer]:
    """Runs the schedule against each load, with ``options.clients`` processes for each.

    Raises:
        RuntimeError: a client process failed.
    """
    clients = options.clients
    context = multiprocessing.get_context("spawn")
    go, results = context.Barrier(clients * len(loads)), context.Queue()
    share = replace(schedule, slots=schedule.slots // clients, sleeping=options.sleeping)
    workers = [
        context.Process(target=_client_process, args=(load, share, 100 * number + index, go, results), daemon=True)
        for number, load in enumerate(loads)
        for index in range(clients)
    ]
    for worker in workers:
        worker.start()
    try:
        answers: list[Answer] = []
        for _ in workers:
            part: list[Answer] | str = results.get(timeout=900)
            if isinstance(part, str):
                raise RuntimeError(part)
            answers += part
        return answers
    finally:
        for worker in workers:
            worker.join(5)
            worker.kill()


def _load(port: int, options: argparse.Namespace, tokens: int) -> Load:
    return Load("127.0.0.1", port, "qwen3.5", options.prompt, tokens, _VOCABULARY)


def _events(answers: Sequence[Answer]) -> int:
    return sum(answer.events for answer in answers)


async def _ask_engine(port: int, prompt_tokens: int, rounds: int, *, sleeping: bool) -> list[float]:
    """Seconds from a request to an engine's first token, one request after the other."""
    if not sleeping:
        _poll(asyncio.get_running_loop())
    seconds = []
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = engine_pb2_grpc.EngineStub(channel).Stream()
        await call.wait_for_connection()
        for number in range(rounds):
            request = engine_pb2.GenerateRequest(
                request_id=f"direct-{number}",
                prompt_token_ids=range(prompt_tokens),
                sampling=engine_pb2.SamplingParams(max_tokens=1),
            )
            began = time.perf_counter()
            await call.write(engine_pb2.ClientFrame(submit=request))
            await call.read()
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(0.005)
        call.cancel()
    return seconds


def without_gateway(options: argparse.Namespace) -> list[float]:
    """Seconds to the first token of an idle engine that is asked directly."""
    import uvloop

    with child("benchmarks.gateway.steady_engine", "--step-ms", "200", "--eager") as engine:
        port = int(first_line(engine))
        return uvloop.run(_ask_engine(port, options.prompt, 300, sleeping=options.sleeping))[50:]


def held(options: argparse.Namespace) -> dict[str, Any]:
    """Thousands of streams at a time."""
    seconds = options.tokens / options.rate
    direct = without_gateway(options)
    admit = options.connections + 64
    with gateways(options, 1, step_ms=1e3 / options.rate, eager=True, admit=admit, engines=options.engines) as measured:
        load = _load(measured.ports[0], options, options.tokens)
        run([replace(load, new_tokens=8)], Schedule(options.clients, 4, 0.1), options)
        idle = measured.processes[0].memory_info().rss
        with Watch(measured) as watch:
            steady = steady_cpu(run([load], Schedule(options.connections, 1, seconds / 4), options), watch)
            before = measured.cpu_seconds()
            answers = run(
                [load], Schedule(options.connections, options.rounds, seconds, pause_seconds=1 / options.rate), options
            )
            cpu = CpuUse.since(before, measured)
    good = [answer for answer in answers if not answer.status]
    full = min(answer.sent for answer in answers) + seconds
    last = max(answer.sent for answer in good)
    first = [answer.first - answer.sent for answer in good if full <= answer.sent <= last]
    events = _events(good)
    span = max(answer.last for answer in good) - min(answer.sent for answer in answers)
    return {
        "connections": options.connections,
        "requests": len(answers),
        "errors": dict(Counter(answer.status[:60] for answer in answers if answer.status)),
        "first_byte_ms": milliseconds(first),
        "first_bytes": len(first),
        "engine_alone_ms": milliseconds(direct),
        "streamed_tokens": events,
        "tok_s": round(events / span, 1),
        "steady": steady,
        "with_beginnings_and_ends": cpu.figures(events, span),
        "rss_idle_mib": round(idle / 2**20, 1),
        "rss_most_mib": round(watch.most / 2**20, 1),
        "rss_kib_a_stream": round((watch.most - idle) / options.connections / 2**10, 1),
    }


def steady_cpu(answers: Sequence[Answer], watch: Watch) -> dict[str, float]:
    """CPU cost of tokens between two looks while all streams were open.

    Raises:
        RuntimeError: streams failed, or were never all open.
    """
    if failed := [answer.status for answer in answers if answer.status]:
        raise RuntimeError(f"{len(failed)} of {len(answers)} streams failed, the first with: {failed[0]}")
    begin, end = max(answer.first for answer in answers), min(answer.last for answer in answers)
    looks = [look for look in watch.times if begin <= look[0] <= end]
    if len(looks) < _SAMPLES_A_SECOND:
        raise RuntimeError("the streams were not all open for a second: give them more --tokens")
    (begin, before), (end, after) = looks[0], looks[-1]
    tokens = sum(begin < when <= end for answer in answers for when in answer.times)
    figures = CpuUse(after[0] - before[0], after[1] - before[1]).figures(tokens, end - begin)
    return {"tokens": tokens, "tok_s": round(tokens / (end - begin), 1), **figures}


def excess(options: argparse.Namespace) -> dict[str, Any]:
    """A quarter more streams than are admitted, all at once."""
    admit = options.connections
    with gateways(options, 1, step_ms=200, eager=True, admit=admit, engines=options.engines) as measured:
        load = replace(_load(measured.ports[0], options, options.tokens), usage=True)
        answers = run([load], Schedule(admit + admit // 4, 1, 1.0), options)
    counted = f'"completion_tokens":{options.tokens},'.encode()
    refused = [answer for answer in answers if answer.status]
    return {
        "admitted": admit,
        "sent": len(answers),
        "answered": len(answers) - len(refused),
        "complete": sum(counted in answer.end for answer in answers),
        "refused": dict(Counter(answer.head[9:12].decode("latin-1") for answer in refused)),
        "with_retry_after": sum(b"retry-after" in answer.head.lower() for answer in refused),
    }


def scaling(options: argparse.Namespace) -> dict[str, Any]:
    """More tokens than a gateway can pass on: one gateway, then two."""
    rates = []
    for count in (1, 2):
        with gateways(options, count, step_ms=5, eager=False, admit=4096, engines=1) as measured:
            loads = [_load(port, options, 8) for port in measured.ports]
            run(loads, Schedule(options.busy, 1, 0.1), options)
            loads = [_load(port, options, options.busy_tokens) for port in measured.ports]
            before = measured.cpu_seconds()
            answers = run(loads, Schedule(options.busy, 1, 0.1), options)
            cpu = CpuUse.since(before, measured)
        if failed := [answer.status for answer in answers if answer.status]:
            raise RuntimeError(f"{len(failed)} of {len(answers)} streams failed, the first with: {failed[0]}")
        tokens = len(answers) * options.busy_tokens
        seconds = max(answer.last for answer in answers) - min(answer.sent for answer in answers)
        rates.append(
            {
                "gateways": count,
                "streams": len(answers),
                "tok_s": round(tokens / seconds, 1),
                "events": _events(answers),
                **cpu.figures(tokens, seconds),
            }
        )
    return {"runs": rates, "ratio": round(rates[1]["tok_s"] / rates[0]["tok_s"], 3)}


_CASES = {"held": held, "excess": excess, "scaling": scaling}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="held,excess,scaling")
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    parser.add_argument("--rate", type=float, default=5.0, help="tokens a second of each stream")
    parser.add_argument("--rounds", type=int, default=3, help="streams one after the other on each connection's place")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--busy", type=int, default=256, help="streams of each gateway in `scaling`")
    parser.add_argument("--busy-tokens", type=int, default=1500)
    parser.add_argument("--engines", type=int, default=8, help="behind the gateway; one in `scaling`")
    parser.add_argument("--clients", type=int, default=4, help="processes for each gateway")
    parser.add_argument("--sleeping", action="store_true", help="clients do not poll")
    parser.add_argument("--pin", action="store_true", help="a core for each gateway alone (Linux)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for name in options.cases.split(","):
        began = time.monotonic()
        figures = _CASES[name](options)
        put_line({"case": name, **figures, "seconds": round(time.monotonic() - began, 1), **environment()}, options.out)


if __name__ == "__main__":
    main()
