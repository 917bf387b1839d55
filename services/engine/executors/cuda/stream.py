"""The stream that the whole engine computes on, and how the host hears that a step is done.

On the CPU, where Triton's interpreter runs the same engine for its tests, every call returns when the work is done.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class Arrival:
    """A point on the stream."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        """Returns when everything queued before is done. The thread sleeps: a spinning one would take a core and the
        interpreter lock's attention from the threads that serve."""
        if self._event is not None:
            self._event.synchronize()

    def until(self, later: Arrival) -> float:
        """Seconds of the device from here to a later point, both timed; waits for that."""
        if self._event is None or later._event is None:
            raise ValueError("only points on a device's stream are timed")
        later.wait()
        return float(self._event.elapsed_time(later._event)) / 1e3

    def hold(self, stream: EngineStream) -> None:
        """Makes another stream wait: what is queued to it from now on begins behind this point."""
        if self._event is not None and stream.stream is not None:
            stream.stream.wait_event(self._event)


class EngineStream:
    """A stream: by default one of high priority, so that short decode steps go before a trainer's long kernels."""

    def __init__(self, device: torch.device, *, priority: int = -1) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]

    def active(self) -> AbstractContextManager[object]:
        """Context: what is queued inside goes to this stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def host_buffer(self, words: int) -> Tensor:
        """[words] int32 on the host, from and to which copies are asynchronous."""
        return torch.zeros(words, dtype=torch.int32, pin_memory=self.stream is not None)

    def mark(self, *, timed: bool = False) -> Arrival:
        """Point behind all that is queued now; ``timed``: for Arrival.until()."""
        if self.stream is None:
            return Arrival(None)
        event = torch.cuda.Event(blocking=True, enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return Arrival(event)

    def synchronize(self) -> None:
        """Waits for the device, other streams included: for start-up only."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)
