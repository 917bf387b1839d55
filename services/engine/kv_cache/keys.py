"""Keys of the prefix cache: tokens as bytes, cache namespaces, and tiers.

A token is a little-endian uint32, so that comparing and hashing prompts are calls into C.
"""

from __future__ import annotations

import enum
import hashlib
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NewType

Key = NewType("Key", bytes)
"""Key of an entry: KEY_BYTES of BLAKE2b over the key of the entry before it and its tokens."""


class Namespace(bytes):
    """Cache namespace: hash of adapter digest and cache salt. Requests share a prefix only within one; it takes the
    place of the parent's key in the key of a first entry."""

    source: NamespaceSource | None = None
    """Adapter and salt; None where only the hash is known, as in entries that were read from a tier."""


@dataclass(frozen=True, slots=True)
class NamespaceSource:
    """Adapter and salt of a cache namespace."""

    version: str
    """Adapter version; empty for the base."""
    digest: str
    salted: bool


KEY_BYTES = 20


TOKEN_BYTES = 4
"""A token is a little-endian uint32."""


class Tier(enum.Enum):
    """Tier of the offload, fastest first."""

    HOST = "host"
    DISK = "disk"
    STORE = "store"


def namespace_of(adapter_digest: str, cache_salt: str, version: str = "") -> Namespace:
    """Cache namespace of an adapter version and a cache salt; it does not depend on the version's name."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"temper space")
    for part in (adapter_digest.encode(), cache_salt.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    namespace = Namespace(digest.digest())
    namespace.source = NamespaceSource(version, adapter_digest, bool(cache_salt))
    return namespace


_CODE = "I" if array("I").itemsize == TOKEN_BYTES else "L"


def tokens_to_bytes(token_ids: Iterable[int]) -> bytes:
    """Token ids as bytes, TOKEN_BYTES each."""
    tokens = array(_CODE, token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def bytes_to_tokens(tokens: bytes) -> list[int]:
    """The inverse of tokens_to_bytes()."""
    ids = array(_CODE, tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def common_tokens(label: bytes, tokens: bytes, at: int) -> int:
    """Length of the common prefix of ``label`` and of ``tokens`` from token ``at`` on, in tokens."""
    offset = at * TOKEN_BYTES
    most = min(len(label), len(tokens) - offset)
    # Whole labels are compared in place; slices would copy them.
    if tokens.startswith(label, offset) if most == len(label) else label.startswith(tokens[offset:]):
        return most // TOKEN_BYTES
    # Bisection. A comparison ends at the first difference, so all of them together read the label about twice.
    low, high = 0, most // TOKEN_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        begin, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if label[begin:end] == tokens[offset + begin : offset + end]:
            low = middle
        else:
            high = middle
    return low
