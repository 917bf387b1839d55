"""Adapters of requests: the requested choice, a training job's private version, and the pinned version."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from services.common.adapters.composition import Composition, Published
from services.common.adapters.names import AdapterVersion


@dataclass(frozen=True, slots=True)
class AdapterPin:
    """Pinned adapter version: the immutable weights that answer one request.

    ``slot`` indexes the stacked LoRA buffers (0 is the base: no adapter). ``digest`` is part of every cache key, so
    that KV of one version is never reused for another; the base has the empty digest.
    """

    version: str = ""
    """Adapter version "name@n" or composition "a@3*0.7+b@1", empty for the base."""
    digest: str = ""
    slot: int = 0

    def __post_init__(self) -> None:
        if (self.slot == 0) != (self.version == "") or (self.slot == 0) != (self.digest == ""):
            raise ValueError(f"slot 0 and only slot 0 is the base, got {self!r}")


BASE_PIN = AdapterPin()


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """Adapter that a request asked for: the attached one, the base (neither name nor composition), a name with or
    without a version, or a composition."""

    attached: bool = False
    name: str | None = None
    version: int | None = None
    """Version number; None: the current one."""
    composition: Composition | None = None

    @classmethod
    def of(cls, version: Published) -> AdapterChoice:
        """Choice of one version, or of a composition."""
        if isinstance(version, AdapterVersion):
            return cls(name=version.name, version=version.version)
        single = version.single
        return cls(composition=version) if single is None else cls(name=single.name, version=single.version)

    @property
    def named(self) -> bool:
        """True if it names adapters."""
        return self.name is not None or self.composition is not None

    def __str__(self) -> str:
        """As clients write it; empty: the attached one or the base."""
        if self.composition is not None:
            return str(self.composition)
        if self.name is None:
            return ""
        return self.name if self.version is None else f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class PrivateVersion:
    """Private version: the policy of a training job while it is loaded. Only a holder of this object can request it; no
    name leads to it."""

    digest: str
    """Digest for cache keys; it is not the digest of any files."""

    @classmethod
    def fresh(cls) -> PrivateVersion:
        return cls(f"private:{secrets.token_hex(16)}")

    def __str__(self) -> str:
        # No adapter name has a colon.
        return self.digest
