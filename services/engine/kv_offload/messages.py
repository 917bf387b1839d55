"""What is kept below the device's memory, and how the engine's loop and the caches of a device speak of it. No torch.

An entry is what lies between two state snapshots of one history: the KV blocks from the end of the entry before it to
its own end, and the snapshot there. So a history is a chain of entries, each named by a hash of all tokens up to its
end, and the same chain has the same names in every engine of the same model.

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
    """The part of a history from ``start`` to ``end``.

    Raises:
        ValueError: the parts contradict each other.
    """

    key: Key
    parent: Key | None
    """Of the entry that ends where this one begins; None: this one begins at 0."""
    namespace: Namespace
    start: int
    end: int
    tokens: bytes
    """Those in [start, end), TOKEN_BYTES each."""
    seconds: float
    """What computing them took or would take: what a hit saves."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end or len(self.tokens) != TOKEN_BYTES * (self.end - self.start):
            raise ValueError(f"an entry from {self.start} to {self.end} with {len(self.tokens)} bytes of tokens")
        if (self.parent is None) != (self.start == 0) or len(self.namespace) != KEY_BYTES or self.seconds < 0:
            raise ValueError(f"malformed entry from {self.start} to {self.end}")
        if self.key != self.key_of(self.parent, self.namespace, self.tokens):
            raise ValueError("the key of an entry is not that of its tokens")

    @staticmethod
    def key_of(parent: Key | None, namespace: Namespace, tokens: bytes) -> Key:
        """The name of these tokens behind that entry."""
        digest = hashlib.blake2b(namespace if parent is None else parent, digest_size=KEY_BYTES, person=b"temper entry")
        digest.update(tokens)
        return Key(digest.digest())

    @classmethod
    def behind(cls, parent: Entry | None, namespace: Namespace, tokens: bytes, seconds: float) -> Entry:
        """The entry of these tokens behind ``parent``; None: at the beginning."""
        start = 0 if parent is None else parent.end
        key = None if parent is None else parent.key
        end = start + len(tokens) // TOKEN_BYTES
        return cls(cls.key_of(key, namespace, tokens), key, namespace, start, end, tokens, seconds)

    def first_block(self, block_size: int) -> int:
        """The block of the history that its first token lies in. If that is not the block's first token, the block is
        in this entry and in the one before."""
        return self.start // block_size

    def num_blocks(self, block_size: int) -> int:
        return -(-self.end // block_size) - self.first_block(block_size)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a device keeps blocks and states; only engines with equal layouts can use each other's entries.

    An entry's payload is its blocks, ``block_bytes`` each (of all layers, in an order of the device's own), then its
    state, ``slot_bytes``.
    """

    fingerprint: str
    """Hash of everything that the bytes depend on: checkpoint, dtypes, block size, format version."""
    block_size: int
    """Tokens."""
    block_bytes: int
    slot_bytes: int

    def payload_bytes(self, entry: Entry) -> int:
        return entry.num_blocks(self.block_size) * self.block_bytes + self.slot_bytes


# Jobs: from the loop thread.


@dataclass(frozen=True, slots=True)
class Save:
    """Copy an entry from the device to the host, and from there on down. The blocks and the slot are kept as they are
    until Released is told."""

    entry: Entry
    blocks: Sequence[int]
    """On the device, entry.num_blocks() of them."""
    slot: int


@dataclass(frozen=True, slots=True)
class Part:
    """What is wanted of one entry."""

    key: Key
    skip: int
    """Blocks at its beginning that are not."""
    blocks: Sequence[int]
    """Where the following ones go, on the device; there may be more behind them that are not wanted."""
    slot: int = 0
    """Where its state goes; 0: it is not wanted."""


@dataclass(frozen=True, slots=True)
class Load:
    """Copy entries of one history to the device. Nothing else touches the targets until Loaded is told."""

    load_id: int
    """Chosen by the loop thread, another for each load."""
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nobody waits for this load any more. It ends as soon as nothing writes to its targets; what is being read already
    is, for the tiers on the way."""

    load_id: int


@dataclass(frozen=True, slots=True)
class Use:
    """These entries, one chain, served a hit or were made: for whom to evict first."""

    keys: Sequence[Key]


@dataclass(frozen=True, slots=True)
class Pin:
    """Evict these only when nothing else is left, until a time of time.monotonic()."""

    keys: Sequence[Key]
    until: float


@dataclass(frozen=True, slots=True)
class Persist:
    """Bring these entries, one chain, to every tier that there is, then tell Persisted."""

    persist_id: int
    keys: Sequence[Key]


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove these entries and all behind them from every tier, the store included."""

    keys: Sequence[Key]


TierCommand: TypeAlias = Save | Load | GiveUp | Use | Pin | Persist | Forget


# Events: to the loop thread.


@dataclass(frozen=True, slots=True)
class Stored:
    """A tier has a copy from now on; entries that were there when the engine started, or that another engine has left
    in the store, are told as well, parents first."""

    entry: Entry
    tier: Tier


@dataclass(frozen=True, slots=True)
class Released:
    """A Save has read what it needs, or was given up."""

    key: Key


@dataclass(frozen=True, slots=True)
class Removed:
    """A tier has it no more."""

    key: Key
    tier: Tier


@dataclass(frozen=True, slots=True)
class Loaded:
    """A Load has ended; every byte of it was checked."""

    load_id: int
    failed: Sequence[Key] = ()
    """Entries that could not be read or were damaged; then nothing of the load may be used."""


@dataclass(frozen=True, slots=True)
class Persisted:
    """A Persist has ended."""

    persist_id: int
    missing: Sequence[tuple[Key, Tier]] = ()
    """What could not be brought where."""


TierEvent: TypeAlias = Stored | Released | Removed | Loaded | Persisted


# The device's side.


Fence: TypeAlias = Any
"""A point on the device's queue of steps."""


class CacheTransfer(Protocol):
    """Copies between the caches of a device and host memory. ``fence`` is for the loop thread, the rest for one thread
    of the tiers.

    What it writes to the host and reads from there is a payload (see Layout) or blocks of one, given as pieces of
    memory that follow each other; a piece may end anywhere.

    A checksum is that of one block or one state (see checksums): the device computes it of what it read or wrote, so
    that it covers whatever happens to the bytes between a save and a load.
    """

    @property
    def layout(self) -> Layout: ...

    def warm_up(self) -> None:
        """Compiles what there is to compile, before the first request."""
        ...

    def close(self) -> None:
        """Gives host memory back; nothing may be on its way."""
        ...

    def fence(self) -> Fence:
        """The point behind all steps launched so far."""
        ...

    def host_memory(self, size: int) -> Bytes:
        """[size] bytes of memory from and to which copies are fast (pinned, on a GPU)."""
        ...

    def save(self, blocks: Sequence[int], slot: int, target: Sequence[Bytes], after: Fence) -> Sequence[int]:
        """Copies blocks and a state (slot 0: none) to the host, and waits for that.

        Returns:
            The checksum of each block, then that of the state.
        """
        ...

    def load(self, source: Sequence[Bytes], blocks: Sequence[int], slot: int, after: Fence) -> Sequence[int]:
        """Copies blocks and a state (slot 0: none) to the device, and waits for that.

        Returns:
            The checksum of each block, then that of the state.
        """
        ...
