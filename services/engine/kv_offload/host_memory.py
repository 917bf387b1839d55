"""Host memory of the tiers: one buffer, allocated in pages."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from services.engine.kv_cache.block_pool import IntegrityError
from services.engine.kv_offload.messages import Bytes

ALIGNMENT = 4096
"""Alignment of a page, bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Allocated memory for ``size`` bytes: (first page, pages) of each piece, in order."""

    size: int
    pages: tuple[tuple[int, int], ...]


class HostArena:
    """Allocator of a buffer's pages, in as few contiguous pieces as possible, which copies fast. Not thread-safe.

    Args:
        memory: buffer to allocate from; a last part that is shorter than a page is not used.
        unit: bytes of a block, which is better not divided; a page has as many, rounded up.
    """

    def __init__(self, memory: Bytes, unit: int) -> None:
        self._memory = memory
        self._page = -(-unit // ALIGNMENT) * ALIGNMENT
        self._total = len(memory) // self._page
        self._free = [(0, self._total)] if self._total else []
        """(first page, pages) of all free pieces, ascending; no two of them touch."""
        self._free_pages = self._total

    @property
    def limit(self) -> int:
        """Bytes that can be allocated."""
        return self._total * self._page

    @property
    def free(self) -> int:
        """Bytes that are free."""
        return self._free_pages * self._page

    def room(self, size: int) -> int:
        """Bytes that a run of this size takes."""
        return self._pages(size) * self._page

    def take(self, size: int) -> Run | None:
        """Allocates memory for so many bytes; None: less is free."""
        wanted = self._pages(size)
        if wanted > self._free_pages:
            return None
        fitting = [piece for piece in self._free if piece[1] >= wanted]
        # The smallest piece that is large enough; if there is none, the largest ones.
        order = (
            [min(fitting, key=lambda piece: piece[1])] if fitting else sorted(self._free, key=lambda piece: -piece[1])
        )
        taken: list[tuple[int, int]] = []
        left = wanted
        for first, pages in order:
            count = min(left, pages)
            self._free.remove((first, pages))
            if count < pages:
                insort(self._free, (first + count, pages - count))
            taken.append((first, count))
            left -= count
            if not left:
                break
        self._free_pages -= wanted
        return Run(size, tuple(sorted(taken)))

    def give_back(self, run: Run) -> None:
        """Frees a run; raises IntegrityError if a part of it is free already."""
        for first, pages in run.pages:
            self._insert(first, pages)
        self._free_pages += sum(pages for _, pages in run.pages)

    def pieces(self, run: Run, begin: int = 0, end: int | None = None) -> list[Bytes]:
        """Memory of the bytes [begin, end) of a run, in order; without ``end`` up to its end."""
        end = run.size if end is None else end
        if not 0 <= begin <= end <= run.size:
            raise ValueError(f"bytes {begin} to {end} of {run.size}")
        found = []
        place = 0
        for first, pages in run.pages:
            length = pages * self._page
            low, high = max(begin - place, 0), min(end - place, length)
            if low < high:
                found.append(self._memory[first * self._page + low : first * self._page + high])
            place += length
        return found

    def check(self, held: Iterable[Run]) -> None:
        """Compares the free pages with the runs that the holders say they have.

        Raises:
            IntegrityError: a page is leaked, lost or handed out twice.
        """
        owners = bytearray(self._total)
        for first, pages in [piece for run in held for piece in run.pages] + self._free:
            for page in range(first, first + pages):
                owners[page] += 1
        wrong = [page for page, count in enumerate(owners) if count != 1]
        if wrong:
            raise IntegrityError(f"pages {wrong[:8]} of the host memory are free or held other than once")
        if self._free_pages != sum(pages for _, pages in self._free):
            raise IntegrityError(f"{self._free_pages} pages are counted as free, {self._free} are")

    def _pages(self, size: int) -> int:
        return -(-size // self._page)

    def _insert(self, first: int, pages: int) -> None:
        insort(self._free, (first, pages))
        index = self._free.index((first, pages))
        after = self._free[index + 1] if index + 1 < len(self._free) else None
        before = self._free[index - 1] if index else None
        if (after is not None and first + pages > after[0]) or (before is not None and sum(before) > first):
            raise IntegrityError(f"pages {first} to {first + pages} of the host memory are given back twice")
        if after is not None and first + pages == after[0]:
            pages += after[1]
            del self._free[index + 1]
        if before is not None and sum(before) == first:
            first, pages = before[0], pages + before[1]
            del self._free[index]
            index -= 1
        self._free[index] = (first, pages)
