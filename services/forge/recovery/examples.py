"""Examples of a recovery: those that it learns from, those that are held out, and which of them make up each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from services.common.errors import InvalidRequest
from services.common.jobs.documents import Document
from services.common.text.tokenizer import TextCodec
from services.forge.importance.calibration import Calibration
from services.forge.recovery.settings import RecoverySettings
from services.trainer.packing import shuffled

_SPLIT = -1
"""Epoch whose order chooses what is held out: no other has its number."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Documents of a recovery."""

    learnt: Sequence[Document]
    held_out: Sequence[Document]
    files: Sequence[dict[str, Any]]
    """Name, digest and size of each file, for records."""

    @classmethod
    def read(
        cls, data: Path, held_out: Path | None, codec: TextCodec, settings: RecoverySettings, *, name: str | None
    ) -> Examples:
        """Reads the files. Without one of held-out examples a share of the others is held out, chosen by the seed.

        Raises:
            InvalidRequest: a file cannot be read, a line is no example, or too few are left to learn from.
        """
        read = Calibration.read(data, codec, name=name, max_document_tokens=settings.max_document_tokens)
        if held_out is not None:
            other = Calibration.read(held_out, codec, max_document_tokens=settings.max_document_tokens)
            return cls(read.documents, other.documents, [read.record(), other.record()])
        sources = sorted({document.source for document in read.documents})
        number = max(1, round(settings.held_out_share * len(sources)))
        if number >= len(sources):
            raise InvalidRequest(
                f"{data} has {len(sources)} examples, too few to hold out {number} of them: add some, or name a file "
                "of held-out examples",
                param="data",
            )
        order = shuffled(len(sources), seed=settings.seed, epoch=_SPLIT)
        apart = {sources[index] for index in order[:number]}
        learnt = [document for document in read.documents if document.source not in apart]
        return cls(learnt, [document for document in read.documents if document.source in apart], [read.record()])

    def steps(self, settings: RecoverySettings) -> list[tuple[int, ...]]:
        """Indices of the documents of each step: as many as fit the tokens of a step, in an order that each epoch
        changes. A function of the seed alone, so that a place in the data is a step number."""
        found: list[tuple[int, ...]] = []
        chosen: list[int] = []
        tokens = 0
        for epoch in count():
            for index in shuffled(len(self.learnt), seed=settings.seed, epoch=epoch):
                size = self.learnt[index].length - 1
                if chosen and tokens + size > settings.batch_tokens:
                    found.append(tuple(chosen))
                    if len(found) == settings.steps:
                        return found
                    chosen, tokens = [], 0
                chosen.append(index)
                tokens += size
        raise AssertionError("epochs do not end")
