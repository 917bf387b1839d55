"""Bytes of a response, a block at a time."""

from __future__ import annotations

from collections.abc import Iterator

import urllib3

from services.model_source.errors import broken

_BLOCK = 1 << 20


def blocks(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Blocks of at most 1 MiB, as they came over the wire.

    Raises:
        SourceBroken: the connection ended before its Content-Length, or fell silent.
    """
    try:
        yield from response.stream(_BLOCK, decode_content=False)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise broken(error) from error
