"""Probe of whether programmatic dependent launch starts kernels early: small kernels that note when they start, when
they go on after their wait, and when they end."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from benchmarks.lib.graph_timing import graph_times

_SPIN = 60_000
"""Nanoseconds that the first kernel takes at least: longer than the host takes to launch the others."""
_AFTER = 5_000
"""And the others behind their wait."""
_REPEATS = 9
_PROGRAMS = 132
_LAUNCHES = 200


@triton.jit
def _node_kernel(times, SPIN: tl.constexpr, TRIGGER: tl.constexpr, WAIT: tl.constexpr):
    """times [3, programs]: start, behind the wait, end; in nanoseconds of the device's clock."""
    begin = globaltimer()
    if TRIGGER == "first":
        gdc_launch_dependents()
    if WAIT:
        gdc_wait()
    waited = globaltimer()
    if TRIGGER == "after":
        gdc_launch_dependents()
    now = globaltimer()
    while now - waited < SPIN:
        now = globaltimer()
    place = times + tl.program_id(0)
    tl.store(place, begin)
    tl.store(place + tl.num_programs(0), waited)
    tl.store(place + 2 * tl.num_programs(0), now)


@dataclass(frozen=True, slots=True)
class Chain:
    """Kernels one after the other; the first waits for nothing."""

    name: str
    triggers: tuple[str, ...]
    """Point at which each lets the next one start: "first", before its wait; "after" it; "never", by ending."""
    programs: int
    pdl: bool = True


CHAINS = (
    Chain("two, ordinary launches", ("first", "never"), 1, pdl=False),
    Chain("two", ("first", "never"), 1),
    Chain("two of 132 programs", ("first", "never"), _PROGRAMS),
    Chain("three, the middle one triggers before its wait", ("first", "first", "never"), 1),
    Chain("three, the middle one triggers after its wait", ("first", "after", "never"), 1),
    Chain("three of 132 programs, before", ("first", "first", "never"), _PROGRAMS),
    Chain("three, the middle one never triggers", ("first", "never", "never"), 1),
)


def launch(chain: Chain, times: Tensor) -> None:
    """times: [kernels, 3, programs] int64."""
    for index, trigger in enumerate(chain.triggers):
        _node_kernel[(chain.programs,)](
            times[index],
            SPIN=_AFTER if index else _SPIN,
            TRIGGER=trigger,
            WAIT=index > 0,
            num_warps=1,
            launch_pdl=chain.pdl,
        )


def launch_nothing(times: Tensor, *, pdl: bool) -> None:
    """A kernel that waits and ends. times: [3, programs] int64."""
    _node_kernel[(times.shape[1],)](times, SPIN=0, TRIGGER="first", WAIT=True, num_warps=1, launch_pdl=pdl)


def compile_all(device: torch.device) -> None:
    """Launches every variant, for benchmarks.lib.precompile."""
    for chain in CHAINS:
        launch(chain, _times(chain, device))
    for pdl in (False, True):
        launch_nothing(_times(CHAINS[0], device)[0], pdl=pdl)


def floor(device: torch.device) -> list[dict[str, object]]:
    """Microseconds of a kernel that does nothing, in a graph of many of them."""
    rows: list[dict[str, object]] = []
    for programs in (1, _PROGRAMS, 8 * _PROGRAMS):
        times = torch.zeros(3, programs, dtype=torch.int64, device=device)
        for pdl in (False, True):
            taken = statistics.median(graph_times([partial(launch_nothing, times, pdl=pdl)] * _LAUNCHES))
            name = f"{_LAUNCHES} that do nothing, of {programs} programs"
            rows.append({"chain": name, "how": "early" if pdl else "ordinary", "us each": round(taken, 3)})
    return rows


def probe(device: torch.device) -> list[dict[str, object]]:
    """For each chain, launched plainly and in a graph: microseconds from the first kernel's end to the start of each
    later one, and to where that went on behind its wait; and of the third from the second's end. Less than 0: before.
    Medians of a few runs."""
    rows: list[dict[str, object]] = []
    for chain in CHAINS:
        times = _times(chain, device)
        graph = torch.cuda.CUDAGraph()
        launch(chain, times)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            graph.capture_begin()
            launch(chain, times)
            graph.capture_end()
        runs: dict[str, Callable[[], None]] = {"launched": lambda c=chain, t=times: launch(c, t), "graph": graph.replay}  # type: ignore[misc]
        for how, run in runs.items():
            figures: list[dict[str, float]] = []
            for _ in range(_REPEATS):
                run()
                torch.cuda.synchronize()
                figures.append(gaps(times.cpu()))
            median = {key: round(statistics.median(f[key] for f in figures), 2) for key in figures[0]}
            rows.append({"chain": chain.name, "how": how, **median})
        del graph
    return rows + floor(device)


def gaps(times: Tensor) -> dict[str, float]:
    """Microseconds between kernels.

    Args:
        times: [kernels, 3, programs] int64 nanoseconds.
    """
    start, waited = times[:, 0].amin(1).tolist(), times[:, 1].amin(1).tolist()
    end = times[:, 2].amax(1).tolist()
    found: dict[str, float] = {}
    for index in range(1, len(times)):
        letter = "ABC"[index]
        found[f"{letter}.start-A.end"] = (start[index] - end[0]) / 1e3
        if index == 1:
            found["B.waited-A.end"] = (waited[1] - end[0]) / 1e3
        else:
            found[f"{letter}.start-B.end"] = (start[index] - end[1]) / 1e3
            found[f"{letter}.waited-B.end"] = (waited[index] - end[1]) / 1e3
    return found


def _times(chain: Chain, device: torch.device) -> Tensor:
    return torch.zeros(len(chain.triggers), 3, chain.programs, dtype=torch.int64, device=device)


def report(rows: list[dict[str, object]]) -> str:
    """Table for people."""
    lines = ["programmatic launch, microseconds (below 0: before)"]
    for row in rows:
        figures = "  ".join(f"{key} {value:+.2f}" for key, value in row.items() if isinstance(value, float))
        lines.append(f"  {row['chain']:<48} {row['how']:<9} {figures}")
    return "\n".join(lines)
