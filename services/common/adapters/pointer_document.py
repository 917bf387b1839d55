"""The document that a pointer is in the object store: the version that it points at, and its newest moves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from services.common.adapters.keys import current_key
from services.common.adapters.manifest import Kind
from services.common.adapters.names import AdapterVersion, parse_adapter_ref
from services.common.storage.record_versions import POINTER

Pointer: TypeAlias = dict[str, Any]
_MOVES = 16
"""Rollbacks and promotions that a pointer remembers."""


@dataclass(frozen=True, slots=True)
class Change:
    """Move of a pointer, as it is told outside."""

    key: str
    """Of the pointer."""
    at: float
    """Unix seconds; later than those before it of the same pointer."""
    type: str
    """"adapter.attached", "adapter.detached" or "adapter.rolled_back"."""
    data: Mapping[str, str | None]


def attaching(version: AdapterVersion | None, pointer: tuple[Pointer, str] | None) -> Pointer:
    """The pointer of what is attached. With its time, so that the same version attached again is another object: who
    has read the one before does not take it for that.

    Args:
        pointer: the one before, as it was read.
    """
    ref = None if version is None else str(version)
    before = {} if pointer is None else pointer[0]
    moves = before.get("moves", [])
    if before.get("adapter") != ref:
        moves = with_move(moves, before.get("adapter"), ref)
    return POINTER.stamped({**before, "adapter": ref, "at": round(time.time(), 6), "moves": moves})


def with_move(moves: Sequence[Pointer], before: object, after: object, **made: str) -> list[Pointer]:
    """Moves with one more, the newest of them all whatever the clocks of two processes say.

    Args:
        made: "by" which canary, or for which "request".
    """
    at = max([time.time(), *(move["at"] + 1e-3 for move in moves[-1:])])
    return [*moves, {"from": before, "to": after, "at": round(at, 3), **made}][-_MOVES:]


def rollback_change(name: str, move: Pointer) -> Change:
    """A move of what is current, as it is told."""
    data = {"adapter": name, "from": f"{name}@{move['from']}", "to": f"{name}@{move['to']}"}
    return Change(current_key(name), move["at"], "adapter.rolled_back", data)


def of_kind(kind: Kind) -> Pointer:
    """What a pointer says of its versions' kind: nothing of adapters, as those of earlier releases."""
    return {} if kind == "adapter" else {"kind": kind}


def kind_of(pointer: Mapping[str, Any]) -> Kind:
    """What the pointer's versions are."""
    return "drafter" if pointer.get("kind") == "drafter" else "adapter"


def newest_of(pointer: Mapping[str, Any]) -> int:
    """Greatest number that has been current; 0: none has."""
    return int(pointer.get("newest", pointer.get("version", 0)))


def parse_attachment(pointer: Mapping[str, Any]) -> AdapterVersion | None:
    """Version that is attached to the base model."""
    ref = pointer.get("adapter")
    if ref is None:
        return None
    name, number = parse_adapter_ref(str(ref))
    return AdapterVersion(name, number) if number is not None else None
