"""Which engine answers: the one that probably has the prompt's prefix or the adapter, unless it has too much to do."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

from services.common.pb import engine_pb2

_PREFIX_TOKENS = 128
_SLACK = 1.25  # how far above the mean an engine may be loaded (consistent hashing with bounded loads, Mirrokni 2016)


def affinity_key(request: engine_pb2.GenerateRequest) -> bytes:
    """Requests with equal keys go to the same engine: those of one named adapter, or of one prompt prefix."""
    if request.adapter.WhichOneof("ref") == "named":
        named = request.adapter.named
        return f"adapter\0{named.name}@{named.version}".encode()
    prefix = request.prompt_token_ids[:_PREFIX_TOKENS]
    return b"prefix\0" + request.cache_salt.encode() + b"\0" + struct.pack(f"<{len(prefix)}I", *prefix)


def _rank(key: bytes, address: str) -> bytes:
    return hashlib.blake2b(key + b"\0" + address.encode(), digest_size=8).digest()


def choose(key: bytes, loads: Mapping[str, int], *, holding: Sequence[str] = ()) -> str:
    """Picks an address by rendezvous hashing under a load cap.

    Args:
        key: from ``affinity_key``.
        loads: requests at each usable engine; at least one engine.
        holding: engines that have the wanted adapter in a slot already; they go first.
    """
    cap = _SLACK * (sum(loads.values()) + 1) / len(loads)
    ranked = sorted(loads, key=lambda address: (address in holding, _rank(key, address)), reverse=True)
    return next((address for address in ranked if loads[address] < cap), min(ranked, key=lambda a: loads[a]))
