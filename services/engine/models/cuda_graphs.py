"""Capturing CUDA graphs beside other threads that use the device.

``torch.cuda.graph()`` is not used: before each capture it waits for the whole device and gives all memory that is free
back to the driver, which a GPU that serves meanwhile would feel at each of some hundred captures.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
