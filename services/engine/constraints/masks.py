"""Masks of one step, made together for all of its rows. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
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

    def __post_init__(self) -> None:
        if self.bits.ndim != 2 or len(self.bits) != len(self.rows) or not self.bits.flags.c_contiguous:
            raise ValueError(f"{len(self.rows)} masked rows, masks {self.bits.shape}")


NO_MASKS = RowMasks()
"""Masks of a step whose rows may all take any token."""


class MaskMaker:
    """Makes masks in a buffer that it reuses. Used by one thread."""

    def __init__(self) -> None:
        self._bits = _no_bits()

    def make(
        self, wanted: Sequence[tuple[int, OutputMatcher | None]]
    ) -> tuple[RowMasks, list[tuple[int, ConstraintBroken]]]:
        """Masks for the next token of some matchers.

        Args:
            wanted: indices of sampled rows, ascending, and their matchers, all of one vocabulary.

        Returns:
            Masks of the rows that have one, and the places in ``wanted`` of matchers that failed, whose rows are not
            masked.
        """
        masked = [
            (row, matcher, place)
            for place, (row, matcher) in enumerate(wanted)
            if matcher is not None and matcher.masks
        ]
        if not masked:
            return NO_MASKS, []
        vocabulary = masked[0][1].vocabulary
        bits = self._buffer(len(masked), vocabulary.words)
        computed: list[tuple[LLMatcher, int]] = []
        for at, (_, matcher, _) in enumerate(masked):
            grammar = matcher.begin_mask(bits[at])
            if grammar is not None:
                computed.append((grammar, at))
        vocabulary.fill(computed, bits)
        broken: list[tuple[int, ConstraintBroken]] = []
        for at, (_, matcher, place) in enumerate(masked):
            try:
                matcher.end_mask(bits[at])
            except ConstraintBroken as error:
                broken.append((place, error))
                bits[at] = -1
        return RowMasks([row for row, _, _ in masked], bits), broken

    def _buffer(self, rows: int, words: int) -> npt.NDArray[np.int32]:
        if self._bits.shape[1] != words or len(self._bits) < rows:
            self._bits = np.zeros((max(rows, 2 * len(self._bits)), words), dtype=np.int32)
        return self._bits[:rows]
