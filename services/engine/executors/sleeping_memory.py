"""Device memory that an engine gives back while it sleeps, and takes again when it wakes.

An engine that keeps its process also keeps what took long to make: compiled kernels, captured graphs, the vocabulary.
Those have the addresses of weights and caches in them, so these come back at the addresses that they had.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from ctypes import CDLL, c_int, c_size_t, c_void_p, get_errno
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from services.common.shutdown import SleepLevel


class Part(StrEnum):
    """What memory is for."""

    WEIGHTS = "weights"
    """Kept in host memory while it is given back: the model's weights, and the slots of adapters."""
    CACHE = "cache"
    """Forgotten, and zero afterwards: keys, values and recurrent states."""


class SleepingMemory(Protocol):
    """Memory of one engine on its device. Nothing computes with it between give_back() and take_back()."""

    @property
    def levels(self) -> frozenset[SleepLevel]:
        """Levels of sleep that it can give memory back for, with the process kept."""
        ...

    def allocating(self, part: Part) -> AbstractContextManager[object]:
        """Tensors that this thread makes inside, and keeps, are of this part."""
        ...

    def keep_cache(self, tensors: Iterable[Tensor]) -> None:
        """These tensors are all of the cache."""
        ...

    def give_back(self, level: SleepLevel) -> None:
        """Gives back what a level has no use for.

        Raises:
            MemoryError: the host has no room for what is to be kept; nothing was given back.
        """
        ...

    def take_back(self) -> None:
        """Takes all of it again.

        Raises:
            DoesNotFit: somebody else has it now; nothing was taken.
        """
        ...


class FixedMemory:
    """Memory of an engine that cannot be given back for a while: without levels but that of the process.

    Implements SleepingMemory.
    """

    @property
    def levels(self) -> frozenset[SleepLevel]:
        """See SleepingMemory."""
        return frozenset()

    def allocating(self, part: Part) -> AbstractContextManager[object]:  # noqa: ARG002
        """See SleepingMemory."""
        return nullcontext()

    def keep_cache(self, tensors: Iterable[Tensor]) -> None:
        """See SleepingMemory."""

    def give_back(self, level: SleepLevel) -> None:
        """See SleepingMemory. Raises ValueError: it has no such level."""
        raise ValueError(f"memory that stays where it is has no level {level}")

    def take_back(self) -> None:
        """See SleepingMemory."""


class HostPages:
    """Memory of an engine on a CPU: pages of its caches go back to the machine. Weights are where they would be kept.

    Implements SleepingMemory.
    """

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] = ()
        self._libc = CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = (c_void_p, c_size_t, c_int)

    @property
    def levels(self) -> frozenset[SleepLevel]:
        """See SleepingMemory."""
        return frozenset({"cache"})

    def allocating(self, part: Part) -> AbstractContextManager[object]:  # noqa: ARG002
        """See SleepingMemory."""
        return nullcontext()

    def keep_cache(self, tensors: Iterable[Tensor]) -> None:
        """See SleepingMemory."""
        self._tensors = tuple(tensors)

    def give_back(self, level: SleepLevel) -> None:  # noqa: ARG002
        """See SleepingMemory. Whole pages only: what shares one with others is zeroed where it is."""
        for tensor in self._tensors:
            tensor.zero_()
            begin = tensor.data_ptr()
            first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            size = (begin + tensor.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if size > 0 and self._libc.madvise(first, size, mmap.MADV_DONTNEED):
                raise OSError(get_errno(), "madvise")

    def take_back(self) -> None:
        """See SleepingMemory. Pages come back, zeroed, as they are touched."""
