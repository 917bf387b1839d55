"""A second stream of the device for kernels that need nothing of those launched after them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A side stream: its work runs while the current stream goes on. ``launching`` begins it, ``join`` waits for it.

    Also while the current stream is captured: the graph then has two branches. What is launched must not allocate, and
    the tensors that it uses must live until the join: the allocator knows of the current stream only. Kernels on either
    side of a fork or a join are launched the ordinary way (kernels.gpu.launch.programmatic speaks of one stream).

    On the CPU, where Triton's interpreter runs kernels as they are launched, there is no second stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # Of the priority that the engine's own stream has.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._begun = False

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Side stream: launches inside run behind everything that is queued now, and beside what is queued later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._begun = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Join: what is queued from now on runs behind the side stream's work."""
        if self._stream is not None and self._begun:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._begun = False
