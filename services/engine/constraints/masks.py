"""Masks of one step, made together for all of its rows. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.engine.constraints.matcher import ConstraintBroken, OutputMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher


def _no_bits() -> npt.NDArray[np.int32]:
    return np.zeros((0, 0), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of some of the sampled rows of a step; all other rows may take any token."""

    rows: Sequence[int] = ()
    """Indices of the rows among the sampled ones, ascending."""
    bits: npt.NDArray[np.int32] = field(default_factory=_no_bits)
    """[len(rows), words] int32, bit ``t % 32`` of word ``t // 32`` for token ``t``. The next step's masks overwrite the
    buffer."""
    unwanted: Sequence[int] = ()
    """Indices of rows behind draft tokens whose tokens do not count, even if the draft tokens are right: no mask can be
    made for them, or the output ends before."""

    def __post_init__(self) -> None:
        if self.bits.ndim != 2 or len(self.bits) != len(self.rows) or not self.bits.flags.c_contiguous:
            raise ValueError(f"{len(self.rows)} masked rows, masks {self.bits.shape}")


NO_MASKS = RowMasks()
"""Masks of a step whose rows may all take any token."""


@dataclass(frozen=True, slots=True)
class WantedMasks:
    """Masks that one sequence of a step needs."""

    row: int
    """Index of its first row among the sampled ones."""
    matcher: OutputMatcher | None
    """None: the sequence has ended, and no draft token of it counts."""
    drafts: Sequence[int] = ()
    """Draft tokens, each with a row behind it."""

    @property
    def rows(self) -> range:
        return range(self.row, self.row + 1 + len(self.drafts))

    def matchers(self) -> Iterator[OutputMatcher]:
        """Matchers of the first rows: up to a draft token that nothing can follow."""
        matcher = self.matcher
        if matcher is not None:
            yield matcher
        for draft in self.drafts:
            matcher = matcher and matcher.ahead(draft)
            if matcher is None:
                return
            yield matcher


class MaskMaker:
    """Makes masks in a buffer that it reuses. Used by one thread."""

    def __init__(self) -> None:
        self._bits = _no_bits()

    def make(self, wanted: Sequence[WantedMasks]) -> tuple[RowMasks, list[tuple[int, ConstraintBroken]]]:
        """Masks for the next tokens of some matchers.

        Args:
            wanted: by their rows, ascending; all matchers are of one vocabulary.

        Returns:
            Masks of the rows that have one, and the places in ``wanted`` of matchers that failed, whose rows are not
            masked.
        """
        unwanted: set[int] = set()
        masked: list[tuple[int, OutputMatcher, int]] = []
        for place, each in enumerate(wanted):
            known = list(each.matchers())
            masked += [(row, matcher, place) for row, matcher in enumerate(known, each.row) if matcher.masks]
            unwanted.update(each.rows[max(1, len(known)) :])
        if not masked:
            return RowMasks(unwanted=sorted(unwanted)) if unwanted else NO_MASKS, []
        vocabulary = masked[0][1].vocabulary
        bits = self._buffer(len(masked), vocabulary.words)
        computed: list[tuple[LLMatcher, int]] = []
        for at, (_, matcher, _) in enumerate(masked):
            grammar = matcher.begin_mask(bits[at])
            if grammar is not None:
                computed.append((grammar, at))
        vocabulary.fill(computed, bits)
        broken: list[tuple[int, ConstraintBroken]] = []
        for at, (row, matcher, place) in enumerate(masked):
            try:
                matcher.end_mask(bits[at])
            except ConstraintBroken as error:
                bits[at] = -1
                rows = wanted[place].rows
                unwanted.update(rows[max(1, row - rows.start) :])
                if row == rows.start:
                    broken.append((place, error))
        return RowMasks([row for row, _, _ in masked], bits, sorted(unwanted)), broken

    def _buffer(self, rows: int, words: int) -> npt.NDArray[np.int32]:
        if self._bits.shape[1] != words or len(self._bits) < rows:
            self._bits = np.zeros((max(rows, 2 * len(self._bits)), words), dtype=np.int32)
        return self._bits[:rows]
