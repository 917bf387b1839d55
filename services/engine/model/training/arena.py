"""Where training computes on a GPU: its part of the memory plan, taken from the device before anybody needs it.

torch asks the driver for memory as it goes, a call that can hold up every stream of a GPU that serves; and what
training has not taken yet, something else may take. So all of it is taken once, and cut into two pools:

- graphs: what captured steps compute in. Their addresses are theirs for as long as they exist, so nothing else may lie
  there; all captured steps share it, and only one of them at a time is between its forward and its backward.
- rest: everything else that the trainer's thread allocates.

How large the first must be depends on the job: it is cut anew when one begins that does not fit, while nothing else
lives in either.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import structlog
import torch

_SMALL = 2**20
"""Bytes: up to here torch takes memory from pieces of their own, two in each."""
_SMALL_PIECES = 32
_SLACK = _SMALL * _SMALL_PIECES
"""What the pools may grow by before some is given back: more small pieces, round sizes."""

log = structlog.get_logger("trainer")


class GraphMemory:
    """What captured steps share.

    Args:
        pool: where their tensors lie.
        stream: what they are captured on; a pool's memory belongs to a stream.
        apart: entered around captures; inside, this thread allocates from no other pool by itself.
    """

    def __init__(
        self,
        pool: torch.cuda.MemPool,
        stream: torch.cuda.Stream,
        apart: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.pool, self.stream, self.apart = pool, stream, apart
        self.newest = 0
        """Counts the forwards: what was kept for a backward is that of the newest, whichever step it ran in."""

    @classmethod
    def on_demand(cls, device: torch.device) -> GraphMemory:
        """Memory that is taken as steps are captured, where no plan divides the device."""
        with torch.cuda.device(device):
            return cls(torch.cuda.MemPool(), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class Arena:
    """Implements services.trainer.ledger.WorkingMemory. Used by the trainer's thread.

    Args:
        nbytes: what the memory plan leaves for training.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        if device.type != "cuda" or nbytes < 0:
            raise ValueError(f"an arena of {nbytes} bytes on {device}")
        self._device = device
        self.nbytes = nbytes
        self.graph_bytes = 0
        """Of them, those for captured steps."""
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._inside = ExitStack()
        self._entered = False
        self._graphs: GraphMemory | None = None
        self._rest: torch.cuda.MemPool | None = None
        self._cut(0)

    def begin(self, graphs: int, rest: int, *, alone: bool) -> GraphMemory | None:
        """From now on what this thread allocates lies here.

        Args:
            graphs, rest: bytes that an owner needs of each.
            alone: nothing else lives here.

        Returns:
            Where to capture steps; None if ``graphs`` is 0 or more than there is, which somebody else's tensors may be
            the reason for.
        """
        fits = graphs <= self.graph_bytes and rest <= self.nbytes - self.graph_bytes
        if alone and not fits and graphs + rest <= self.nbytes:
            self._leave()
            self._cut(graphs)
        self._enter()
        return self._graphs if 0 < graphs <= self.graph_bytes else None

    def end(self) -> None:
        """Nobody computes any more. What was taken from the device beyond the arena, by a job that needed more than its
        plan said, is given back."""
        if not self._entered:
            return
        self._leave()
        if self.reserved() > self.nbytes + _SLACK:
            self._cut(self.graph_bytes)

    def reserved(self) -> int:
        """Bytes that both pools hold of the device."""
        total = 0
        for pool in [] if self._rest is None or self._graphs is None else [self._rest, self._graphs.pool]:
            for segment in pool.snapshot():  # type: ignore[no-untyped-call]
                total += segment["total_size"]
        return total

    def _enter(self) -> None:
        if not self._entered and self._rest is not None:
            self._inside.enter_context(torch.cuda.use_mem_pool(self._rest, self._device))
            self._entered = True

    def _leave(self) -> None:
        self._inside.close()
        self._entered = False

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """A thread that allocates from two pools takes from whichever it entered first."""
        entered = self._entered
        self._leave()
        try:
            yield
        finally:
            if entered:
                self._enter()

    def _cut(self, graphs: int) -> None:
        if self._graphs is not None and self._rest is not None:
            gc.collect()  # a job that failed may live on in its traceback
            if self._graphs.pool.use_count() > 1 or self._rest.use_count() > 1:
                log.warning("arena.in_use", graphs=self.graph_bytes, wanted=graphs)
                return
            torch.cuda.synchronize(self._device)  # what is given back may still be read
            self._graphs = self._rest = None  # which gives it back
        with torch.cuda.device(self._device):
            rest, pool = torch.cuda.MemPool(), torch.cuda.MemPool()
        self._take(rest, self.nbytes - graphs, torch.cuda.current_stream(self._device))
        self._take(pool, graphs, self._stream)
        self._rest, self._graphs = rest, GraphMemory(pool, self._stream, self._apart)
        self.graph_bytes = graphs

    def _take(self, pool: torch.cuda.MemPool, nbytes: int, stream: torch.cuda.Stream) -> None:
        """One large piece, and some for small tensors, which the pool keeps when they are free again."""
        if nbytes == 0:
            return
        with torch.cuda.use_mem_pool(pool, self._device), torch.cuda.stream(stream):
            pieces = [_SMALL] * _SMALL_PIECES
            if nbytes > sum(pieces):
                pieces.append(nbytes - sum(pieces))
            held = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in pieces]
            del held
