"""Packing of documents that begin alike: every document is whole, and what is common is there once."""

from __future__ import annotations

import random

import pytest
import torch

from services.common.jobs.documents import Document, completion_document
from services.trainer.packing import LEAST_SHARED, Branches, pack, pack_branches


def grown(seed: int) -> list[tuple[int, ...]]:
    """Sequences of a random tree, some of them the beginning of others."""
    chance = random.Random(seed)
    found = [tuple(chance.randrange(9) for _ in range(60))]
    while len(found) < 12:
        stem = chance.choice(found)
        length = chance.choice([0, 3, LEAST_SHARED, 45, len(stem)])
        found.append(stem[:length] + tuple(chance.randrange(9) for _ in range(chance.choice([1, 40, 90]))))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_pieces_make_the_sequences(seed: int) -> None:
    sequences = grown(seed)
    tree = Branches.of(sequences, shared=True)
    assert sum(tree.lengths) == len(tree.tokens) < sum(map(len, sequences))
    for sequence, pieces in zip(sequences, tree.pieces, strict=True):
        assert tuple(tree.tokens[row] for piece in pieces for row in piece) == sequence
    depths: list[int] = []
    for index, parent in enumerate(tree.parents):
        assert parent is None or parent < index
        depths.append(0 if parent is None else depths[parent] + 1)
    assert depths == sorted(depths)


def test_what_is_common_is_packed_once() -> None:
    prompt = list(range(50))
    documents = [completion_document(prompt, [60 + number] * 5, number) for number in range(6)]
    # A branch counts as LEAST_COUNTED tokens, or as all of the document if that has fewer.
    (packed,) = pack_branches(documents, 6 * 54, torch.device("cpu"))
    # An input less a document: its last token is only a target. The row before the completion is the prompt's last.
    assert packed.num_tokens == 50 + 6 * 4
    assert [document.source for document in packed.documents] == list(range(6))
    assert [int(row) for row in packed.rows[::5]] == [49] * 6
    assert [int(token) for token in packed.targets] == [60 + number for number in range(6) for _ in range(5)]
    first, second = pack_branches(documents, 6 * 54 - 1, torch.device("cpu"))
    assert (first.num_tokens, second.num_tokens) == (50 + 5 * 4, 54)
    long = [completion_document(prompt, [60 + number] * 80, number) for number in range(6)]
    (packed,) = pack_branches(long, 50 + 6 * 79, torch.device("cpu"))
    assert packed.num_tokens == 50 + 6 * 79


def test_documents_with_nothing_in_common_are_packed_as_ever() -> None:
    documents: list[Document] = [completion_document([number] * 9, [1] * (number + 1), number) for number in range(5)]
    one, other = (make(documents, 40, torch.device("cpu")) for make in (pack, pack_branches))
    assert [batch.lengths for batch in one] == [batch.lengths for batch in other]
    assert all(batch.parents is None for batch in other)
