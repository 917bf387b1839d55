"""What is known of an entry, of its bytes in the arena, and of all copies of a tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from services.engine.kv_cache.eviction import Worth
from services.engine.kv_cache.keys import Key, Tier
from services.engine.kv_offload.host_memory import Run
from services.engine.kv_offload.messages import Entry


class Buffer:
    """Bytes of an entry in the arena: its host copy, or on their way from one place to another."""

    __slots__ = ("checksums", "kept", "origin", "readers", "run", "state", "waiters")

    def __init__(self) -> None:
        self.run: Run | None = None
        self.checksums: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.state: Literal["filling", "ready", "failed"] = "filling"
        self.readers = 1
        """Who reads or writes the bytes; the first one is who fills it."""
        self.kept = False
        """It is the host tier's copy."""
        self.origin: Tier | None = None
        """Where the bytes come from; None: from the device, or from outside."""
        self.waiters: list[Callable[[bool], None]] = []
        """Called, under the lock, when the bytes are there, or are not going to be."""


class Record:
    """An entry that some tier has or is about to have."""

    __slots__ = ("buffer", "children", "claims", "entry", "parent", "persisted", "pinned_until", "tiers", "uses")

    def __init__(self, entry: Entry, parent: Record | None) -> None:
        self.entry = entry
        self.parent = parent
        self.children: set[Record] = set()
        self.tiers: set[Tier] = set()
        """Those that have a copy."""
        self.buffer: Buffer | None = None
        self.claims = 0
        """Jobs that may still make a first copy."""
        self.uses = 0
        """How often it was told that it was made or served a hit."""
        self.pinned_until = 0.0
        self.persisted = False
        """It is to be in every tier."""


class Books:
    """One tier's copies."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        """Bytes of all copies."""
        self.sizes: dict[Key, int] = {}
        self.kids: dict[Key, int] = {}
        """How many copies of the tier stand on this entry."""
        self.worth: Worth[Key] = Worth()
