"""Random adapters from memory, in the place of those of an object store."""

from __future__ import annotations

import threading
import time

import torch

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry, Manifest, Pointers
from services.common.errors import ModelNotFound
from services.common.jobs import LoraSettings
from services.common.storage.record_versions import PassOver
from services.engine.models.config import ModelConfig
from services.engine.models.lora.trainable import LoraParams


class GeneratedAdapters(AdapterRegistry):
    """Adapters "bench-0", "bench-1", … on all linear layers. All have the same random weights: speed does not depend
    on them, and an adapter of a real model is 130 MB. Thread-safe.

    Args:
        count: adapters that exist from the start, as version 1.
    """

    def __init__(self, config: ModelConfig, *, count: int, rank: int) -> None:
        self._files = _random_files(config, rank) if count else {}
        self._lock = threading.Lock()
        self._current = {adapter_name(index): 1 for index in range(count)}

    def bump(self, name: str) -> AdapterVersion:
        """Makes the next version of an adapter, a new one's first, the current one."""
        with self._lock:
            self._current[name] = self._current.get(name, 0) + 1
            return AdapterVersion(name, self._current[name])

    def manifest(self, version: AdapterVersion) -> Manifest:
        if version.version > self._current.get(version.name, 0):
            raise ModelNotFound(f"adapter version {version} does not exist", param="adapter")
        return Manifest(
            name=version.name,
            version=version.version,
            digest=str(version),
            base_digest="",
            files={},
            created_at=time.time(),
        )

    def current(self, name: str) -> AdapterVersion:
        if name not in self._current:
            raise ModelNotFound(f"adapter {name!r} does not exist", param="adapter")
        return AdapterVersion(name, self._current[name])

    def files(self, version: AdapterVersion) -> dict[str, bytes]:
        return self._files

    def attached(self) -> AdapterVersion | None:
        return None

    def pointers(self, pass_over: PassOver | None = None) -> Pointers:
        with self._lock:
            return Pointers(None, dict(self._current), repr(sorted(self._current.items())))


def adapter_name(index: int) -> str:
    return f"bench-{index}"


def _random_files(config: ModelConfig, rank: int) -> dict[str, bytes]:
    params = LoraParams.create(config, LoraSettings(rank=rank, alpha=2.0 * rank))
    generator = torch.Generator().manual_seed(0)
    for target in params.targets.values():
        target.b.data.normal_(std=0.01, generator=generator)
    return params.to_files("benchmark")
