"""Block tables on the device, so that a step sends only the blocks that are new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.engine.scheduler.step_plan import Chunk

TableEntries = npt.NDArray[np.int32]
"""[n, 2]: place in the flattened tables, block."""
_NONE: TableEntries = np.empty((0, 2), dtype=np.int32)


class TableShadow:
    """The block table of every state slot as the device has it: a list of blocks and how many of them were sent.

    A sequence's list only grows while it holds its slot, and a sequence that gets memory again has a new list (see
    SequenceMemory), so the list's identity says whether the row is still its own.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._lists: list[Sequence[int] | None] = [None] * num_slots
        self._sent = [0] * num_slots

    def entries(self, chunks: Sequence[Chunk]) -> TableEntries:
        """Block table entries that these chunks need and the device does not have; they count as sent from now on."""
        found: list[TableEntries] = []
        for chunk in chunks:
            slot, blocks = chunk.slot, chunk.blocks
            count = len(blocks)
            if self._lists[slot] is not blocks:
                self._lists[slot] = blocks
                self._sent[slot] = 0
            sent = self._sent[slot]
            if count > self._max_blocks:
                raise ValueError(f"{count} blocks of one sequence, its table holds {self._max_blocks}")
            if count > sent:
                fresh = np.empty((count - sent, 2), dtype=np.int32)
                first = slot * self._max_blocks
                fresh[:, 0] = np.arange(first + sent, first + count, dtype=np.int32)
                fresh[:, 1] = blocks[sent:count]
                found.append(fresh)
                self._sent[slot] = count
        return np.concatenate(found) if found else _NONE

    def forget(self) -> None:
        """Forgets what was sent, after a step that may not have reached the device."""
        self._lists = [None] * len(self._lists)
