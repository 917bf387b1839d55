"""The drafter of an engine: a version of a name, which it follows as adapters are followed.

A new version is written over the mtp layer's weights between two steps. Draft tokens that are under way are then
verified as all are, and refused where they are wrong: no output changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import structlog

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry, Manifest, Pointers
from services.common.errors import AdapterRejected, InvalidRequest, NotFound

Stage: TypeAlias = Callable[[Mapping[str, bytes]], Callable[[], None]]
"""Reads a drafter's files and makes ready what the function that it returns writes; raises AdapterRejected."""

log = structlog.get_logger(__name__)


class AtBoundary(Protocol):
    """Runs a function on the loop thread between two steps, and returns once it has. Raises Unavailable."""

    def __call__(self, function: Callable[[], None], /) -> None: ...


class FollowedDrafter:
    """The version that drafts. `refresh` is for the adapter manager's I/O thread; `version` may be read by all.

    Args:
        number: version to stay at; None: the name's current one, whatever it becomes.
        base_digest: digest of the served checkpoint; drafters of another one are refused.
    """

    def __init__(
        self, registry: AdapterRegistry, name: str, number: int | None, stage: Stage, *, base_digest: str
    ) -> None:
        self._registry = registry
        self.name = name
        self._number = number
        self._stage = stage
        self._base_digest = base_digest
        self._tried: str | None = None
        """The manifest's digest that was loaded or refused last; empty: there was no version."""
        self._digest = ""
        """Digest of the version that drafts."""
        self.version: AdapterVersion | None = None
        """Version that drafts; None: the checkpoint's own layer does."""

    def refresh(self, pointers: Pointers, at_boundary: AtBoundary) -> None:
        """Loads the version that is to draft, unless it has been loaded or refused before.

        Raises:
            Unavailable: the object store does not answer, or the loop reaches no boundary; to be tried again.
        """
        number = self._number or pointers.current.get(self.name)
        wanted = None if number is None else AdapterVersion(self.name, number)
        if wanted is not None and wanted == self.version and self._number is not None:
            return
        try:
            manifest = None if wanted is None else self._registry.manifest(wanted)
        except NotFound:
            manifest = None
        seen = "" if manifest is None else manifest.digest
        if manifest is not None and seen == self._digest:
            self.version = manifest.ref  # of equal files
        if seen == self._tried:
            return
        if manifest is None:
            log.warning("there is no such drafter: what drafted goes on", drafter=str(wanted or self.name))
        else:
            self._load(manifest, at_boundary)
        self._tried = seen

    def _load(self, manifest: Manifest, at_boundary: AtBoundary) -> None:
        version = manifest.ref
        try:
            self._check(manifest)
            write = self._stage(self._registry.files(version))
        except (AdapterRejected, InvalidRequest, NotFound) as error:
            log.error("drafter refused, what drafted goes on", version=str(version), reason=error.message)
            return
        at_boundary(write)
        log.info("drafter loaded", version=str(version), before=str(self.version or "the checkpoint's own"))
        self.version, self._digest = version, manifest.digest

    def _check(self, manifest: Manifest) -> None:
        if manifest.kind != "drafter":
            raise AdapterRejected(
                f"{manifest.ref} is an adapter, and TEMPER_DRAFTER names a drafter: requests name adapters"
            )
        if manifest.base_digest != self._base_digest:
            raise AdapterRejected(
                f"{manifest.ref} belongs to another base model (digest {manifest.base_digest[:12]}, this engine serves "
                f"{self._base_digest[:12]})"
            )
