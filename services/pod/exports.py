"""Where a pod's metrics come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from services.engine.kv_cache.keys import Tier
from services.engine.observability.exports import Sources
from services.engine.observability.status import TierStatus
from services.engine.settings import EngineSettings
from services.pod.engine import Engine


def sources(
    settings: EngineSettings,
    engine: Engine,
    training: Callable[[], bool],
    tiers: Callable[[], Mapping[Tier, TierStatus]] = dict,
) -> Sources:
    """For services.engine.observability.exports.

    Args:
        training: whether a job runs.
        tiers: what is in the tiers below the device; left out: there are none.
    """
    return Sources(
        model_name=settings.served_model_name,
        status=engine.loop.status,
        adapters=engine.adapters.snapshot,
        training=training,
        adapter_slots=settings.adapter_slots,
        memory=engine.memory,
        device_memory=device_memory(engine.model.device),
        training_waited=lambda: engine.gate.training_waited,
        tiers=tiers,
    )


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
