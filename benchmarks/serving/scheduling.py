"""The scheduler in simulated time: `python -m benchmarks.serving.scheduling`. No device, no torch, no clock.

The scheduler plans as it does in an engine, with two steps in flight; what a step takes is what one H200 needs for the
4B shape (the tables of README.md), so that rules of the scheduler can be compared before they are measured.

- CxINxOUT: C requests at once, as in benchmarks.serving.rates; decode tok/s by its formula
- mixed: prompts of 32 to 1,024 tokens in a closed loop, a new one for each that ends
- beside: one conversation turn of 64 tokens every 20 ms beside prompts of 16,384, one always there
- a to e: the workloads of benchmarks.prefix_cache.multiturn

A line has the prompt tokens of a step that has any, the time to the first token of cold and warm prompts,
and seconds in all. `--set FIELD=VALUE` changes the scheduler's config.
"""

from __future__ import annotations

import argparse
import heapq
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any

from benchmarks.lib.multiturn_workloads import GENERATORS, Sizes, Workload
from services.engine.requests.outputs import SampledToken
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.step_plan import StepPlan, StepResult

_DECODE_MS = ((0, 2.0), (1, 2.45), (8, 2.95), (16, 3.3), (64, 4.5), (256, 9.2))
"""Milliseconds of a step by its decodes, without the cost of their contexts."""
_CONTEXT_SECONDS = 32_768 / 4.3e12
"""Time to read the keys and values of one token."""
_TOKEN_SECONDS = 1 / 80_000
_ATTENTION = 1.56e-5
"""Additional cost of a prompt's token for each token before it, as a part of itself."""
_BEHIND = 0.0005
"""Seconds until a client sends the next turn."""
CONFIG = SchedulerConfig(
    max_num_seqs=256,
    token_budget=8192,
    block_size=16,
    num_blocks=166_817,
    num_slots=577,
    max_model_len=40_960,
    mixed_prefill_tokens=3840,
    block_bytes=524_288,
    slot_bytes=56_352_768,
    token_seconds=_TOKEN_SECONDS,
    attention_cost=_ATTENTION,
)
"""Settings as a pod of a 4B model has them on an H200."""


def step_seconds(plan: StepPlan) -> float:
    """Time of a step on the device."""
    decodes = plan.num_decodes
    at = max(1, bisect_left(_DECODE_MS, (decodes, 0.0)))
    (low, less), (high, more) = _DECODE_MS[at - 1 : at + 1] if at < len(_DECODE_MS) else _DECODE_MS[-2:]
    seconds = (less + (more - less) * (decodes - low) / (high - low)) / 1e3
    seconds += _CONTEXT_SECONDS * sum(chunk.start for chunk in plan.chunks[:decodes])
    for chunk in plan.chunks[decodes:]:
        length = len(chunk.token_ids)
        seconds += _TOKEN_SECONDS * length * (1 + _ATTENTION * (chunk.start + length / 2))
    return seconds


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is sent at a time."""

    prompt: tuple[int, ...]
    out: int
    warm: bool = False
    """True if the request goes on with a conversation."""
    then: Callable[[float, tuple[int, ...]], Sequence[tuple[float, Arrival]]] | None = None
    """Gets when it ended and its whole history; what is sent on that."""


@dataclass(slots=True)
class _Sent:
    arrival: Arrival
    at: float
    first: float = 0.0
    output: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Simulated:
    """Result of a workload."""

    seconds: float = 0.0
    out_tokens: int = 0
    cold: list[float] = field(default_factory=list)
    """Seconds to the first token."""
    warm: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Seconds between two steps that decode."""
    prefills: list[int] = field(default_factory=list)
    """Prompt tokens of each step that has any."""


def simulate(config: SchedulerConfig, arrivals: Sequence[tuple[float, Arrival]], until: float = 1e9) -> Simulated:
    """Runs a workload; ``until``: nothing is sent any more from then on."""
    scheduler, found = Scheduler(config, depth=2), Simulated()
    numbers, rng = count(1), random.Random(1)
    coming = [(at, next(numbers), arrival) for at, arrival in arrivals]
    heapq.heapify(coming)
    sent: dict[str, _Sent] = {}
    flights: deque[tuple[StepPlan, float]] = deque()
    now = free = 0.0
    while coming or flights or scheduler.has_work:
        if not flights and not scheduler.has_work:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            at, number, arrival = heapq.heappop(coming)
            if at < until:
                sent[str(number)] = _Sent(arrival, at)
                sampling = SamplingParams(max_tokens=arrival.out, ignore_eos=True)
                scheduler.add(Request(str(number), arrival.prompt, sampling, arrival=number))
        plan = scheduler.schedule(now) if len(flights) < 2 else None
        if plan is not None:
            free = max(now, free) + step_seconds(plan)
            flights.append((plan, free))
            if (tokens := plan.num_tokens - plan.num_decodes) > 0:
                found.prefills.append(tokens)
        if not flights or (plan is not None and len(flights) < 2):
            continue
        done, now = flights.popleft()
        if done.num_decodes:
            found.gaps.append(now)
        sampled = [SampledToken(rng.randrange(100, 200_000), -1.0) for chunk in done.chunks if chunk.samples]
        for update in scheduler.update(done, StepResult(sampled), now):
            one = sent[update.request_id]
            if update.token is not None:
                one.first = one.first or now
                one.output.append(update.token.token_id)
            if update.finish_reason is not None:
                (found.warm if one.arrival.warm else found.cold).append(one.first - one.at)
                found.out_tokens += len(one.output)
                if one.arrival.then is not None:
                    for at, arrival in one.arrival.then(now, (*one.arrival.prompt, *one.output)):
                        heapq.heappush(coming, (at, next(numbers), arrival))
    found.seconds = now
    found.gaps = [later - earlier for earlier, later in pairwise(found.gaps)]
    return found


