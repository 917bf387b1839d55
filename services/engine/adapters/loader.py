"""Adapter loader: loads a version from the object store into an adapter slot."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from services.common.adapters.composition import Composition, Published
from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry, Manifest
from services.common.errors import AdapterRejected
from services.engine.observability.events import AdapterPhaseDone, EventStream

if TYPE_CHECKING:
    from services.engine.models.lora.binding import BoundAdapter
    from services.engine.models.lora.slots import LoraSlots


class Binder(Protocol):
    """Binder of adapters to the model; services.engine.models.lora.binding has the one of a pod."""

    def bind(self, files: Mapping[str, bytes]) -> BoundAdapter:
        """Reads an adapter's files strictly, but need not check the values, which LoraSlots.load() does.

        Raises:
            AdapterRejected: names the tensor or field.
        """
        ...

    def compose(self, members: Sequence[tuple[str, BoundAdapter, float]]) -> BoundAdapter:
        """Adapter that adds what each member adds, times its scale.

        Args:
            members: name for messages, adapter and scale of each, in the order of their ranks.

        Raises:
            AdapterRejected: a value is not finite, or the ranks are too many.
        """
        ...


class AdapterLoader:
    """Loads adapters. Calls block and are thread-safe; one adapter is copied at a time.

    Args:
        base_digest: digest of the served checkpoint; adapters of another one are refused.
        events: stream for the phases of each load.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        lora: LoraSlots,
        binder: Binder,
        *,
        base_digest: str,
        events: EventStream | None = None,
    ) -> None:
        self._registry = registry
        self._lora = lora
        self._binder = binder
        self._base_digest = base_digest
        self._events = events or EventStream()
        self._loading = threading.Lock()
        self._composed: tuple[Composition, str, BoundAdapter] | None = None
        """Composition that was checked last, until it is loaded: its digest and what is written."""

    def load(self, version: Published, slot: int) -> str:
        """Downloads, verifies and binds a version and writes it into a slot that no request uses. Of a composition it
        writes the members' ranks side by side, in the order of what they are and not of their names.

        Returns:
            The digest, for cache keys.

        Raises:
            AdapterRejected: its files are corrupt, do not bind, or belong to another base model.
            ModelNotFound: there is no such version.
            Unavailable: the object store does not answer.
        """
        if isinstance(version, Composition):
            with self._loading:
                ready = self._composed
                _, digest, bound = ready if ready is not None and ready[0] == version else self._compose(version)
                self._composed = None
                self._write(slot, bound)
            return digest
        began = time.monotonic()
        digest, files = self.files(version)
        self._events.emit(AdapterPhaseDone("download", time.monotonic() - began))
        try:
            self.load_files(files, slot)
        except AdapterRejected as error:
            raise AdapterRejected(f"{version}: {error.message}", param=error.param) from error
        return digest

    def check(self, version: Published) -> None:
        """Checks that the version exists and belongs to this base model; of a composition, that it can be loaded: no
        manifest tells how many ranks it has. Raises as load does."""
        if isinstance(version, Composition):
            with self._loading:
                self._composed = self._compose(version)
        else:
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
            bound = self._binder.bind(files)
            self._events.emit(AdapterPhaseDone("bind", time.monotonic() - began))
            self._write(slot, bound)

    def _compose(self, version: Composition) -> tuple[Composition, str, BoundAdapter]:
        """The composition, its digest and what is written of it."""
        began = time.monotonic()
        found = [self.files(member) for member in version.versions]
        ready = time.monotonic()
        members = sorted(zip(version.members, found, strict=True), key=lambda one: (one[1][0], one[0].scale))
        bound = [(member.ref, self._bind(member.ref, files), member.scale) for member, (_, files) in members]
        composed = self._binder.compose(bound)
        self._events.emit(AdapterPhaseDone("download", ready - began))
        self._events.emit(AdapterPhaseDone("bind", time.monotonic() - ready))
        return version, version.digest([digest for digest, _ in found]), composed

    def _bind(self, name: str, files: Mapping[str, bytes]) -> BoundAdapter:
        try:
            return self._binder.bind(files)
        except AdapterRejected as error:
            raise AdapterRejected(f"{name}: {error.message}", param=error.param) from error

    def _write(self, slot: int, bound: BoundAdapter) -> None:
        began = time.monotonic()
        self._lora.load(slot, bound)
        self._events.emit(AdapterPhaseDone("upload", time.monotonic() - began))
