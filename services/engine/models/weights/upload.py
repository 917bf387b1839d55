"""Weights and adapters on their way from files to the device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_STAGING_BYTES = 32 * 2**20
"""Size of each of the two staging buffers: large enough for full bandwidth, little enough to allocate at once."""


class Uploader:
    """Copies CPU tensors to a device through two page-locked buffers.

    The CPU fills one buffer (which reads the mapped file and converts the dtype) while the GPU's copy engine empties
    the other, so a load takes the longer of the two and not their sum. Copies are ordered on the current stream: what
    is launched there afterwards sees them.
    """

    def __init__(self, device: torch.device, staging_bytes: int = _STAGING_BYTES) -> None:
        pinned = device.type == "cuda"
        self._buffers = [torch.empty(staging_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._emptied = [torch.cuda.Event() for _ in range(2)] if pinned else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies ``source`` (CPU, any dtype) into ``target`` (contiguous, same number of elements).

        Raises:
            ValueError: the two do not have the same number of elements, or target is not contiguous.
        """
        if source.numel() != target.numel() or not target.is_contiguous():
            raise ValueError(f"cannot copy {tuple(source.shape)} into {tuple(target.shape)}, contiguous and as large")
        numbers, place = source.reshape(-1), target.view(-1)
        step = self._buffers[0].numel() // target.element_size()
        for begin in range(0, numbers.numel(), step):
            part = numbers[begin : begin + step]
            with self._next_buffer() as buffer:
                staging = buffer[: part.numel() * target.element_size()].view(target.dtype)
                staging.copy_(part)
                place[begin : begin + step].copy_(staging, non_blocking=True)

    def gather(self, runs: Iterable[tuple[int, int, int]], target: Tensor) -> None:
        """Copies runs of this process's memory, which together fit into one buffer.

        Beside a thread that serves, for which torch's copies are no good: this gives up the interpreter's lock once a
        run, and takes no other core.

        Args:
            runs: address, place in the target and bytes of each, places ascending.
            target: [bytes] uint8; what lies between runs has any contents afterwards.

        Raises:
            ValueError: a run overlaps the one before, or does not fit.
        """
        with self._next_buffer() as buffer:
            begin, used = buffer.data_ptr(), 0
            for address, place, size in runs:
                if place < used or place + size > buffer.numel():
                    raise ValueError(f"{size} bytes at {place} behind {used} do not fit into {buffer.numel()}")
                ctypes.memmove(begin + place, address, size)
                used = place + size
            target[:used].copy_(buffer[:used], non_blocking=True)

    @contextmanager
    def _next_buffer(self) -> Iterator[Tensor]:
        """Empty, to be filled and copied from."""
        turn = self._turn
        if self._emptied:
            self._emptied[turn].synchronize()  # an event never recorded counts as done
        yield self._buffers[turn]
        if self._emptied:
            self._emptied[turn].record()
        self._turn = 1 - turn

    def finish(self) -> None:
        """Waits until everything has arrived: other streams may use it then."""
        if self._emptied:
            torch.cuda.current_stream().synchronize()
