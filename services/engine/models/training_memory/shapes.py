"""Which numbers of rows and documents are captured as CUDA graphs. No torch here: the byte plan asks, too."""

from __future__ import annotations

from collections.abc import Sequence

ROWS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Numbers of rows that are captured; fewer rows are filled up with a document that no loss looks at."""
_DOCUMENTS = (4, 16, 64, 256)


def captured_rows(total: int) -> int | None:
    """Rows of the captured step that so many tokens run in; None: more than is captured."""
    return next((rows for rows in ROWS if rows >= total), None)


def captured_shape(lengths: Sequence[int]) -> tuple[int, int] | None:
    """Rows and room for documents of the step that serves these lengths; None: more than is captured."""
    rows = captured_rows(sum(lengths))
    room = next((room for room in _DOCUMENTS if room > len(lengths)), None)
    return None if rows is None or room is None else (rows, room)
