"""Memory arena of training on a GPU: its part of the memory plan, taken from the device before anybody needs it.

torch asks the driver for memory as it goes, a call that can hold up every stream of a GPU that serves; and what
training has not taken yet, something else may take. So all of it is taken once, in two parts:

- graphs: a pool that captured steps compute in. Their addresses are theirs for as long as they exist, so nothing else
  may lie there; all captured steps share it, and only one of them at a time is between its forward and its backward.
- rest: everything else that the trainer's thread allocates. It lies in torch's own pool, where what one stream has had
  stays that stream's: the trainer's, and none of the engine's.

How large the first must be depends on the job. Both are taken anew when one begins that does not fit, while nothing
else lives here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import structlog
import torch
from torch import Tensor

from services.engine.models.cuda_graphs import capturing, no_collection

_SMALL = 2**20
"""Bytes: up to here torch takes memory from pieces of their own, two in each."""
_SMALL_PIECES = 32

log = structlog.get_logger("trainer")


class GraphMemory:
    """Graph pool of captured steps: its memory is given back when the last of them and this are gone, in any order.

    Args:
        stream: what they are captured on; a pool's memory belongs to a stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        # Not a torch.cuda.MemPool, whose destructor ends the process if a graph outlives it.
        self.id = torch.cuda.graph_pool_handle()
        self.nbytes = 0
        """Taken ahead of what is captured."""
        self.newest = 0
        """Counts the forwards: what was kept for a backward is that of the newest, whichever step it ran in."""
        # Keeps the pool in being. Without any graph in it, torch would give its memory back, and version 2.11 captures
        # into no pool whose graphs are all gone ("use_count > 0").
        self._anchor = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), no_collection(), capturing(self._anchor, self.id):
            torch.zeros(1, device=stream.device)

    @classmethod
    def on_demand(cls, device: torch.device) -> GraphMemory:
        """Memory that is taken as steps are captured, where no plan divides the device."""
        return cls(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Allocations of this thread inside, on the stream of the captures, come from the pool."""
        pool = cast(torch.cuda.MemPool, self)  # of which nothing but the id is asked
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(pool, self.stream.device):
            yield

    def take(self, nbytes: int) -> None:
        """Takes so much more from the device."""
        with self.allocating():
            _touch(nbytes, self.stream.device)
        self.nbytes += nbytes


class Arena:
    """Implements services.trainer.memory.budget.WorkingMemory. Used by the trainer's thread.

    Args:
        nbytes: what the memory plan leaves for training.
        graphs: of them, what captured steps of the usual job need.
    """

    def __init__(self, device: torch.device, nbytes: int, graphs: int = 0) -> None:
        if device.type != "cuda" or not 0 <= graphs <= nbytes:
            raise ValueError(f"an arena of {nbytes} bytes, {graphs} for captured steps, on {device}")
        self._device = device
        self.nbytes = nbytes
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: GraphMemory | None = None
        self._started = False
        self._spoilt = False
        if graphs:
            self._graphs = GraphMemory(self._stream)
            self._graphs.take(graphs)
        self._fill()

    @property
    def graph_bytes(self) -> int:
        """Bytes of the arena that captured steps take."""
        return 0 if self._graphs is None else self._graphs.nbytes

    def start(self) -> None:
        """See WorkingMemory. What libraries keep for a thread and a stream (cuBLAS: its workspaces) they take now, and
        not out of the middle of what is to be given back in one piece."""
        if self._started:
            return
        self._started = True
        whole = self._give_back(self.nbytes - self.graph_bytes)
        for stream in (torch.cuda.current_stream(self._device), self._stream):
            with torch.cuda.stream(stream):
                for dtype in (torch.bfloat16, torch.float32):
                    square = torch.zeros(64, 64, dtype=dtype, device=self._device)
                    torch.addmm(square, square, square)
        if whole:
            self._fill()

    def begin(self, graphs: int, rest: int, *, alone: bool) -> GraphMemory | None:
        """See WorkingMemory. None also if ``graphs`` is more than there is, which somebody else's tensors may be the
        reason for."""
        self.start()
        fits = graphs <= self.graph_bytes and rest <= self.nbytes - self.graph_bytes
        if alone and not fits and graphs + rest <= self.nbytes:
            self._cut(graphs)
        return self._graphs if 0 < graphs <= self.graph_bytes else None

    def rest(self) -> int:
        """See WorkingMemory."""
        return self.nbytes - self.graph_bytes

    def out_of_memory(self) -> None:
        """See WorkingMemory."""
        gc.collect()  # a traceback's frames hold tensors in circles
        torch.cuda.empty_cache()
        self._spoilt = True

    def end(self) -> None:
        """See WorkingMemory. What a shortage gave back to the device is taken again."""
        if self._spoilt:
            self._spoilt = False
            self.out_of_memory()
            self._spoilt = not self._fill()

    def _cut(self, graphs: int) -> None:
        """Anew, in one piece each: what were added to a pool whose memory is free would be found there."""
        self._graphs = None
        if not self._give_back(self.nbytes):
            self._spoilt = True  # until nobody holds any of it
            return
        if graphs:
            self._graphs = GraphMemory(self._stream)
            self._graphs.take(graphs)
        self._fill()

    def _give_back(self, expected: int) -> bool:
        """Gives everything that is free back to the device; False if that is less than ``expected``, which then is not
        taken a second time: the plan has it once."""
        gc.collect()  # a job that failed may live on in its traceback
        torch.cuda.synchronize(self._device)  # what is given back may still be in use
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.empty_cache()
        given = before - torch.cuda.memory_reserved(self._device)
        if given < 0.9 * expected:
            log.warning("arena.not_given_back", expected=expected, given=given)
        return given >= 0.9 * expected

    def _fill(self) -> bool:
        """Takes the rest; False if the device has not so much."""
        try:
            _touch(self.nbytes - self.graph_bytes, self._device)
        except torch.OutOfMemoryError:
            log.warning("arena.not_filled", nbytes=self.nbytes - self.graph_bytes)
            return False
        return True


def _touch(nbytes: int, device: torch.device) -> None:
    """Takes one large piece, and some for small tensors, which torch keeps when they are free again: for the stream and
    the pool that are current."""
    pieces = [_SMALL] * _SMALL_PIECES if nbytes >= _SMALL * _SMALL_PIECES else []
    if nbytes > sum(pieces):
        pieces.append(nbytes - sum(pieces))
    held: list[Tensor] = [torch.empty(size, dtype=torch.uint8, device=device) for size in pieces]
    del held
