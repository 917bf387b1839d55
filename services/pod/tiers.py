"""The tiers of a pod: what keeps more histories than its device does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import structlog

from services.common.errors import InvalidRequest
from services.common.storage.object_store import ObjectStore
from services.common.telemetry.machine import machine_bytes
from services.engine.kv_offload.config import tier_limits
from services.engine.kv_offload.manager import TierManager
from services.engine.kv_offload.messages import TierObserver
from services.engine.settings import EngineSettings
from services.pod.device import Device
from services.pod.runner import Computer

log = structlog.get_logger(__name__)


def identity(settings: EngineSettings, base_digest: str) -> str:
    """What KV and states depend on beside their own formats: the checkpoint, and how its weights are kept."""
    parts = (base_digest, settings.quantization, settings.speculative, settings.batch_invariant)
    return hashlib.blake2b(repr(parts).encode(), digest_size=20).hexdigest()


def build_tiers(
    settings: EngineSettings,
    hardware: Device,
    computer: Computer,
    base_digest: str,
    observer: TierObserver,
    wake: Callable[[], None],
    store: ObjectStore | None,
) -> TierManager | None:
    """The tiers that the settings ask for, not started; None: they ask for none, or for no prefix cache.

    Raises:
        InvalidRequest: a directory, or the machine's memory, cannot be used as asked.
    """
    limits = tier_limits(settings, hardware.kind, machine_bytes())
    if limits is None or not settings.prefix_cache:
        return None
    transfer = computer.transfer(identity(settings, base_digest))
    transfer.warm_up()
    try:
        tiers = TierManager(transfer, limits, observer, wake, store)
    except (OSError, MemoryError, ValueError) as error:
        transfer.close()
        raise InvalidRequest(f"settings: the tiers cannot be made: {error}", param="tiers") from error
    log.info("tiers", host_bytes=limits.host_bytes, tiers=settings.tiers)
    return tiers
