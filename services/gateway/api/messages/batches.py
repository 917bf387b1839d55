"""/v1/messages/batches: Anthropic's batches, over the machinery of /v1/batches."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse

from services.common.errors import InvalidRequest, NotFound
from services.gateway.api.base.idempotency import IdempotencyKey
from services.gateway.api.base.routing import Routes
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.api.batches.files import content_of
from services.gateway.api.batches.input_file import LineSplitter, parse_line
from services.gateway.api.batches.results import Unrun, unrun_message
from services.gateway.api.batches.stores import Batches, BatchServices, check_unfinished
from services.gateway.auth.caller import principal_of
from services.gateway.auth.route_permissions import INFERENCE, Permission
from services.gateway.core.batch_queue import MESSAGES, Batch, BatchSpec, LineError
from services.gateway.core.file_store import FileInfo, NewFile, new_file_id
from services.gateway.protocol.messages.batches import (
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchList,
    MessageBatchRequest,
)
from services.gateway.protocol.messages.response import AnthropicErrorBody


def digest_of(lines: Sequence[bytes]) -> str:
    """SHA-256 of an input file."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
    return digest.hexdigest()


async def write_input(stores: BatchServices, owner: str, file_id: str, lines: Sequence[bytes]) -> None:
    """Writes the input file of a batch. A file that no batch comes to own goes when it expires."""
    new = NewFile(owner, file_id, "requests.jsonl", "batch", int(time.time()), stores.settings.jobs_ttl_seconds)
    async with stores.file_uploads:
        await stores.threads.run(stores.files.create, new, lines)


async def results_without_file(stores: BatchServices, batch: Batch) -> AsyncGenerator[bytes, None]:
    """Results of a batch that ended before any were written. That of each request says why.

    Raises:
        NotFound: its requests are gone as well.
    """
    owner, file_id = batch.spec.file_owner, batch.spec.input_file_id
    info = await stores.threads.run(stores.files.get, owner, file_id)
    first = await stores.threads.run(stores.files.piece, owner, info, 0)
    return _unrun(stores, batch, info, first)


async def _unrun(stores: BatchServices, batch: Batch, info: FileInfo, piece: bytes) -> AsyncGenerator[bytes, None]:
    why = _why(batch)
    splitter = LineSplitter(info.bytes)
    for number in range(info.pieces):
        if number > 0:
            piece = await stores.threads.run(stores.files.piece, batch.spec.file_owner, info, number)
        lines = splitter.feed(piece, last=number + 1 == info.pieces)
        told = [unrun_message(parse_line(line, text, MESSAGES).custom_id, why) for line, text in lines]
        yield b"".join(line + b"\n" for line in told)


def _why(batch: Batch) -> Unrun | LineError:
    match batch.status:
        case "expired" | "cancelled" as why:
            return why
    return batch.errors[0] if batch.errors else LineError(code="batch_failed", message="the batch failed")


async def delete_files(stores: BatchServices, batch: Batch) -> None:
    """Removes what is left of a batch's files."""
    for file_id in (batch.spec.input_file_id, batch.output_file_id):
        if file_id is not None:
            with contextlib.suppress(NotFound):
                await stores.threads.run(stores.files.delete, batch.spec.file_owner, file_id)


routes = Routes("batches", errors=AnthropicErrorBody)
_ROUTE = f"{MESSAGES}/batches"
_JSONL = "application/x-jsonl"
_CURSOR = Query(max_length=64)


@routes.post(_ROUTE, Permission(INFERENCE, idempotent=True))
async def create_message_batch(
    request: Request, body: MessageBatchRequest, stores: Batches, idempotency_key: IdempotencyKey = None
) -> MessageBatch:
    """Queues messages. With an Idempotency-Key, sending them again returns the same batch."""
    limit = stores.settings.batch_max_requests
    if len(body.requests) > limit:
        raise InvalidRequest(
            f"requests has {len(body.requests)} entries, and a batch may have {limit}: split it", param="requests"
        )
    owner = principal_of(request).id
    # In a thread: the lines may have megabytes.
    lines = await asyncio.to_thread(lambda: list(body.lines()))
    spec = BatchSpec(
        owner=owner,
        input_file_id=new_file_id(),
        endpoint=MESSAGES,
        output_seconds=stores.settings.jobs_ttl_seconds,  # as long as the batch can be looked at
        requests=len(lines),
        digest=await asyncio.to_thread(digest_of, lines),
    )
    batches = stores.message_batches
    batch = None if idempotency_key is None else await batches.submitted(spec, idempotency_key)
    if batch is None:
        await check_unfinished(stores, owner)
        await write_input(stores, spec.file_owner, spec.input_file_id, lines)
        batch = await batches.submit(spec, idempotency_key=idempotency_key)
    return _shown(request, batch)


