"""Multipart forms of uploads: their large parts wait on disk, and a form that does not come to its end is refused."""

from __future__ import annotations

import errno
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from services.common.errors import InvalidRequest, Unavailable

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FIELDS = 8


class _Parser(MultiPartParser):
    """Starlette's, which does not say whether the closing boundary came."""

    ended = False

    def on_end(self) -> None:
        self.ended = True


@asynccontextmanager
async def form_of(
    request: Request, *, parts: str, files: int, stream: AsyncGenerator[bytes, None] | None = None
) -> AsyncIterator[FormData]:
    """The form of an upload, whose large parts wait on disk while the context lasts.

    Args:
        parts: names of the parts, for messages.
        files: most parts that are files.
        stream: the body, where it is not the request's own stream.

    Raises:
        InvalidRequest: the body is no multipart form, malformed, or ends too early.
        Unavailable: that disk is full.
    """
    _check_type(request.headers.get("content-type", ""), parts)
    parser = _Parser(request.headers, stream or request.stream(), max_files=files, max_fields=_FIELDS)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the multipart body is malformed: {error.message}") from error
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise Unavailable(
            f"no room for the upload in the gateway's directory of temporary files ({error.strerror}): free some, or "
            "set TMPDIR to another"
        ) from error
    try:
        if not parser.ended:
            raise InvalidRequest("the multipart body ends before its closing boundary: send all of it")
        yield form
    finally:
        await form.close()


def _check_type(content_type: str, parts: str) -> None:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise InvalidRequest(f"send multipart/form-data with the parts {parts}", param="content-type")
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        raise InvalidRequest(
            f"the charset {charset[:40]!r} of a multipart body is not read: leave it out, all is UTF-8",
            param="content-type",
        )
