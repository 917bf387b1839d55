"""Timer of the parts of a step, by the clock of the device that computes them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch

Part: TypeAlias = Literal[
    "swap", "rollout", "score", "replay", "teacher", "reference", "forward", "backward", "optimizer"
]
"""swap: the policy into its slot of the engine. rollout, score: what the engine samples, and its rewards. replay: what
the engine says of given tokens. teacher, reference: forwards of who is learnt from, or held against, with their heads.
forward: all forwards of the policy, with head and loss. backward. optimizer: clipping and update."""


class StepTimer:
    """Seconds by part of one step, turns of the engine in between included.

    On a GPU the parts are measured between events on the stream, since calls return before the work is done; nothing
    waits for the device until the seconds are read.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[Part, torch.Event, torch.Event]] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Context manager that counts what its block launches as this part; blocks of one name add up."""
        if not self._cuda:
            with self.waiting(name):
                yield
            return
        begin, end = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((name, begin, end))

    @contextmanager
    def waiting(self, name: Part) -> Iterator[None]:
        """The same of what others do while this thread waits for it: by the clock of the host."""
        began = time.perf_counter()
        yield
        self._add(name, time.perf_counter() - began)

    def waited(self, name: Part) -> float:
        """Seconds of a part so far, by the clock of the host."""
        return self._seconds.get(f"{name}_seconds", 0.0)

    def seconds(self) -> dict[str, float]:
        """``{name}_seconds`` of each part so far; waits for the device."""
        for name, begin, end in self._events:
            end.synchronize()
            self._add(name, begin.elapsed_time(end) / 1000)
        self._events.clear()
        return dict(self._seconds)

    def _add(self, name: Part, seconds: float) -> None:
        key = f"{name}_seconds"
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
