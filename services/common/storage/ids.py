"""Names of things that sort by the time they were made: a ULID in lower case."""

from __future__ import annotations

import hashlib
import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
PATTERN = f"[{_ALPHABET}]{{26}}"
"""Pattern of a ulid, as a regular expression."""


def ulid(milliseconds: int | None = None, low: int | None = None) -> str:
    """26 characters.

    Args:
        milliseconds: Unix time; None: now, to the microsecond, so that what a process makes sorts as it was made.
        low: 80 bits that tell apart what was made in one millisecond; None: random ones.
    """
    if milliseconds is None:
        milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
        low = (nanoseconds // 1000) << 70 | secrets.randbits(70) if low is None else low
    if low is None:
        low = secrets.randbits(80)
    number = (milliseconds & (1 << 48) - 1) << 80 | low
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


def milliseconds_of(name: str) -> int:
    """Unix time that a ulid tells."""
    number = 0
    for character in name:
        number = number << 5 | _ALPHABET.index(character)
    return number >> 80


def ulid_of(text: str, milliseconds: int) -> str:
    """The same one for the same text and time, whoever asks."""
    return ulid(milliseconds, int.from_bytes(hashlib.sha256(text.encode()).digest()[:10]))


def key_of(owner: str) -> str:
    """Name of an owner in keys and objects: whatever an owner is called, it is no path."""
    return hashlib.sha256(owner.encode()).hexdigest()[:32]
