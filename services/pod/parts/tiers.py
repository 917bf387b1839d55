"""Tiers of a pod: offload of the prefix cache below its device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

import structlog

from services.common.errors import InvalidRequest
from services.common.storage.object_store import ObjectStore
from services.common.telemetry.process import machine_bytes
from services.engine.kv_cache.keys import Tier
from services.engine.kv_offload.manager import TierConfig, TierManager
from services.engine.models.config import ModelConfig
from services.engine.observability.events import EventStream
from services.engine.settings import EngineSettings
from services.pod.device import Device
from services.pod.parts.runner import DeviceExecutor

log = structlog.get_logger(__name__)


def cache_identity(settings: EngineSettings, config: ModelConfig, base_digest: str) -> str:
    """Hash of what KV and states depend on beside their own formats: the checkpoint, how its weights are stored, what
    is computed in float8, and a rotation that the checkpoint's digest leaves out."""
    parts: tuple[object, ...] = (base_digest, settings.quantization, settings.speculative, settings.batch_invariant)
    if settings.drafter_form.block:
        parts = (*parts, str(settings.drafter_form))  # its layers have keys and values
    if settings.prefill_float8 != "none":
        parts = (*parts, settings.prefill_float8, settings.prefill_float8_rows)
    if rotation := config.rotation_identity():
        parts = (*parts, rotation)
    return hashlib.blake2b(repr(parts).encode(), digest_size=20).hexdigest()


def build_tiers(
    settings: EngineSettings,
    hardware: Device,
    executor: DeviceExecutor,
    config: ModelConfig,
    base_digest: str,
    events: EventStream,
    wake: Callable[[], None],
    store: ObjectStore | None,
) -> TierManager | None:
    """Tiers that the settings ask for, not started; None: they ask for none, or for no prefix cache.

    Raises:
        InvalidRequest: a directory, or the machine's memory, cannot be used as asked.
    """
    limits = tier_limits(settings, hardware.kind, machine_bytes())
    if limits is None or not settings.prefix_cache:
        return None
    transfer = executor.transfer(cache_identity(settings, config, base_digest))
    transfer.warm_up()
    try:
        tiers = TierManager(transfer, limits, events, wake, store)
    except (OSError, MemoryError, ValueError) as error:
        transfer.close()
        raise InvalidRequest(f"settings: the tiers cannot be made: {error}", param="tiers") from error
    log.info("tiers", host_bytes=limits.host_bytes, tiers=settings.tiers)
    return tiers


_HOST_RATE = {"cuda": 40e9, "cpu": 5e9}
"""First estimate of the bytes a second between host memory and the caches."""


def tier_limits(settings: EngineSettings, device: Literal["cpu", "cuda"], memory: int) -> TierConfig | None:
    """Configuration of the tiers from the settings; None: there are no tiers.

    Args:
        memory: bytes of the machine's memory that this process may use.

    Raises:
        ValueError: the disk tier's directory is not a path.
    """
    tiers = {Tier(name) for name in settings.tiers.split(",") if name}
    if not tiers:
        return None
    return TierConfig(
        host=Tier.HOST in tiers,
        host_bytes=settings.tier_host_memory(device, memory),
        host_rate=_HOST_RATE[device],
        load_seconds=settings.tier_load_seconds,
        disk_dir=settings.tier_directory if Tier.DISK in tiers else None,
        disk_bytes=int(settings.tier_disk_bytes),
        store=Tier.STORE in tiers,
        store_bytes=int(settings.tier_store_bytes),
        store_poll_seconds=settings.tier_store_poll_seconds,
        store_after_uses=settings.tier_store_after_uses,
    )
