"""Captured steps: one CUDA graph for each shape, without adapters and with them, in one pool of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.engine.executors.cuda.buffers import StepShape
from services.engine.executors.cuda.shapes import smallest
from services.engine.executors.cuda.stream import EngineStream
from services.engine.models.cuda_graphs import capturing, no_collection


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the layers of a step leave."""

    x: Tensor
    """[rows, hidden]."""
    logits: Tensor | None = None
    """[rows, vocab] of all rows; None: the head was not launched with the layers."""


Run = Callable[[StepShape, bool], StepOutput]
"""Launches the layers of a shape, without or with adapters."""


class StepGraphs:
    """Replays what it once captured. Adapter slots, block tables and lengths are read on the device, so nothing that
    happens later needs another capture.

    Args:
        run: launches kernels only: nothing in it may wait for the device.
        beside: graphs whose memory these share, but for the outputs.
    """

    def __init__(self, stream: EngineStream, run: Run, beside: StepGraphs | None = None) -> None:
        self._stream = stream
        self._run = run
        self._pool: Any = None
        if stream.stream is not None:
            self._pool = torch.cuda.graph_pool_handle() if beside is None else beside._pool
        self._graphs: dict[tuple[StepShape, bool], tuple[torch.cuda.CUDAGraph, StepOutput]] = {}
        self._shapes: dict[StepShape, None] = {}
        self.captures = 0
        """Graphs captured since the start."""
        self.replays = 0

    def capture(self, shapes: Iterable[StepShape], *, adapters: bool) -> None:
        """Captures shapes that have run before, so that their kernels are compiled; the largest come first, and the
        others reuse their memory.

        Args:
            adapters: capture the variant with adapters too.
        """
        if self._stream.stream is None:
            raise ValueError("CUDA graphs need a CUDA device")
        with no_collection():
            for shape in shapes:
                for with_adapters in (False, True) if adapters else (False,):
                    graph, out = self._capture(shape, with_adapters)
                    self._graphs[shape, with_adapters] = (graph, out)
                    self.captures += 1
                self._shapes[shape] = None

    def _capture(self, shape: StepShape, adapters: bool) -> tuple[torch.cuda.CUDAGraph, StepOutput]:
        graph = torch.cuda.CUDAGraph()
        with self._stream.active(), capturing(graph, self._pool):
            out = self._run(shape, adapters)
        return graph, out

    def find(self, wanted: StepShape) -> StepShape | None:
        """The captured shape that a step should run in; None: it runs uncaptured."""
        return smallest(self._shapes, wanted)

    def output(self, shape: StepShape, adapters: bool) -> StepOutput:
        """Output of a captured step, for what is captured behind it."""
        return self._graphs[shape, adapters][1]

    def replay(self, shape: StepShape, adapters: bool) -> StepOutput:
        """Queues a captured step. What it returns is valid until the next replay."""
        graph, out = self._graphs[shape, adapters]
        graph.replay()
        self.replays += 1
        return out
