"""/v1/canaries: versions that answer a share of the requests, until a test, a guardrail or a person decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Query

from services.common.adapters.names import NAME_SCHEMA, parse_adapter_version
from services.common.adapters.registry import AdapterRegistry
from services.common.security.api_keys import ANONYMOUS
from services.gateway.api.base.idempotency import Once
from services.gateway.api.base.routing import Routes, provided
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.auth.caller import owner
from services.gateway.auth.route_permissions import ATTACH, TRAIN, Permission
from services.gateway.engines.pool import EnginePool
from services.gateway.inference.canaries import Canaries
from services.gateway.protocol.learning.canaries import (
    CanaryList,
    CanaryObject,
    CanaryPath,
    CanaryRequest,
    DecisionRequest,
)
from services.learning.canaries.beginning import begin_canary
from services.learning.canaries.record import ID_PATTERN, Decision, State
from services.learning.canaries.store import CanaryFilter, CanaryStore

routes = Routes("canaries")
_SEEN_BY = TRAIN | ATTACH


@dataclass(frozen=True, slots=True)
class CanaryServices:
    """Store of canaries, and what they are begun with."""

    store: CanaryStore
    registry: AdapterRegistry
    engines: EnginePool
    canaries: Canaries


Services = Annotated[CanaryServices, provided(CanaryServices)]


@routes.post(
    "/v1/canaries",
    Permission(ATTACH, audited=True, idempotent=True),
    status_code=201,
    response_model=CanaryObject,
)
async def begin(body: CanaryRequest, services: Services, once: Once) -> Any:
    """Has a version answer a share of the requests for its adapter, and for the base model's name if the adapter's
    current version is attached. 409 if it is current, or the adapter has a canary already."""

    async def begin() -> CanaryObject:
        info = services.engines.info
        record = await begin_canary(
            services.store,
            services.registry,
            parse_adapter_version(body.version),
            body.policy,
            owner=owner(),
            base_digest="" if info is None else info.digest,
        )
        return CanaryObject.of(record)

    return await once(begin, body=body)


@routes.get("/v1/canaries", Permission(_SEEN_BY))
async def list_canaries(
    services: Services,
    state: State | None = None,
    adapter: Annotated[str | None, Query(json_schema_extra=dict(NAME_SCHEMA))] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(pattern=ID_PATTERN)] = None,
) -> CanaryList:
    """Canaries, newest first. `after` is the last id of the page before."""
    wanted, unreadable = CanaryFilter(adapter=adapter, state=state), Unreadable(own=True)
    found = await services.store.list(wanted, limit=limit + 1, after=after, pass_over=unreadable)
    data = [CanaryObject.of(one) for one in found[:limit]]
    return CanaryList(data=data, has_more=len(found) > limit, unreadable=unreadable)


@routes.get("/v1/canaries/{canary_id}", Permission(_SEEN_BY))
async def get_canary(canary_id: CanaryPath, services: Services) -> CanaryObject:
    """One canary with all that is known of it."""
    return CanaryObject.of(await services.store.get(canary_id))


@routes.post(
    "/v1/canaries/{canary_id}/decide",
    Permission(ATTACH, audited=True, idempotent=True),
    response_model=CanaryObject,
)
async def decide(canary_id: CanaryPath, body: DecisionRequest, services: Services, once: Once) -> Any:
    """Ends a canary that runs: a rollback holds at once, a promotion is `promoting` for about a second, until the
    pointers have moved. 409 if it was decided otherwise."""

    async def decide() -> CanaryObject:
        record = await services.store.get(canary_id)
        detail = body.reason or "decided by hand"
        by = owner() or ANONYMOUS
        decision = Decision(outcome=body.decision, reason="person", detail=detail, by=by)
        record = await services.store.decide(record, decision)
        if record.ended:
            services.canaries.ended(record)
        return CanaryObject.of(record)

    return await once(decide, body=body)
