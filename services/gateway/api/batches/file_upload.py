"""Reading an uploaded file: from the network to a temporary file on disk, within a limit."""

from __future__ import annotations

import unicodedata
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from services.common.errors import InvalidRequest, PayloadTooLarge
from services.gateway.core.file_store import Purpose
from services.gateway.protocol.batches import ExpiresAfter

_PARTS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
_SLACK = 64 * 1024
"""Bytes of a body besides the file."""
_BLOCK = 2**20
_MAX_NAME = 255


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that is to be kept. ``seconds``: after which it expires."""

    file: UploadFile
    filename: str
    purpose: Purpose
    seconds: int | None

    def content(self) -> Iterator[bytes]:
        """The bytes. Blocking."""
        self.file.file.seek(0)
        while block := self.file.file.read(_BLOCK):
            yield block


async def receive_form(request: Request, limit: int) -> FormData:
    """The parts of a request, larger ones on disk.

    Args:
        limit: bytes of a file.

    Raises:
        InvalidRequest: the body is not multipart.
        PayloadTooLarge: it is over the limit.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise InvalidRequest("send multipart/form-data with the parts file and purpose")

    async def limited() -> AsyncGenerator[bytes, None]:
        seen = 0
        async for block in request.stream():
            seen += len(block)
            if seen > limit + _SLACK:
                raise _too_large(limit)
            yield block

    try:
        return await MultiPartParser(request.headers, limited(), max_files=1, max_fields=8).parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the multipart body is malformed: {error.message}") from error


def read_upload(form: FormData, limit: int) -> Upload:
    """What a form asks for.

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
        raise InvalidRequest("Missing part: 'purpose'. It is 'batch'.", param="purpose")
    if purpose != "batch":
        raise InvalidRequest(
            f"purpose {purpose[:40]!r} is not supported, only 'batch': training takes its examples in the request, at "
            "/v1/train, and images and other attachments are not read",
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
    return Upload(file, clean_name(file.filename or ""), "batch", seconds)


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
