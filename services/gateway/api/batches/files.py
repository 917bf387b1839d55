"""/v1/files: the input and the results of batches, and what fine-tuning jobs learn from.

An upload goes from the network to a temporary file on disk, within a limit, and from there to the object store."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile

from services.common.errors import InvalidRequest, NewerSchema, NotFound, PayloadTooLarge
from services.common.storage.record_versions import PassOver
from services.gateway.api.base.forms import form_of
from services.gateway.api.base.routing import Routes, multipart
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.api.batches.stores import Batches, BatchServices
from services.gateway.auth.caller import principal_of
from services.gateway.auth.route_permissions import INFERENCE, TRAIN, Permission
from services.gateway.core.file_store import FileInfo, NewFile, Purpose, new_file_id
from services.gateway.protocol.batches import EXPIRY_SECONDS, DeletedFile, ExpiresAfter, FileList, FileObject

_PARTS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
_PURPOSES: Mapping[str, Purpose] = {"batch": "batch", "fine-tune": "fine-tune"}
"""Purposes of uploads."""
_SLACK = 64 * 1024
"""Bytes that a body may have besides the file."""
_BLOCK = 2**20
_MAX_NAME = 255


@dataclass(frozen=True, slots=True)
class Upload:
    """Upload that is to be kept, and expires after ``seconds``."""

    file: UploadFile
    filename: str
    purpose: Purpose
    seconds: int | None

    def content(self) -> Iterator[bytes]:
        """Blocks of the file's bytes. Blocking."""
        self.file.file.seek(0)
        while block := self.file.file.read(_BLOCK):
            yield block


async def _limited(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The body. Raises PayloadTooLarge: the file is over the limit."""
    seen = 0
    async for block in request.stream():
        seen += len(block)
        if seen > limit + _SLACK:
            raise _too_large(limit)
        yield block


def read_upload(form: FormData, limit: int) -> Upload:
    """Upload that a form describes.

    Raises:
        InvalidRequest: a part is missing, unknown, given twice, or has a value that it cannot have.
        PayloadTooLarge: the file is over the limit.
    """
    for key in form:
        if key not in _PARTS:
            raise InvalidRequest(
                f"Unknown part: {key[:80]!r}. An upload has the parts {', '.join(_PARTS)}.", param=key[:80]
            )
        if len(form.getlist(key)) > 1:
            raise InvalidRequest(f"the part {key!r} is given twice", param=key)
    purpose = _text(form, "purpose")
    if purpose is None:
        raise InvalidRequest("Missing part: 'purpose'. It is 'batch' or 'fine-tune'.", param="purpose")
    if purpose not in _PURPOSES:
        raise InvalidRequest(
            f"purpose {purpose[:40]!r} is not supported, only 'batch' and 'fine-tune': images and other attachments "
            "are not read",
            param="purpose",
        )
    seconds = _seconds(_text(form, "expires_after[anchor]"), _text(form, "expires_after[seconds]"))
    file = form.get("file")
    if not isinstance(file, UploadFile):
        problem = "Missing part: 'file'." if file is None else "the part 'file' must be a file"
        raise InvalidRequest(problem, param="file")
    if not file.size:
        raise InvalidRequest("the file is empty", param="file")
    if file.size > limit:
        raise _too_large(limit)
    return Upload(file, clean_name(file.filename or ""), _PURPOSES[purpose], seconds)


def clean_name(name: str) -> str:
    """A file name that is no path and has nothing in it that a terminal or a header could take for a command."""
    base = name.replace("\\", "/").rsplit("/", 1)[-1]
    kept = "".join(char for char in base if unicodedata.category(char)[0] != "C").strip()
    kept = kept.encode(errors="ignore")[:_MAX_NAME].decode(errors="ignore")
    return kept if kept.strip(". ") else "upload.jsonl"


def _text(form: FormData, key: str) -> str | None:
    value = form.get(key)
    if isinstance(value, UploadFile):
        raise InvalidRequest(f"the part {key!r} must be a plain form field, not a file", param=key)
    return value


def _seconds(anchor: str | None, seconds: str | None) -> int | None:
    if anchor is None and seconds is None:
        return None
    number = (
        int(seconds) if seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 12 else None
    )
    try:
        return ExpiresAfter.model_validate({"anchor": anchor, "seconds": number}).seconds
    except ValidationError as error:
        first = error.errors()[0]
        field = f"expires_after[{first['loc'][0]}]"
        raise InvalidRequest(f"{field}: {first['msg']}", param=field) from error


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the file is over the limit of {limit} bytes: split it", param="file")


routes = Routes("files")

_UPLOAD = multipart(
    {
        "file": {"type": "string", "format": "binary", "minLength": 1},
        "purpose": {"type": "string", "enum": [*_PURPOSES]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": EXPIRY_SECONDS[0], "maximum": EXPIRY_SECONDS[1]},
    },
    required=("file", "purpose"),
    together=("expires_after[anchor]", "expires_after[seconds]"),
)


@routes.post("/v1/files", Permission(INFERENCE | TRAIN, upload=True), openapi_extra=_UPLOAD)
async def upload_file(request: Request, stores: Batches) -> FileObject:
    """Keeps a file: JSONL with the purpose "batch", requests for a batch, or "fine-tune", examples to learn from."""
    limit = stores.settings.max_file_bytes
    async with form_of(request, parts="file and purpose", files=1, stream=_limited(request, limit)) as form:
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
    return FileObject.of(info)


@routes.get("/v1/files", Permission(INFERENCE | TRAIN))
async def list_files(
    request: Request,
    stores: Batches,
    purpose: Purpose | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> FileList:
    """Files by time of creation, newest first unless `order` is "asc"; `after` is the last id of the page before."""
    unreadable = Unreadable(own=True)
    found = await stores.threads.run(
        _page, stores, principal_of(request).id, purpose, limit + 1, order == "desc", after, unreadable
    )
    data = [FileObject.of(info) for info in found[:limit]]
    return FileList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(found) > limit,
        unreadable=unreadable,
    )


def _page(
    stores: BatchServices,
    owner: str,
    purpose: Purpose | None,
    limit: int,
    newest_first: bool,
    after: str | None,
    pass_over: PassOver,
) -> list[FileInfo]:
    """Page of an owner's files. Blocking."""
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
        except NewerSchema as error:
            pass_over(file_id, owner, error)
            continue
        if purpose is None or info.purpose == purpose:
            found.append(info)
            if len(found) == limit:
                break
    return found


@routes.get("/v1/files/{file_id}", Permission(INFERENCE | TRAIN))
async def get_file(request: Request, file_id: str, stores: Batches) -> FileObject:
    """What is known of a file."""
    return FileObject.of(await stores.threads.run(stores.files.get, principal_of(request).id, file_id))


@routes.get(
    "/v1/files/{file_id}/content",
    Permission(INFERENCE | TRAIN),
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
    # The first piece is read before the answer begins, so that a missing file has a status of its own.
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


@routes.delete("/v1/files/{file_id}", Permission(INFERENCE | TRAIN))
async def delete_file(request: Request, file_id: str, stores: Batches) -> DeletedFile:
    """Removes a file. A batch that still reads it fails, and keeps what has run."""
    await stores.threads.run(stores.files.delete, principal_of(request).id, file_id)
    return DeletedFile(id=file_id)
