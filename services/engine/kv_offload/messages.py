"""Messages of the offload: entries, commands of the loop thread to the tiers, and their events. No torch.

An entry is the part of a prefix between two state snapshots: the KV blocks from the end of the entry before it to its
own end, and the snapshot there. So a prefix is a chain of entries. The key of each is a hash of all tokens up to its
end, so the same chain has the same keys in every engine of the same model.

The loop thread owns the radix tree, which says what could be reused. The tiers own bytes: they take commands (Save,
Load, and so on) and tell events, in the order in which things happened. Neither waits for the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from services.engine.kv_cache.keys import KEY_BYTES, TOKEN_BYTES, Key, Namespace, Tier

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry: the part of a prefix from ``start`` to ``end``.

    Raises:
        ValueError: the parts contradict each other.
    """

    key: Key
    parent: Key | None
    """Key of the entry that ends where this one begins; None: this one begins at 0."""
    namespace: Namespace
    start: int
    end: int
    tokens: bytes
    """Tokens in [start, end), TOKEN_BYTES each."""
    seconds: float
    """Time to compute the tokens, which a hit saves."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end or len(self.tokens) != TOKEN_BYTES * (self.end - self.start):
            raise ValueError(f"an entry from {self.start} to {self.end} with {len(self.tokens)} bytes of tokens")
        if (self.parent is None) != (self.start == 0) or len(self.namespace) != KEY_BYTES or self.seconds < 0:
            raise ValueError(f"malformed entry from {self.start} to {self.end}")
        if self.key != self.key_of(self.parent, self.namespace, self.tokens):
            raise ValueError("the key of an entry does not match its tokens")

    @staticmethod
    def key_of(parent: Key | None, namespace: Namespace, tokens: bytes) -> Key:
        """Key of an entry with these tokens behind a parent."""
        digest = hashlib.blake2b(namespace if parent is None else parent, digest_size=KEY_BYTES, person=b"temper entry")
        digest.update(tokens)
        return Key(digest.digest())

    @classmethod
    def behind(cls, parent: Entry | None, namespace: Namespace, tokens: bytes, seconds: float) -> Entry:
        """Entry of these tokens behind ``parent``; None: at the beginning."""
        start = 0 if parent is None else parent.end
        key = None if parent is None else parent.key
        end = start + len(tokens) // TOKEN_BYTES
        return cls(cls.key_of(key, namespace, tokens), key, namespace, start, end, tokens, seconds)

    def first_block(self, block_size: int) -> int:
        """Number of the prefix's block that the entry's first token lies in. If that is not the block's first token,
        the block is in this entry and in the one before."""
        return self.start // block_size

    def num_blocks(self, block_size: int) -> int:
        return -(-self.end // block_size) - self.first_block(block_size)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a device's blocks and states; only engines with equal layouts can use each other's entries.

    An entry's payload is its blocks, ``block_bytes`` each (of all layers, in an order of the device's own), then its
    state, ``slot_bytes``.
    """

    fingerprint: str
    """Hash of everything that the bytes depend on: checkpoint, dtypes, block size, format version."""
    block_size: int
    """Tokens of a block."""
    block_bytes: int
    slot_bytes: int

    def payload_bytes(self, entry: Entry) -> int:
        return entry.num_blocks(self.block_size) * self.block_bytes + self.slot_bytes


# Commands, from the loop thread.


@dataclass(frozen=True, slots=True)
class Save:
    """Command to copy an entry from the device to the host and on to lower tiers. The blocks and the slot do not change
    until Released is sent."""

    entry: Entry
    blocks: Sequence[int]
    """Blocks on the device, entry.num_blocks() of them."""
    slot: int


@dataclass(frozen=True, slots=True)
class Part:
    """Part of one entry to load."""

    key: Key
    skip: int
    """Blocks at the beginning of the entry that are not loaded."""
    blocks: Sequence[int]
    """Target blocks on the device for the following ones; further blocks of the entry are not loaded."""
    slot: int = 0
    """Target slot of the state; 0: the state is not loaded."""


