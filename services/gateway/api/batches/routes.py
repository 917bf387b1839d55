"""/v1/batches: files of requests that run when there is room."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request

from services.common.errors import InvalidRequest, NotFound
from services.gateway.api.base.idempotency import IdempotencyKey
from services.gateway.api.base.routing import Routes
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.api.batches.stores import Batches, check_unfinished
from services.gateway.auth.caller import principal_of
from services.gateway.auth.route_permissions import INFERENCE, Permission
from services.gateway.protocol.batches import BatchList, BatchObject, BatchRequest

routes = Routes("batches")


@routes.post("/v1/batches", Permission(INFERENCE, idempotent=True))
async def create_batch(
    request: Request, body: BatchRequest, stores: Batches, idempotency_key: IdempotencyKey = None
) -> BatchObject:
    """Queues the requests of a file. With an Idempotency-Key, sending it again returns the same batch."""
    owner = principal_of(request).id
    spec = body.spec(owner)
    batch = None if idempotency_key is None else await stores.batches.submitted(spec, idempotency_key)
    if batch is None:
        try:
            info = await stores.threads.run(stores.files.get, owner, body.input_file_id)
        except NotFound as error:
            error.param = "input_file_id"
            raise
        if info.purpose != "batch":
            raise InvalidRequest(
                f"{info.id} has the purpose {info.purpose!r}: upload the requests with the purpose 'batch'",
                param="input_file_id",
            )
        await check_unfinished(stores, owner)
        batch = await stores.batches.submit(spec, idempotency_key=idempotency_key)
    return BatchObject.of(batch)


@routes.get("/v1/batches", Permission(INFERENCE))
async def list_batches(
    request: Request,
    stores: Batches,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> BatchList:
    """Batches, newest first; `after` is the last id of the page before."""
    owner, unreadable = principal_of(request).id, Unreadable(own=True)
    try:
        found = await stores.batches.list(owner, limit=limit + 1, after=after, pass_over=unreadable)
    except NotFound as error:
        error.param = "after"
        raise
    data = [BatchObject.of(batch) for batch in found[:limit]]
    return BatchList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(found) > limit,
        unreadable=unreadable,
    )


@routes.get("/v1/batches/{batch_id}", Permission(INFERENCE))
async def get_batch(request: Request, batch_id: str, stores: Batches) -> BatchObject:
    """One batch."""
    return BatchObject.of(await stores.batches.owned(principal_of(request).id, batch_id))


@routes.post("/v1/batches/{batch_id}/cancel", Permission(INFERENCE))
async def cancel_batch(request: Request, batch_id: str, stores: Batches) -> BatchObject:
    """Stops a batch within seconds; what has run by then is in its files."""
    return BatchObject.of(await stores.batches.cancel(principal_of(request).id, batch_id))