def at_once(case: str) -> list[tuple[float, Arrival]]:
    """CxINxOUT."""
    streams, length, out = (int(part) for part in case.split("x"))
    rng = random.Random(7)
    return [(0.0, Arrival(_tokens(rng, length), out)) for _ in range(streams)]


def decode_rate(config: SchedulerConfig, case: str) -> tuple[float, Simulated]:
    """Decode tok/s of a case as benchmarks.serving.rates counts them, and the run."""
    config = replace(config, prefix_cache=False)
    streams, length, out = (int(part) for part in case.split("x"))
    one = simulate(config, at_once(f"{streams}x{length}x1"))
    whole = simulate(config, at_once(case))
    return streams * (out - 1) / (whole.seconds - one.seconds), whole


def mixed(streams: int, seed: int = 3) -> list[tuple[float, Arrival]]:
    """A closed loop of prompts of many lengths."""
    rng = random.Random(seed)

    def another(now: float, history: tuple[int, ...]) -> list[tuple[float, Arrival]]:
        del history
        return [(now + _BEHIND, made())]

    def made() -> Arrival:
        return Arrival(_tokens(rng, int(32 * 32 ** rng.random())), rng.randrange(64, 257), then=another)

    return [(0.0, made()) for _ in range(streams)]


def beside(turns: int = 200, every: float = 0.02) -> list[tuple[float, Arrival]]:
    """Conversations' turns beside long prompts, one after the other."""
    rng = random.Random(5)

    def another(now: float, history: tuple[int, ...]) -> list[tuple[float, Arrival]]:
        del history
        return [(now + _BEHIND, Arrival(_tokens(rng, 16_384), 8, then=another))]

    def turn(now: float, history: tuple[int, ...]) -> list[tuple[float, Arrival]]:
        return [(now + 0.5, Arrival((*history, *_tokens(rng, 64)), 16, warm=True, then=turn))]

    talks = [(1 + every * n, Arrival(_tokens(rng, 200), 16, warm=True, then=turn)) for n in range(turns // 8)]
    return [(0.0, Arrival(_tokens(rng, 16_384), 8, then=another)), *talks]


def conversations(workload: Workload) -> list[tuple[float, Arrival]]:
    """A workload of benchmarks.prefix_cache.multiturn: its concurrency, its order, its turns."""
    pending, busy = deque(workload.order), set[int]()
    turns = dict.fromkeys(range(len(workload.sessions)), 0)
    histories: dict[int, tuple[int, ...]] = {}

    def may_send() -> Iterator[int]:
        while len(busy) < workload.concurrency:
            for session in pending:
                if workload.together and any(turns[other] <= turns[session] for other in busy):
                    return
                if session not in busy:
                    break
            else:
                return
            pending.remove(session)
            busy.add(session)
            yield session

    def made(session: int) -> Arrival:
        turn, turns[session] = turns[session], turns[session] + 1
        one = workload.sessions[session].turns[turn]
        prompt = (*histories.get(session, ()), *one.new)

        def ended(now: float, history: tuple[int, ...]) -> list[tuple[float, Arrival]]:
            busy.remove(session)
            histories[session] = history
            return [(now + _BEHIND, made(other)) for other in may_send()]

        return Arrival(prompt, one.out, warm=workload.sessions[session].reusable(turn) > 0, then=ended)

    return [(0.0, made(session)) for session in may_send()]


def _tokens(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(100, 200_000) for _ in range(length))


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def _times(values: Sequence[float]) -> str:
    return " / ".join(f"{1e3 * _percentile(values, share):.1f}" for share in (0.5, 0.95, 0.99)) if values else ""


def line(name: str, found: Simulated, rate: float | None = None) -> str:
    """Row of the table for one simulation."""
    per_step = sum(found.prefills) / max(1, len(found.prefills))
    rate = found.out_tokens / found.seconds if rate is None else rate
    cells = (f"{rate:,.0f}", f"{found.seconds:.3f}", f"{per_step:,.0f}", _times(found.cold), _times(found.warm))
    return f"{name:14}" + "".join(f"{cell:>26}" for cell in (*cells, _times(found.gaps)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="1x512x256,8x512x256,16x4096x256,64x512x256,256x512x256")
    parser.add_argument("--workload", default="a,b,c,d,e", help="of benchmarks.prefix_cache.multiturn; empty: none")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the scheduler's config")
    options = parser.parse_args()
    changes: dict[str, Any] = {name: int(value) for name, value in (pair.split("=", 1) for pair in options.set)}
    config = replace(CONFIG, **changes)
    heads = ("out tok/s", "seconds", "tokens a prefill", "cold first token, ms", "warm", "between steps, ms")
    print(f"{'p50 / p95 / p99':14}" + "".join(f"{head:>26}" for head in heads))
    for case in filter(None, options.cases.split(",")):
        rate, found = decode_rate(config, case)
        print(line(case, found, rate), flush=True)
    for streams in (64, 256):
        print(line(f"mixed {streams}", simulate(config, mixed(streams), until=8.0)), flush=True)
    print(line("beside", simulate(config, beside(), until=8.0)), flush=True)
    sizes = Sizes(vocab_size=248_320)
    for name in filter(None, options.workload.split(",")):
        for workload in GENERATORS[name](sizes):
            print(line(f"{name}: {workload.name}", simulate(config, conversations(workload))), flush=True)


if __name__ == "__main__":
    main()
