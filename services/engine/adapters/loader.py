"""Adapter loader: loads a version from the object store into an adapter slot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry, Manifest
from services.common.errors import AdapterRejected
from services.engine.observability.events import AdapterPhaseDone, EventStream

if TYPE_CHECKING:
    from services.engine.models.lora.binding import BoundAdapter
    from services.engine.models.lora.slots import LoraSlots


class AdapterLoader:
    """Loads adapters. Calls block and are thread-safe; one adapter is copied at a time.

    Args:
        bind: reads an adapter's files strictly, but need not check the values, which ``lora`` does; raises
            AdapterRejected that names the tensor or field.
        base_digest: digest of the served checkpoint; adapters of another one are refused.
        events: stream for the phases of each load.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        lora: LoraSlots,
        bind: Callable[[Mapping[str, bytes]], BoundAdapter],
        *,
        base_digest: str,
        events: EventStream | None = None,
    ) -> None:
        self._registry = registry
        self._lora = lora
        self._bind = bind
        self._base_digest = base_digest
        self._events = events or EventStream()
        self._loading = threading.Lock()

    def load(self, version: AdapterVersion, slot: int) -> str:
        """Downloads, verifies and binds a version and writes it into a slot that no request uses.

        Returns:
            The version's digest, for cache keys.

        Raises:
            AdapterRejected: its files are corrupt, do not bind, or belong to another base model.
            ModelNotFound: there is no such version.
            Unavailable: the object store does not answer.
        """
        began = time.monotonic()
        digest, files = self.files(version)
        self._events.emit(AdapterPhaseDone("download", time.monotonic() - began))
        try:
            self.load_files(files, slot)
        except AdapterRejected as error:
            raise AdapterRejected(f"{version}: {error.message}", param=error.param) from error
        return digest

    def check(self, version: AdapterVersion) -> None:
        """Checks that the version exists and belongs to this base model. Raises as load does."""
        self._manifest(version)

    def files(self, version: AdapterVersion) -> tuple[str, Mapping[str, bytes]]:
        """Digest and files of a version, downloaded and verified. Raises as load does, but binds nothing."""
        return self._manifest(version).digest, self._registry.files(version)

    def _manifest(self, version: AdapterVersion) -> Manifest:
        manifest = self._registry.manifest(version)
        if manifest.kind != "adapter":
            raise AdapterRejected(f"{version} is a drafter, which answers nothing: name an adapter")
        if manifest.base_digest and manifest.base_digest != self._base_digest:
            raise AdapterRejected(
                f"{version} belongs to another base model (digest {manifest.base_digest[:12]}, this engine serves "
                f"{self._base_digest[:12]})"
            )
        return manifest

    def load_files(self, files: Mapping[str, bytes], slot: int) -> None:
        """Binds an adapter's files and writes them into a slot that no request uses. Raises AdapterRejected."""
        with self._loading:
            began = time.monotonic()
            bound = self._bind(files)
            ready = time.monotonic()
            self._lora.load(slot, bound)
            done = time.monotonic()
        self._events.emit(AdapterPhaseDone("bind", ready - began))
        self._events.emit(AdapterPhaseDone("upload", done - ready))
