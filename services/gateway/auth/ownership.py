"""Ownership: which API key this task works for, and what of other keys it may see or change."""

from __future__ import annotations

from services.common.errors import Forbidden
from services.common.security.api_keys import ANONYMOUS, Scope
from services.gateway.auth.caller import current_caller


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
