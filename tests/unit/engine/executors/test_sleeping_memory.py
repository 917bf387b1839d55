"""Memory that an engine gives back while it sleeps: pages of a CPU's caches, and what cannot be given back."""

from __future__ import annotations

import sys

import pytest
import torch

from services.engine.executors.sleeping_memory import FixedMemory, HostPages, Part
from services.pod.device import Device
from services.pod.parts.loaded import sleeping_memory


def test_pages_of_a_cpu_go_back_and_come_zeroed() -> None:
    memory = HostPages()
    with memory.allocating(Part.CACHE):
        large, small = torch.ones(1 << 20), torch.ones(3)
    memory.keep_cache([large, small])
    address = large.data_ptr()
    memory.give_back("cache")
    memory.take_back()
    assert not large.any()
    assert not small.any()
    assert large.data_ptr() == address
    large.fill_(2.0)
    assert float(large.sum()) == 2 << 20
    assert memory.levels == {"cache"}


def test_an_engine_without_the_drivers_calls_starts_and_has_no_level_but_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    memory = sleeping_memory(Device("cuda", "NVIDIA H200", (9, 0), "3.6.0"))
    assert isinstance(memory, FixedMemory)
    assert memory.levels == frozenset()
    with memory.allocating(Part.WEIGHTS):
        weights = torch.ones(3)
    memory.keep_cache([weights])
    with pytest.raises(ValueError, match="no level weights"):
        memory.give_back("weights")
    memory.take_back()
    assert weights.all()
