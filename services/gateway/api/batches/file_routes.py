"""/v1/files: the input and the results of batches."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse

from services.common.errors import NotFound
from services.gateway.api.base.routing import Routes, multipart
from services.gateway.api.batches.dependencies import Batches, BatchServices
from services.gateway.api.batches.file_upload import read_upload, receive_form
from services.gateway.auth.caller import principal_of
from services.gateway.auth.route_permissions import INFERENCE, Permission
from services.gateway.core.file_store import FileInfo, NewFile, Purpose, new_file_id
from services.gateway.protocol.batches import EXPIRY_SECONDS
from services.gateway.protocol.files import DeletedFile, FileList, FileObject

routes = Routes("files")

_UPLOAD = multipart(
    {
        "file": {"type": "string", "format": "binary", "minLength": 1},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": EXPIRY_SECONDS[0], "maximum": EXPIRY_SECONDS[1]},
    },
    required=("file", "purpose"),
    together=("expires_after[anchor]", "expires_after[seconds]"),
)


@routes.post("/v1/files", Permission(INFERENCE, upload=True), openapi_extra=_UPLOAD)
async def upload_file(request: Request, stores: Batches) -> FileObject:
    """Keeps a file of requests for a batch: JSONL with the purpose "batch"."""
    limit = stores.settings.max_file_bytes
    form = await receive_form(request, limit)
    try:
        upload = read_upload(form, limit)
        new = NewFile(
            owner=principal_of(request).id,
            id=new_file_id(),
            filename=upload.filename,
            purpose=upload.purpose,
            created_at=int(time.time()),
            seconds=upload.seconds,
        )
        async with stores.file_uploads:
            info = await stores.threads.run(lambda: stores.files.create(new, upload.content()))
    finally:
        await form.close()
    return FileObject.of(info)


@routes.get("/v1/files", Permission(INFERENCE))
async def list_files(
    request: Request,
    stores: Batches,
    purpose: Purpose | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> FileList:
    """Files by time of creation, newest first unless `order` is "asc"; `after` is the last id of the page before."""
    found = await stores.threads.run(
        _page, stores, principal_of(request).id, purpose, limit + 1, order == "desc", after
    )
    data = [FileObject.of(info) for info in found[:limit]]
    return FileList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(found) > limit,
    )


def _page(
    stores: BatchServices, owner: str, purpose: Purpose | None, limit: int, newest_first: bool, after: str | None
) -> list[FileInfo]:
    """Blocking."""
    ids = stores.files.ids(owner)
    if after is not None:
        if after not in ids:
            raise NotFound(f"no such file: {after!r}", param="after")
        place = ids.index(after)
        ids = ids[:place] if newest_first else ids[place + 1 :]
    found: list[FileInfo] = []
    for file_id in reversed(ids) if newest_first else ids:
        try:
            info = stores.files.get(owner, file_id)
        except NotFound:  # deleted or expired since
            continue
        if purpose is None or info.purpose == purpose:
            found.append(info)
            if len(found) == limit:
                break
    return found


@routes.get("/v1/files/{file_id}", Permission(INFERENCE))
async def get_file(request: Request, file_id: str, stores: Batches) -> FileObject:
    """What is known of a file."""
    return FileObject.of(await stores.threads.run(stores.files.get, principal_of(request).id, file_id))


@routes.get(
    "/v1/files/{file_id}/content",
    Permission(INFERENCE),
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def get_content(request: Request, file_id: str, stores: Batches) -> Response:
    """A file's bytes."""
    owner = principal_of(request).id
    info = await stores.threads.run(stores.files.get, owner, file_id)
    return await content_of(stores, owner, info, media_type="application/octet-stream")


async def content_of(stores: BatchServices, owner: str, info: FileInfo, *, media_type: str) -> Response:
    """Streams a file. Raises NotFound: it was deleted meanwhile."""
    # What is not there has its status before the answer begins.
    first = await stores.threads.run(stores.files.piece, owner, info, 0)
    headers = {
        "content-length": str(info.bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(info.filename, safe='')}",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(_content(stores, owner, info, first), media_type=media_type, headers=headers)


async def _content(stores: BatchServices, owner: str, info: FileInfo, first: bytes) -> AsyncGenerator[bytes, None]:
    yield first
    for number in range(1, info.pieces):
        yield await stores.threads.run(stores.files.piece, owner, info, number)


@routes.delete("/v1/files/{file_id}", Permission(INFERENCE))
async def delete_file(request: Request, file_id: str, stores: Batches) -> DeletedFile:
    """Removes a file. A batch that still reads it fails, and keeps what has run."""
    await stores.threads.run(stores.files.delete, principal_of(request).id, file_id)
    return DeletedFile(id=file_id)
