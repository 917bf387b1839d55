"""Who owns what: which jobs a caller sees, whose a session is, and what cached state its requests may share."""

from __future__ import annotations

import hashlib

from services.common.errors import Forbidden
from services.common.pb import engine_pb2
from services.common.security.api_keys import ANONYMOUS, Scope
from services.gateway.auth.caller import current_caller
from services.gateway.settings import CacheScope

_LONGEST_NAME = 256
"""Characters of a session's name, as engines have it."""
_DIGEST_BYTES = 20


def owner() -> str:
    """The id of the API key that this task works for; empty where there are no keys."""
    caller = current_caller()
    return "" if caller is None or caller.principal.id == ANONYMOUS else caller.principal.id


def sees(key_id: str | None) -> bool:
    """Whether what an API key has made is the caller's to see: its own, and everybody's for whoever administrates."""
    found = owner()
    return not found or found == key_id or _may(Scope.ADMIN)


def may_attach() -> bool:
    """Whether the caller may change what the base model's name answers."""
    return _may(Scope.ATTACH, Scope.ADMIN)


def check_attach(param: str) -> None:
    """Raises Forbidden unless the caller may attach a version."""
    if not may_attach():
        raise Forbidden(
            f"the API key {owner()} lacks the scope attach or admin, which changing what the base model's name answers "
            f"needs: leave {param} out or false, and call the version by its name",
            param=param,
        )


def _may(*scopes: Scope) -> bool:
    caller = current_caller()
    return caller is None or not caller.principal.scopes.isdisjoint(scopes)


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
