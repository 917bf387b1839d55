"""Pinned host memory over a CUDA runtime of the test's own, which keeps books as the real one does."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from services.engine.executors.cuda.pinned_memory import CudaRuntime, PinnedMemory

PAGE = 4096
ALREADY_REGISTERED, NOT_REGISTERED, OUT_OF_MEMORY = 712, 713, 2


class FakeRuntime(CudaRuntime):
    """Registers addresses, refuses what overlaps, and keeps the last error until it is taken."""

    def __init__(self, room: int = 2**30) -> None:
        super().__init__(torch.device("cuda"))
        self.registered: dict[int, int] = {}
        self.pending = self.unregistrations = 0
        self.room = room

    def register(self, address: int, size: int) -> int:
        assert is_mapped(address)
        if any(at < address + size and address < at + length for at, length in self.registered.items()):
            return self._fails(ALREADY_REGISTERED)
        if size > self.room:
            return self._fails(OUT_OF_MEMORY)
        self.registered[address] = size
        return 0

    def unregister(self, address: int) -> int:
        self.unregistrations += 1
        assert is_mapped(address), "unmapped first: its address may already be somebody else's"
        return 0 if self.registered.pop(address, 0) else self._fails(NOT_REGISTERED)

    def clear_error(self) -> None:
        self.pending = 0

    def _fails(self, error: int) -> int:
        self.pending = error
        return error


def is_mapped(address: int) -> bool:
    spans = (line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(last, 16) for first, last in spans)


def test_memory_is_zeros_and_registered() -> None:
    runtime = FakeRuntime()
    memory = PinnedMemory(runtime).allocate(3 * PAGE + 5)
    assert memory.shape == (3 * PAGE + 5,)
    assert not memory.any()
    memory[:] = 7
    assert runtime.registered == {memory.__array_interface__["data"][0]: 3 * PAGE + 5}


def test_dropped_memory_is_unregistered_before_it_is_unmapped() -> None:
    """Without close(): in a hundred turns some addresses come again."""
    runtime = FakeRuntime()
    pinned = PinnedMemory(runtime)
    for _ in range(100):
        memory = pinned.allocate(2 * PAGE)
        assert len(runtime.registered) == 1
        del memory
        assert not runtime.registered
    assert runtime.unregistrations == 100
    assert len(pinned._pins) == 1


def test_an_allocator_in_a_circle_of_garbage_leaves_nothing_registered() -> None:
    class Owner:
        def __init__(self, runtime: CudaRuntime) -> None:
            self.pinned = PinnedMemory(runtime)
            self.memory = self.pinned.allocate(PAGE)
            self.itself = self

    runtime = FakeRuntime()
    Owner(runtime)
    gc.collect()
    assert not runtime.registered


@pytest.mark.parametrize("kind", ["slice", "words", "tensor", "buffer"])
def test_whatever_refers_to_memory_keeps_it_pinned(kind: str) -> None:
    runtime = FakeRuntime()
    memory = PinnedMemory(runtime).allocate(4 * PAGE)
    kept: object = {
        "slice": memory[PAGE:][16:32],
        "words": memory[8:].view(np.int64),
        "tensor": torch.from_numpy(memory[PAGE:]),
        "buffer": memoryview(memory)[PAGE:],
    }[kind]
    del memory
    gc.collect()
    assert len(runtime.registered) == 1
    del kept
    gc.collect()
    assert not runtime.registered


def test_what_is_kept_is_there_for_the_next_that_asks_for_as_much() -> None:
    runtime = FakeRuntime()
    pinned = PinnedMemory(runtime)
    first, other = pinned.allocate(4 * PAGE), pinned.allocate(8 * PAGE)
    first[:] = 7
    begin = first.ctypes.data
    pinned.keep(first[: 2 * PAGE])
    del first
    gc.collect()
    assert len(runtime.registered) == 2
    again = pinned.allocate(3 * PAGE)
    assert (again.ctypes.data, len(again), int(again[0])) == (begin, 3 * PAGE, 7)
    assert pinned.allocate(4 * PAGE).ctypes.data != begin, "it is in use"
    pinned.keep(again)
    pinned.keep(other)
    assert pinned.allocate(4 * PAGE).ctypes.data == begin, "the smallest that is large enough"
    del again, other
    pinned.close()
    assert not runtime.registered


def test_close_unregisters_what_is_in_use_and_only_once() -> None:
    runtime = FakeRuntime()
    pinned = PinnedMemory(runtime)
    memory = [pinned.allocate(PAGE) for _ in range(3)]
    memory[0][:] = 9
    pinned.close()
    assert not runtime.registered
    assert (memory[0] == 9).all()
    pinned.close()
    memory.clear()
    assert (runtime.unregistrations, runtime.pending) == (3, 0)


def test_memory_that_cannot_be_pinned_leaves_no_error_behind() -> None:
    runtime = FakeRuntime(room=4 * PAGE)
    pinned = PinnedMemory(runtime)
    with pytest.raises(MemoryError, match=rf"cannot pin {8 * PAGE} bytes of host memory \(CUDA error 2\)"):
        pinned.allocate(8 * PAGE)
    assert (runtime.pending, runtime.registered) == (0, {})
    memory = pinned.allocate(4 * PAGE)
    assert len(runtime.registered) == 1
    del memory
    assert (runtime.unregistrations, runtime.registered) == (1, {})


def test_a_failed_unregistration_leaves_no_error_behind() -> None:
    runtime = FakeRuntime()
    pinned = PinnedMemory(runtime)
    memory = pinned.allocate(PAGE)
    runtime.registered.clear()
    del memory
    assert (runtime.unregistrations, runtime.pending) == (1, 0)


def test_nothing_is_registered_without_cuda_or_without_bytes() -> None:
    runtime = FakeRuntime()
    assert PinnedMemory(runtime).allocate(0).shape == (0,)
    assert runtime.registered == {}
    assert PinnedMemory(None).allocate(10).shape == (10,)
