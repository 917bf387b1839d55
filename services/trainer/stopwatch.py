"""How long the parts of a step take, by the clock of the device that computes them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Seconds by part, turns of the engine in between included. On a GPU they are measured between events on the
    stream, since calls return before the work is done."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[str, torch.Event, torch.Event]] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What the block launches belongs to this part; blocks of one name add up."""
        if self._cuda:
            begin, end = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        began = time.perf_counter()
        yield
        self._add(name, time.perf_counter() - began)

    def seconds(self) -> dict[str, float]:
        """``{name}_seconds`` of each part so far; waits for the device."""
        for name, begin, end in self._events:
            end.synchronize()
            self._add(name, begin.elapsed_time(end) / 1000)
        self._events.clear()
        return dict(self._seconds)

    def _add(self, name: str, seconds: float) -> None:
        key = f"{name}_seconds"
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
