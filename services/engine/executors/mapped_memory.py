"""Mapped memory of a GPU: addresses that stay while the memory behind them comes and goes.

torch's allocator gets segments from here instead of from cudaMalloc, by CUDA's calls for virtual memory: addresses are
reserved once, and physical memory is created and mapped behind them. Source: CUDA Driver API, Virtual Memory
Management.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import structlog
import torch
from torch import Tensor

from services.common.errors import DoesNotFit
from services.common.shutdown import SleepLevel
from services.engine.executors.cuda.pinned_memory import CudaRuntime, PinnedMemory
from services.engine.executors.sleeping_memory import Part
from services.engine.kv_offload.messages import Bytes

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

log = structlog.get_logger(__name__)


class _DriverError(Exception):
    """A call of the driver failed; its code is the message."""


@dataclass(slots=True)
class _Segment:
    """Addresses that torch's allocator was given."""

    address: int
    nbytes: int
    part: Part
    handle: object | None
    """Physical memory behind them; None: it was given back."""
    kept: int | None = None
    """Place of the contents in host memory, bytes."""


class MappedMemory:
    """Memory of an engine on a GPU. Implements SleepingMemory; used by one thread at a time.

    Args:
        device: CUDA device; its context is made now.

    Attributes:
        host: where what is kept waits; others borrow from it while the engine is awake.

    Raises:
        ImportError: the calls of CUDA's driver are not installed.
    """

    def __init__(self, device: torch.device) -> None:
        # It comes with torch for CUDA, and there alone.
        self._driver: Any = import_module("cuda.bindings.driver")
        torch.zeros(1, device=device)
        number = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, number)
        place = self._driver.CUmemLocation()
        place.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = number
        self._kind = self._driver.CUmemAllocationProp()
        self._kind.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = place
        self._access = self._driver.CUmemAccessDesc()
        self._access.location = place
        self._access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._segments: dict[int, _Segment] = {}
        self._part = Part.WEIGHTS
        self._contents: Bytes | None = None
        """Host memory with what is kept of the segments that were given back."""
        self.host = PinnedMemory(CudaRuntime(self._device))
        # Called with the lock of torch's allocator held, by a thread that may not have the interpreter's: no other
        # thread may use the device inside allocating().
        self._calls = _ALLOCATE(self._allocate), _FREE(self._free)
        allocate, free = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in self._calls)
        self._allocator = torch._C._cuda_customAllocator(allocate, free)

    @property
    def levels(self) -> frozenset[SleepLevel]:
        """See SleepingMemory."""
        return frozenset({"cache", "weights"})

    @contextmanager
    def allocating(self, part: Part) -> Iterator[None]:
        """See SleepingMemory. What is freed inside is given back at its end."""
        self._part = part
        pool = torch.cuda.MemPool(self._allocator)
        with torch.cuda.use_mem_pool(pool, self._device):
            yield

    def keep_cache(self, tensors: Iterable[Tensor]) -> None:
        """See SleepingMemory. It is known by where it was allocated."""
        outside = sum(not self._holds(tensor) for tensor in tensors)
        if outside:
            raise ValueError(f"{outside} tensors of the cache are outside of the memory that is given back")

    def give_back(self, level: SleepLevel) -> None:
        """See SleepingMemory."""
        torch.cuda.synchronize(self._device)
        parts = {Part.CACHE} if level == "cache" else set(Part)
        leaving = [one for one in self._segments.values() if one.part in parts]
        places = accumulate((one.nbytes for one in leaving if one.part == Part.WEIGHTS), initial=0)
        *starts, size = places
        self._contents = self.host.allocate(size) if size else None
        for one in leaving:
            if one.part == Part.WEIGHTS:
                one.kept = starts.pop(0)
                self._call("cuMemcpyDtoH", self._host_address(one.kept), one.address, one.nbytes)
            self._unmap(one)
        gc.collect()
        torch.cuda.empty_cache()
        log.info("device memory given back", bytes=sum(one.nbytes for one in leaving), level=level)

    def take_back(self) -> None:
        """See SleepingMemory."""
        away = [one for one in self._segments.values() if one.handle is None]
        for number, one in enumerate(away):
            try:
                one.handle = self._map(one.address, one.nbytes)
            except _DriverError as error:
                for taken in away[:number]:
                    self._unmap(taken)
                free, total = torch.cuda.mem_get_info(self._device)
                raise DoesNotFit(
                    f"the engine needs {sum(each.nbytes for each in away):,} bytes of the device back, and "
                    f"{free:,} of {total:,} are free: stop, or put to sleep, what has them ({error})"
                ) from error
        for one in away:
            if one.kept is None:
                self._call("cuMemsetD8", one.address, 0, one.nbytes)
            else:
                self._call("cuMemcpyHtoD", one.address, self._host_address(one.kept), one.nbytes)
                one.kept = None
        torch.cuda.synchronize(self._device)
        if self._contents is not None:
            self.host.keep(self._contents)
            self._contents = None

    def _host_address(self, place: int) -> int:
        if self._contents is None:
            raise RuntimeError("nothing is kept in host memory")
        return int(self._contents.ctypes.data) + place

    def _holds(self, tensor: Tensor) -> bool:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes()
        return any(one.address <= begin and end <= one.address + one.nbytes for one in self._segments.values())

    def _allocate(self, nbytes: int, device: int, stream: int | None) -> int:  # noqa: ARG002 - as torch calls it
        """Address of a new segment; 0: there is no memory for it, for which torch has an error of its own."""
        try:
            address = int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))
        except _DriverError:
            return 0
        try:
            handle = self._map(address, nbytes)
        except _DriverError:
            self._call("cuMemAddressFree", address, nbytes)
            return 0
        self._segments[address] = _Segment(address, nbytes, self._part, handle)
        return address

    def _free(self, address: int, nbytes: int, device: int, stream: int | None) -> None:  # noqa: ARG002
        one = self._segments.pop(address)
        if one.handle is not None:
            self._unmap(one)
        self._call("cuMemAddressFree", address, nbytes)

    def _map(self, address: int, nbytes: int) -> object:
        """Physical memory, mapped behind the addresses."""
        handle = self._call("cuMemCreate", nbytes, self._kind, 0)
        try:
            self._call("cuMemMap", address, nbytes, 0, handle, 0)
            try:
                self._call("cuMemSetAccess", address, nbytes, [self._access], 1)
            except _DriverError:
                self._call("cuMemUnmap", address, nbytes)
                raise
        except _DriverError:
            self._call("cuMemRelease", handle)
            raise
        return handle

    def _unmap(self, one: _Segment) -> None:
        self._call("cuMemUnmap", one.address, one.nbytes)
        self._call("cuMemRelease", one.handle)
        one.handle = None

    def _call(self, name: str, *arguments: object) -> Any:
        """Result of a call of the driver, if it has any."""
        code, *results = getattr(self._driver, name)(*arguments)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise _DriverError(f"{name}: {code.name}")
        return results[0] if results else None