@dataclass(frozen=True, slots=True)
class Load:
    """Command to copy entries of one prefix to the device. Nothing else touches the targets until Loaded is sent."""

    load_id: int
    """Number of the load, unique, chosen by the loop thread."""
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Command to give up a load that nobody waits for any more. It ends as soon as nothing writes to its targets. Reads
    that have begun go on, for the tiers that they pass."""

    load_id: int


@dataclass(frozen=True, slots=True)
class Use:
    """Command to count a use of entries of one chain, for the eviction order: they served a hit or were made."""

    keys: Sequence[Key]


@dataclass(frozen=True, slots=True)
class Pin:
    """Command to pin entries until a time of time.monotonic(): they are evicted only when nothing else is left."""

    keys: Sequence[Key]
    until: float


@dataclass(frozen=True, slots=True)
class Persist:
    """Command to copy entries of one chain to every tier, then send Persisted."""

    persist_id: int
    keys: Sequence[Key]


@dataclass(frozen=True, slots=True)
class Forget:
    """Command to remove entries and all their descendants from every tier, the store included."""

    keys: Sequence[Key]


TierCommand: TypeAlias = Save | Load | GiveUp | Use | Pin | Persist | Forget


# Events, to the loop thread.


@dataclass(frozen=True, slots=True)
class Stored:
    """Event: a tier has a copy from now on. It is also sent for entries that were there when the engine started and for
    those that another engine has put into the store, parents first."""

    entry: Entry
    tier: Tier


@dataclass(frozen=True, slots=True)
class Released:
    """Event: a Save has read its blocks and slot, or was given up."""

    key: Key


@dataclass(frozen=True, slots=True)
class Removed:
    """Event: a tier has no copy any more."""

    key: Key
    tier: Tier


@dataclass(frozen=True, slots=True)
class Loaded:
    """Event: a Load has ended; every byte of it was checked."""

    load_id: int
    failed: Sequence[Key] = ()
    """Entries that could not be read or were damaged. If there are any, nothing of the load may be used."""


@dataclass(frozen=True, slots=True)
class Persisted:
    """Event: a Persist has ended."""

    persist_id: int
    missing: Sequence[tuple[Key, Tier]] = ()
    """Copies that could not be made, as (key, tier)."""


TierEvent: TypeAlias = Stored | Released | Removed | Loaded | Persisted


# The device's side.


Fence: TypeAlias = Any
"""Point in the device's queue of steps."""


class CacheTransfer(Protocol):
    """Copies between the caches of a device and host memory. ``fence`` is for the loop thread, the rest for one thread
    of the tiers.

    On the host, the bytes are a payload (see Layout) or blocks of one, given as pieces of memory that follow each
    other; a piece may end anywhere.

    A checksum covers one block or one state (see entry_format.checksum). The device computes it from what it read or
    wrote, so it covers everything that happens to the bytes between a save and a load.
    """

    @property
    def layout(self) -> Layout: ...

    def warm_up(self) -> None:
        """Compiles the kernels before the first request."""
        ...

    def close(self) -> None:
        """Frees the host memory; no copy may be in progress."""
        ...

    def fence(self) -> Fence:
        """Fence behind all steps launched so far."""
        ...

    def host_memory(self, size: int) -> Bytes:
        """[size] bytes of host memory for fast copies (pinned, on a GPU)."""
        ...

    def save(self, blocks: Sequence[int], slot: int, target: Sequence[Bytes], after: Fence) -> Sequence[int]:
        """Copies blocks and a state (slot 0: none) to the host, and waits until that is done.

        Returns:
            The checksum of each block, then that of the state.
        """
        ...

    def load(self, source: Sequence[Bytes], blocks: Sequence[int], slot: int, after: Fence) -> Sequence[int]:
        """Copies blocks and a state (slot 0: none) to the device, and waits until that is done.

        Returns:
            The checksum of each block, then that of the state.
        """
        ...