@routes.get(_ROUTE, Permission(INFERENCE))
async def list_message_batches(
    request: Request,
    stores: Batches,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    after_id: Annotated[str | None, _CURSOR] = None,
    before_id: Annotated[str | None, _CURSOR] = None,
) -> MessageBatchList:
    """Batches, newest first: from behind `after_id` on, or the last ones that stand before `before_id`."""
    if after_id is not None and before_id is not None:
        raise InvalidRequest("after_id and before_id ask for two pages: send one of them", param="before_id")
    owner, unreadable = principal_of(request).id, Unreadable(own=True)
    try:
        found = await stores.message_batches.list(
            owner, limit=limit + 1, after=after_id, before=before_id, pass_over=unreadable
        )
    except NotFound as error:
        error.param = "after_id" if before_id is None else "before_id"
        raise
    # One batch over the limit was asked for, to know whether there is another page: it is on that page's side.
    page = found[:limit] if before_id is None else found[-limit:]
    data = [_shown(request, batch) for batch in page]
    return MessageBatchList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(found) > limit,
        unreadable=unreadable,
    )


@routes.get(f"{_ROUTE}/{{batch_id}}", Permission(INFERENCE))
async def get_message_batch(request: Request, batch_id: str, stores: Batches) -> MessageBatch:
    """One batch."""
    return _shown(request, await stores.message_batches.owned(principal_of(request).id, batch_id))


@routes.delete(f"{_ROUTE}/{{batch_id}}", Permission(INFERENCE))
async def delete_message_batch(request: Request, batch_id: str, stores: Batches) -> DeletedMessageBatch:
    """Forgets a batch that has ended, with its results."""
    owner = principal_of(request).id
    batch = await stores.message_batches.owned(owner, batch_id)
    if batch.ended:
        await delete_files(stores, batch)
    await stores.message_batches.remove(owner, batch_id)
    return DeletedMessageBatch(id=batch_id)


@routes.post(f"{_ROUTE}/{{batch_id}}/cancel", Permission(INFERENCE))
async def cancel_message_batch(request: Request, batch_id: str, stores: Batches) -> MessageBatch:
    """Stops a batch within seconds; what has run by then is among its results."""
    return _shown(request, await stores.message_batches.cancel(principal_of(request).id, batch_id))


@routes.get(
    f"{_ROUTE}/{{batch_id}}/results",
    Permission(INFERENCE),
    response_class=Response,
    responses={200: {"content": {_JSONL: {"schema": {"type": "string"}}}}},
)
async def get_message_batch_results(request: Request, batch_id: str, stores: Batches) -> Response:
    """A line of JSON for each request, in the order in which they ended: `{"custom_id", "result"}`, where the result
    has the type succeeded (with the `message`), errored (with the `error`), canceled or expired."""
    batch = await stores.message_batches.owned(principal_of(request).id, batch_id)
    if not batch.ended:
        raise NotFound(
            f"batch {batch_id} has no results yet: they are there when its processing_status is 'ended'", param="id"
        )
    if batch.output_file_id is None:
        return StreamingResponse(await results_without_file(stores, batch), media_type=_JSONL)
    owner = batch.spec.file_owner
    info = await stores.threads.run(stores.files.get, owner, batch.output_file_id)
    return await content_of(stores, owner, info, media_type=_JSONL)


def _shown(request: Request, batch: Batch) -> MessageBatch:
    url = request.base_url.replace(path=f"{_ROUTE}/{batch.id}/results")
    if request.headers.get("x-forwarded-proto", "").split(",")[0].strip() == "https":
        # A proxy ended TLS. Nothing but this URL depends on the header: a client that made it up gets a useless URL.
        url = url.replace(scheme="https")
    return MessageBatch.of(batch, str(url))
