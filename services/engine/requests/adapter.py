"""Adapters as requests name them: what was asked for, a training job's private version, and the pinned version."""

from __future__ import annotations

import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterPin:
    """The immutable adapter version that answers one request.

    ``slot`` indexes the stacked LoRA buffers (0 is the base: no adapter). ``digest`` is part of every cache key, so
    that KV of one version is never reused for another; the base has the empty digest.
    """

    version: str = ""
    """"name@n", empty for the base."""
    digest: str = ""
    slot: int = 0

    def __post_init__(self) -> None:
        if (self.slot == 0) != (self.version == "") or (self.slot == 0) != (self.digest == ""):
            raise ValueError(f"slot 0 and only slot 0 is the base, got {self!r}")


BASE_PIN = AdapterPin()


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """What a request asked for: attached, base (name is None) or a name with or without a version."""

    attached: bool = False
    name: str | None = None
    version: int | None = None
    """None: the current one."""


@dataclass(frozen=True, slots=True)
class PrivateVersion:
    """One policy for as long as it is loaded. Whoever holds the object may ask for it; nobody can spell it."""

    digest: str
    """For cache keys; not that of any files."""

    @classmethod
    def fresh(cls) -> PrivateVersion:
        return cls(f"private:{secrets.token_hex(16)}")

    def __str__(self) -> str:
        # No adapter name has a colon.
        return self.digest
