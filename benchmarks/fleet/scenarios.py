"""Scenarios: what the simulator is asked, each with the figures that answer it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from benchmarks.fleet.figures import beside_ideal, described, first_tokens, loss, percentile, throughput
from benchmarks.fleet.ideal import ideal
from benchmarks.fleet.player import Player
from benchmarks.fleet.simulation import GATEWAY_SECONDS, Fleet, Setting, only_errors, played, simulate
from benchmarks.fleet.subject import Subject
from benchmarks.fleet.traces import SHAPES, Session, adapter_names, draw
from benchmarks.fleet.virtual import clock

_SPREAD_SECONDS = 30.0
"""After so long a new version is looked for in every engine."""
_COMMON = "all"
"""Name of the adapter that every engine has."""
_FOUND_SECONDS = 10.0
"""More than gateways need to find an engine by its name."""
_MORE_THAN_ALL = 3.0
"""Load of a fleet whose throughput is measured: requests wait, and batches are as large as they become."""


@dataclass(frozen=True, slots=True)
class Options:
    """What all scenarios share."""

    subject: Subject
    engines: int
    gateways: int
    seconds: float
    load: float
    seed: int = 0


def _setting(options: Options, trace: str) -> tuple[Setting, list[Session]]:
    shape = SHAPES[trace]
    names = adapter_names(shape, options.engines)
    setting = Setting(
        options.subject, options.engines, options.gateways, options.seconds, seed=options.seed, names=names
    )
    return setting, draw(shape, options.subject, options.engines, options.seconds, options.load, options.seed)


def trace(options: Options, name: str) -> dict[str, Any]:
    """A trace against its ideal."""
    setting, sessions = _setting(options, name)
    best = ideal(setting, sessions)
    return {"scenario": "trace", "trace": name} | beside_ideal(setting, simulate(setting, sessions), best)


def scale(options: Options, name: str = "chat", drawn: int = 32) -> dict[str, Any]:
    """Throughput of 1, 2, 4 and more engines, each fleet with as much traffic an engine.

    That is more than engines can do: of less, a fleet of any size answers what it is asked. Small fleets play several
    traces, as what one of them is asked depends on its draw.

    Args:
        drawn: so many engines at least are asked something for each size.
    """
    found: dict[int, float] = {}
    count = 1
    while count <= options.engines:
        gateways = max(1, options.gateways * count // options.engines)
        seeds = range(options.seed, options.seed + max(1, drawn // count))
        each = [replace(options, engines=count, gateways=gateways, load=_MORE_THAN_ALL, seed=seed) for seed in seeds]
        found[count] = sum(throughput(simulate(*_setting(one, name)), options.seconds) for one in each) / len(each)
        count *= 2
    rates = list(found.values())
    if not all(rates):
        raise ValueError(f"no answer ended within {options.seconds:g} s: {found} tokens/s, play the trace for longer")
    return {
        "scenario": "scale",
        "trace": name,
        "load": _MORE_THAN_ALL,
        "output_tokens_per_s": {str(count): round(rate, 1) for count, rate in found.items()},
        "per_doubling": [round(more / less, 3) for less, more in pairwise(rates)],
    }


def load(options: Options, name: str = "chat", loads: Sequence[float] = (0.2, 0.4, 0.6, 0.8, 1.0)) -> dict[str, Any]:
    """Latency against load."""
    rows = []
    for share in loads:
        setting, sessions = _setting(replace(options, load=share), name)
        rows.append({"load": share} | described(setting, simulate(setting, sessions)))
    return {"scenario": "load", "trace": name, "rows": rows}


def failure(options: Options, share: float = 0.1, name: str = "chat") -> dict[str, Any]:
    """A share of the engines is killed in the middle of a trace."""
    setting, sessions = _setting(options, name)
    at = options.seconds / 2
    outcome = simulate(setting, sessions, lambda fleet: [(at, _call(lambda: fleet.kill(share)))])
    killed = sum(not engine.alive for engine in outcome.engines)
    return {"scenario": "failure", "trace": name, "killed": killed} | loss(outcome, at) | described(setting, outcome)


def growth(options: Options, share: float = 0.25, name: str = "chat") -> dict[str, Any]:
    """A share more engines is started in the middle of a trace: cold processes, found by name."""
    at = options.seconds / 2
    options = replace(options, seconds=options.seconds + options.subject.start_seconds + _FOUND_SECONDS)
    setting, sessions = _setting(options, name)
    added = max(1, round(share * options.engines))
    outcome = simulate(setting, sessions, lambda fleet: [(at, _call(lambda: fleet.add(added)))])
    fresh = outcome.engines[options.engines :]
    begun = [engine.first_step - outcome.began - at for engine in fresh if engine.first_step is not None]
    return {
        "scenario": "growth",
        "trace": name,
        "added": added,
        "start_s": options.subject.start_seconds,
        "until_first_step_s": {"p50": round(percentile(begun, 0.5), 2), "last": round(max(begun, default=0.0), 2)},
        "that_worked": len(begun),
        "first_token_p99_s": round(percentile(first_tokens(outcome), 0.99), 4),
    } | {"lost": sum(bool(one.error) for one in outcome.answers)}


def spread(options: Options, links: Sequence[float] = (12.5e9, 25e9, 50e9, 100e9)) -> dict[str, Any]:
    """Seconds until every engine that has an adapter answers with a new version of it.

    ``rows``: of an adapter that every engine has, by the store's link. ``popular``: of the one asked for most in the
    trace of adapters, a tenth of which get nine tenths of the traffic, by the engines that have it then.
    """
    setting, sessions = _setting(options, "chat")
    common = [replace(session, adapter=_COMMON) for session in sessions]
    rows = []
    for link in links:
        linked = replace(setting, subject=replace(setting.subject, store_link=link), names=[_COMMON])
        rows.append({"store_bytes_per_s": link} | _spread(linked, common, _COMMON, everywhere=True))
    setting, sessions = _setting(options, "adapters")
    popular, _ = Counter(session.adapter for session in sessions).most_common(1)[0]
    return {
        "scenario": "spread",
        "adapter_bytes": options.subject.adapter_bytes,
        "rows": rows,
        "popular": {"store_bytes_per_s": setting.subject.store_link}
        | _spread(setting, sessions, popular, everywhere=False),
    }


def _spread(setting: Setting, sessions: Sequence[Session], name: str, *, everywhere: bool) -> dict[str, Any]:
    """Publishes a new version of an adapter in the middle of a trace.

    Args:
        everywhere: all engines have the adapter from the beginning.
    """
    only_errors()

    async def main() -> dict[str, Any]:
        fleet = Fleet(setting.subject, setting.engines, setting.gateways, names=setting.names)
        store, adapters = fleet.store, [engine.adapters for engine in fleet.all if engine.adapters is not None]
        assert store is not None
        if everywhere:
            for one in adapters:
                one.preload(name)
        flips: list[float] = []

        async def publish() -> None:
            had = [one for one in adapters if one.has(name)]
            began = asyncio.get_running_loop().time()
            version = store.publish(name)
            await asyncio.sleep(_SPREAD_SECONDS)
            flips.extend(one.flipped.get(version, float("inf")) - began for one in had)

        player = Player(fleet.pools, GATEWAY_SECONDS)
        outcome = await played(
            fleet, sessions, setting.seconds, lambda _fleet: [(setting.seconds / 2, publish)], player
        )
        return {
            "engines_with_it": len(flips),
            "everywhere_s": round(max(flips), 3),
            "p50_s": round(percentile(flips, 0.5), 3),
            "failed": sum(bool(one.error) for one in outcome.answers),
        }

    return clock.run(main(), setting.seed)


def _call(function: Callable[[], object]) -> Callable[[], Any]:
    async def called() -> None:
        function()

    return called
