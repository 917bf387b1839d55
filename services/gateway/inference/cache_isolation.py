"""Cache isolation: what cached state a caller's requests may share, and whose a session is."""

from __future__ import annotations

import hashlib

from services.common.pb import engine_pb2
from services.gateway.auth.ownership import owner
from services.gateway.settings import CacheScope

_LONGEST_NAME = 256
"""Characters of a session's name, as engines have it."""
_DIGEST_BYTES = 20


def cache_salt(scope: CacheScope, given: str | None) -> str:
    """The salt of the caller's requests, under which engines share cached state.

    No two kinds begin alike, so whatever a client sends is never another kind's, nor the salt of an engine's own work.

    Args:
        scope: "shared": requests of all keys share what has the same ``given``. "key" and "auto": only those of one key
            do; without keys all callers are one.
        given: by the client.
    """
    if scope == "shared" or (scope == "auto" and not owner()):
        return "" if given is None else f"client:{given}"
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"temper salt")
    for part in (owner(), "" if given is None else f"client:{given}"):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return f"key:{digest.hexdigest()}"


def session_of(name: str) -> engine_pb2.SessionRef:
    """The caller's session of this name. One longer than engines take goes by its hash."""
    if len(name) > _LONGEST_NAME:
        name = "sha256-" + hashlib.sha256(name.encode()).hexdigest()
    return engine_pb2.SessionRef(owner=owner(), name=name)
