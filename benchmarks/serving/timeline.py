"""Timeline of the GPU while the engine decodes: torch profiler's timeline and the share of it without work."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from benchmarks.lib.cases import Case
    from benchmarks.lib.in_process import InProcessEngine

_WINDOW_SECONDS = 0.25
_SETTLE_SECONDS = 0.2
_NEW_TOKENS = 1024
"""More than the window takes; what is left of them is not waited for."""
_STEP_GAP_US = 10.0
"""Shorter gaps lie between the kernels of one step: launch latency of a graph, not the host."""
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def prepare() -> None:
    """Starts the profiler's machinery once: kernels of CUDA graphs that were captured before it may be missing from a
    timeline."""
    if torch.cuda.is_available():
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
            torch.zeros(1, device="cuda")
            torch.cuda.synchronize()


def profile_decode(engine: InProcessEngine, case: Case, file: Path) -> dict[str, Any]:
    """Decodes a case, profiles a window in which all its requests decode, and writes the timeline.

    Returns:
        idle(), with the file's name; without a GPU only the name.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()

    def window() -> None:
        time.sleep(_SETTLE_SECONDS)
        with profile(activities=activities) as profiler:
            time.sleep(_WINDOW_SECONDS)
        profiler.export_chrome_trace(str(file))

    engine.generate(engine.prompts(case.requests, case.prompt_tokens), _NEW_TOKENS, decoding=window)
    report: dict[str, Any] = {"file": file.name}
    if torch.cuda.is_available():
        report |= idle(_events(file))
    return report


def _events(file: Path) -> list[tuple[str, float, float]]:
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    return [
        (event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in _DEVICE_WORK and "dur" in event
    ]


def idle(events: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Shares of the span from the first to the last work on the GPU.

    Args:
        events: (name, begin, end) of each kernel and copy, in microseconds.

    Returns:
        idle_fraction: nothing ran; host_idle_fraction: of that, gaps too long to lie inside a captured step;
        kernel_us: the largest sums of time by kernel.
    """
    ordered = sorted(events, key=lambda event: event[1])
    if not ordered:
        return {"idle_fraction": None}
    begin, end = ordered[0][1], ordered[0][2]
    gaps: list[float] = []
    by_name: dict[str, list[float]] = {}
    for name, start, stop in ordered:
        if start > end:
            gaps.append(start - end)
        end = max(end, stop)
        by_name.setdefault(name, []).append(stop - start)
    span = end - begin
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:24]
    return {
        "span_us": round(span, 1),
        "idle_fraction": round(sum(gaps) / span, 4),
        "host_idle_fraction": round(sum(gap for gap in gaps if gap > _STEP_GAP_US) / span, 4),
        "longest_gaps_us": [round(gap, 1) for gap in sorted(gaps, reverse=True)[:8]],
        "launches": len(ordered),
        "kernel_us": {
            name[:80]: {"count": len(times), "total": round(sum(times), 1), "mean": round(sum(times) / len(times), 2)}
            for name, times in top
        },
    }
