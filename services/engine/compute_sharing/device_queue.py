"""Streams of a CUDA device as queues of a StreamGate."""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.engine.compute_sharing.device_order import Mark


class CudaMark:
    """Mark on a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def passed(self) -> bool:
        """See Mark."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See Mark."""
        self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """See Mark."""
        if not isinstance(earlier, CudaMark):
            raise TypeError(f"a mark of another kind of device: {type(earlier).__name__}")
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaDeviceQueue:
    """CUDA stream as a DeviceQueue.

    Args:
        stream: returns the stream that the thread's work goes to.
    """

    def __init__(self, stream: Callable[[], torch.cuda.Stream]) -> None:
        self._stream = stream

    def mark(self) -> CudaMark:
        """See DeviceQueue."""
        return CudaMark(self._stream())

    def follow(self, mark: Mark) -> None:
        """See DeviceQueue."""
        if not isinstance(mark, CudaMark):
            raise TypeError(f"a mark of another kind of device: {type(mark).__name__}")
        self._stream().wait_event(mark.event)
