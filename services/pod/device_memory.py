"""The GPU's memory as this process sees it, for metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


def device_memory(device: torch.device) -> Callable[[], Mapping[str, int]]:
    """A reader of bytes by kind: total (of the card), reserved (by this process' allocator), allocated (of that).

    It asks the allocator's books, not the driver, so a scrape never waits for the device nor disturbs a capture of CUDA
    graphs. What other processes take is in no kind; DCGM's exporter has it.
    """
    if device.type != "cuda":
        return dict
    total = torch.cuda.get_device_properties(device).total_memory

    def read() -> Mapping[str, int]:
        return {
            "total": total,
            "reserved": torch.cuda.memory_reserved(device),
            "allocated": torch.cuda.memory_allocated(device),
        }

    return read
