"""CUDA graphs that are captured beside other threads that use the device, and the shapes of a training step's.

``torch.cuda.graph()`` is not used: before each capture it waits for the whole device and gives all memory that is free
back to the driver, which a GPU that serves meanwhile would feel at each of some hundred captures.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

ROWS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Numbers of rows that are captured; fewer rows are filled up with a document that no loss looks at."""
_DOCUMENTS = (4, 16, 64, 256)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Graph capture of what the block launches on the current stream, which must not be the default one.

    Args:
        pool: where what is allocated inside lies.
    """
    # Other threads may allocate meanwhile, which a global capture would forbid.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    finally:
        graph.capture_end()


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside, no garbage is collected: what is in a cycle with a graph, an event or page-locked memory would give it
    back in the middle of a capture on this thread, which ends the capture with an error."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def captured_rows(total: int) -> int | None:
    """Rows of the captured step that so many tokens run in; None: more than is captured."""
    return next((rows for rows in ROWS if rows >= total), None)


def captured_shape(lengths: Sequence[int]) -> tuple[int, int] | None:
    """Rows and room for documents of the step that serves these lengths; None: more than is captured."""
    rows = captured_rows(sum(lengths))
    room = next((room for room in _DOCUMENTS if room > len(lengths)), None)
    return None if rows is None or room is None else (rows, room)
