"""GET /v1/keys: who calls, what an API key may do, and its limits. Keys themselves are not kept anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import Request
from pydantic import BaseModel, ConfigDict

from services.common.security.api_keys import ApiKey, Scope
from services.gateway.api.base.routing import Routes, provided
from services.gateway.auth.api_keys import KeyRing
from services.gateway.auth.caller import Principal, principal_of
from services.gateway.auth.route_permissions import ANY_KEY, Permission
from services.gateway.rate_limits.limits import Limits

routes = Routes("keys")


@dataclass(frozen=True, slots=True)
class KeyServices:
    """Keys of a gateway; None: it has none, and everybody may do everything."""

    ring: KeyRing | None


Keys = Annotated[KeyServices, provided(KeyServices)]


class KeyLimitsObject(BaseModel):
    """Limits that hold for a key, its own or the gateway's defaults; 0: none."""

    requests_per_minute: int
    tokens_per_minute: int
    concurrent_requests: int

    @classmethod
    def of(cls, limits: Limits) -> KeyLimitsObject:
        return cls(
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            concurrent_requests=limits.concurrent_requests,
        )


class KeyObject(BaseModel):
    """What is known of an API key."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["key"] = "key"
    name: str
    scopes: list[Scope]
    limits: KeyLimitsObject
    valid: bool
    """false: it has expired or has been revoked."""
    created_at: datetime | None
    expires_at: datetime | None
    revoked_at: datetime | None

    @classmethod
    def of(cls, entry: ApiKey, principal: Principal) -> KeyObject:
        """Key object of an entry of the key file."""
        return cls(
            id=entry.id,
            name=entry.name,
            scopes=sorted(principal.scopes),
            limits=KeyLimitsObject.of(principal.limits),
            valid=entry.refusal(datetime.now(UTC)) is None,
            created_at=entry.created_at,
            expires_at=entry.expires_at,
            revoked_at=entry.revoked_at,
        )


class KeyList(BaseModel):
    """The caller, and the keys that it may see."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["list"] = "list"
    required: bool
    """false: this gateway has no keys, and every caller may do everything."""
    caller: str | None
    """Id of the key that the request was sent with; null where there are none."""
    scopes: list[Scope]
    """What the caller may do."""
    data: list[KeyObject]
    """The caller's key; every key for an admin."""


@routes.get("/v1/keys", Permission(ANY_KEY))
async def list_keys(request: Request, keys: Keys) -> KeyList:
    """What the caller may do, with the limits of its API key; all keys of this gateway for an admin. `temper keys`
    makes and revokes them."""
    caller = principal_of(request)
    admin = Scope.ADMIN in caller.scopes
    entries = () if keys.ring is None else keys.ring.entries
    return KeyList(
        required=keys.ring is not None,
        caller=None if keys.ring is None else caller.id,
        scopes=sorted(caller.scopes),
        data=[KeyObject.of(entry, principal) for entry, principal in entries if admin or principal.id == caller.id],
    )
