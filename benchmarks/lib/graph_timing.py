"""Time of launches inside a CUDA graph: nothing of the host's time is in it."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def graph_times(launches: Sequence[Callable[[], object]], *, repeats: int = 5) -> list[float]:
    """Microseconds of one of the launches, on average, in each of some replays of a graph of all of them.

    Every graph has a pool of its own: torch takes a pool whose graphs are gone for gone. And no torch.cuda.graph(),
    which would collect garbage and empty the cache each time, for a tenth of a second.
    """
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        launches[0]()  # compiled, loaded and, of the vendor's kernels, given its workspace
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for launch in launches:
                launch()
        finally:
            graph.capture_end()
        graph.replay()
        times: list[float] = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / len(launches))
    torch.cuda.synchronize()
    return times
