"""Pinned host memory: mapped by this process, registered with CUDA, so that copies to and from it run beside the steps.

Memory that is unmapped while it is registered leaves its addresses registered, and the next mapping there cannot be
(CUDA error 712). So memory is unregistered before it is unmapped, whoever drops it last.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from services.engine.kv_offload.messages import Bytes


class CudaRuntime:
    """The calls of the CUDA runtime that pinning takes, of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size: int) -> int:
        """Error code of cudaHostRegister; 0: registered."""
        with torch.cuda.device(self._device):
            return int(_cudart().cudaHostRegister(address, size, 0))

    def unregister(self, address: int) -> int:
        """Error code of cudaHostUnregister; 0: no longer registered."""
        with torch.cuda.device(self._device):
            return int(_cudart().cudaHostUnregister(address))

    def clear_error(self) -> None:
        """Takes the error that a failed call leaves behind for this thread; its next kernel launch would raise it.

        torch does not offer cudaGetLastError, but asks for it behind each kernel that it launches.
        """
        with suppress(RuntimeError):
            torch.empty(1, dtype=torch.int32, device=self._device).fill_(1)


class PinnedMemory:
    """Allocator of pinned host memory. Each piece stays pinned until nothing refers to it any more, or until close().

    Pinning takes some 0.4 s a GB: what comes back by keep() is there for the next that asks for as much.

    Args:
        runtime: None where there is no CUDA: memory is mapped and not pinned.
    """

    def __init__(self, runtime: CudaRuntime | None) -> None:
        self._runtime = runtime
        self._pins: list[weakref.finalize[[CudaRuntime, int], Bytes]] = []
        self._lent: dict[int, weakref.ref[Bytes]] = {}
        """Pieces that are in use, by their address."""
        self._kept: dict[int, Bytes] = {}

    def allocate(self, size: int) -> Bytes:
        """[size], of any contents.

        Raises:
            MemoryError: the machine gives or pins no more.
        """
        fitting = [address for address, piece in self._kept.items() if len(piece) >= size]
        if fitting:
            chosen = min(fitting, key=lambda address: len(self._kept[address]))
            piece = self._kept.pop(chosen)
            self._lent[chosen] = weakref.ref(piece)
            return piece[:size]
        memory = mmap.mmap(-1, max(size, 1))
        with suppress(OSError):  # a kernel without huge pages pins small ones, which only takes longer
            memory.madvise(mmap.MADV_HUGEPAGE)
        view = np.frombuffer(memory, dtype=np.uint8, count=size)
        if self._runtime is not None and size:
            # torch's own pinned memory comes in powers of two.
            address = _address(view)
            if error := self._runtime.register(address, size):
                self._runtime.clear_error()
                raise MemoryError(
                    f"cannot pin {size} bytes of host memory (CUDA error {error}): give the host tier less"
                )
            # Of the array, which slices and tensors keep alive: a mapping's own finalizer runs behind the unmapping.
            pin = weakref.finalize(view, _unpin, self._runtime, address)
            pin.atexit = False  # the end of the process unregisters everything
            self._pins = [*(other for other in self._pins if other.alive), pin]
        self._lent = {at: piece for at, piece in self._lent.items() if piece() is not None}
        self._lent[_address(view)] = weakref.ref(view)
        return view

    def keep(self, piece: Bytes) -> None:
        """Keeps a piece that its user has no more use for, whole and pinned."""
        address = _address(piece)
        whole = self._lent.pop(address)()
        if whole is not None:
            self._kept[address] = whole

    def close(self) -> None:
        """Unpins what is still in use, which stays readable; nothing may be on its way."""
        for pin in self._pins:
            pin()
        self._pins.clear()
        self._kept.clear()


def _unpin(runtime: CudaRuntime, address: int) -> None:
    if runtime.unregister(address):
        runtime.clear_error()


def _address(view: Bytes) -> int:
    address: int = view.__array_interface__["data"][0]
    return address


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
