"""Overlap of a suite with hashes of training data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.common.evaluation.contamination.hashes import TextHasher, prompt_hashes, whole_prompt
from services.common.evaluation.contamination.texts import ReadText, item_text
from services.common.evaluation.suites.spec import SuiteItem

WORDING = 10
"""Groups of a suite that may share 13 words: what more of them share is how the suite asks, and not counted."""


@dataclass(frozen=True, slots=True)
class ItemOverlap:
    """Overlap of one item with the training data."""

    exact: bool
    """Whether its whole prompt is one there."""
    grams: int
    """Distinct runs of 13 words that it has, without the suite's wording; 0 for short items, of which `exact` tells."""
    shared: int
    """Those that occur there."""

    @property
    def contaminated(self) -> bool:
        return self.exact or self.shared > 0

    @property
    def share(self) -> float:
        return self.shared / self.grams if self.grams else 0.0


class SuiteOverlap:
    """Looks for a suite's items in hashes of training data.

    Keeps about 150 bytes a word of the suite, and nothing of the training data. Not thread-safe.
    """

    def __init__(self, items: Sequence[SuiteItem]) -> None:
        self._hasher = TextHasher()
        texts = [item_text(item) for item in items]
        self._prompts = [whole_prompt(text) for text in texts]
        self._grams = [frozenset(self._hasher.grams(text)) for text in texts]
        by_group: dict[str | int, set[int]] = {}
        for place, (item, grams) in enumerate(zip(items, self._grams, strict=True)):
            by_group.setdefault(place if item.group is None else item.group, set()).update(grams)
        groups = Counter(gram for grams in by_group.values() for gram in grams)
        self._wording = {gram for gram, count in groups.items() if count > WORDING}
        self._wanted = groups.keys() - self._wording
        self._asked = {prompt for prompt in self._prompts if prompt is not None}

    def find(
        self,
        prompts: Iterable[Iterable[int]],
        grams: Iterable[Iterable[int]],
        interrupt: Callable[[], None] = lambda: None,
    ) -> list[ItemOverlap]:
        """Overlap of each item.

        Args:
            prompts, grams: hashes of the training data, piece by piece.
            interrupt: called for each piece; may raise.
        """
        seen: set[int] = set()
        for piece in prompts:
            interrupt()
            seen |= self._asked.intersection(piece)
        found: set[int] = set()
        for piece in grams:
            interrupt()
            found |= self._wanted.intersection(piece)
        return [
            ItemOverlap(prompt in seen, len(own := grams - self._wording), len(own & found))
            for prompt, grams in zip(self._prompts, self._grams, strict=True)
        ]

    def touches(self, text: ReadText) -> bool:
        """Whether training on a text would contaminate an item."""
        if not self._asked.isdisjoint(prompt_hashes(text)):
            return True
        return any(gram in self._wanted for gram in self._hasher.grams(text))
