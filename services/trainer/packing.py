"""Packing of documents into token batches.

Documents (services/common/jobs/documents.py) of a microbatch lie one behind another without padding;
`CausalLM.forward_train` keeps them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from services.common.errors import InvalidRequest
from services.common.jobs import DraftJob, SftJob
from services.common.jobs.documents import Document

LEAST_SHARED = 32
"""Tokens that several documents must have in common to be worth a piece of their own."""
LEAST_COUNTED = 64
"""Tokens that a branch counts as at least in a microbatch: a tile of the recurrence on a GPU, which keeps a state."""


@dataclass(frozen=True, slots=True)
class Branches:
    """Sequences cut into pieces, so that what several begin with is there once."""

    tokens: list[int]
    lengths: list[int]
    parents: list[int | None]
    """Piece that each goes on from; those behind more others come later."""
    pieces: list[list[range]]
    """Rows of each sequence, piece by piece."""

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], *, shared: bool) -> Branches:
        """Pieces of these sequences, each of at least one token; not ``shared``: each is one, in order."""
        if not shared:
            ends = list(accumulate(map(len, sequences)))
            rows = [[range(end - len(one), end)] for end, one in zip(ends, sequences, strict=True)]
            return cls(
                [token for one in sequences for token in one], list(map(len, sequences)), [None] * len(rows), rows
            )
        order = sorted(range(len(sequences)), key=lambda index: (tuple(sequences[index]), index))
        common = [0, *(_common(sequences[one], sequences[two]) for one, two in itertools.pairwise(order))]
        found: list[tuple[int, int, int | None, int, int]] = []  # depth, first sequence, parent, begin, end
        paths: list[list[int]] = [[] for _ in sequences]

        def cut(low: int, high: int, begin: int, parent: int | None, depth: int) -> None:
            """Makes pieces of the sorted sequences from ``low`` to ``high``, from token ``begin`` on."""
            at = low
            while at < high:
                end = at + 1
                while end < high and common[end] - begin >= LEAST_SHARED:
                    end += 1
                same = min(common[at + 1 : end], default=len(sequences[order[at]]))
                if same > begin:
                    members = sorted(order[at:end])
                    found.append((depth, members[0], parent, begin, same))
                    for member in members:
                        paths[member].append(len(found) - 1)
                    if end - at > 1:
                        cut(at, end, same, len(found) - 1, depth + 1)
                at = end

        cut(0, len(order), 0, None, 0)
        ranks = sorted(range(len(found)), key=lambda at: found[at][:2])
        place = {at: rank for rank, at in enumerate(ranks)}
        tokens: list[int] = []
        spans: list[range] = []
        for at in ranks:
            _, owner, _, begin, end = found[at]
            spans.append(range(len(tokens), len(tokens) + end - begin))
            tokens += sequences[owner][begin:end]
        parents = [None if (above := found[at][2]) is None else place[above] for at in ranks]
        return cls(tokens, list(map(len, spans)), parents, [[spans[place[at]] for at in path] for path in paths])


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Documents packed for one forward and backward. The last token of a document is only a target, never an input."""

    documents: Sequence[Document]
    token_ids: Tensor
    """[T] int64."""
    lengths: Sequence[int]
    """Inputs of each document; their sum is T."""
    rows: Tensor
    """[N] int64: inputs whose next token is trained, in the order of the documents."""
    targets: Tensor
    """[N] int64: those next tokens."""
    row_documents: Tensor
    """[N] int64: index into ``documents`` of each row."""
    weights: Tensor | None = None
    """[N] float32: weight of each row in the loss; None: 1."""
    observed: tuple[Tensor, Tensor] | None = None
    """[M] int64 each: inputs whose next token was observed (`Document.observed`), and those tokens; None: none was."""
    parents: Sequence[int | None] | None = None
    """``lengths`` are then those of pieces, each of which goes on from another or begins (`CausalLM.forward_train`):
    what documents have in common is there once. None: documents share nothing."""

    @classmethod
    def of(cls, documents: Sequence[Document], device: torch.device, *, shared: bool = False) -> Microbatch:
        """Packs the documents in the order given.

        Args:
            shared: what several begin with is read once, where it is long enough to be worth it.
        """
        rows: list[int] = []
        targets: list[int] = []
        owners: list[int] = []
        seen: list[tuple[int, int]] = []
        tree = Branches.of([document.token_ids[:-1] for document in documents], shared=shared)
        inputs, lengths = tree.tokens, tree.lengths
        parents = tree.parents if any(parent is not None for parent in tree.parents) else None
        for index, document in enumerate(documents):
            places = [row for piece in tree.pieces[index] for row in piece]
            for position in range(1, document.length):
                if document.trained[position]:
                    rows.append(places[position - 1])
                    targets.append(document.token_ids[position])
                    owners.append(index)
                if document.observed is not None and document.observed[position]:
                    seen.append((places[position - 1], document.token_ids[position]))

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        weights = None
        if any(document.weights is not None for document in documents):
            found = [
                1.0 if document.weights is None else document.weights[position]
                for document in documents
                for position in range(1, document.length)
                if document.trained[position]
            ]
            weights = torch.tensor(found, dtype=torch.float32, device=device)
        packed = tensor(inputs), tuple(lengths), tensor(rows), tensor(targets), tensor(owners)
        observed = (tensor([row for row, _ in seen]), tensor([token for _, token in seen])) if seen else None
        return cls(documents, *packed, weights=weights, observed=observed, parents=parents)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def pack(documents: Sequence[Document], max_tokens: int, device: torch.device) -> list[Microbatch]:
    """Few microbatches of at most ``max_tokens`` inputs; a longer document is alone in one. Deterministic."""
    chosen = best_fit([document.length - 1 for document in documents], max_tokens)
    return [Microbatch.of([documents[index] for index in indices], device) for indices in chosen]


def pack_branches(documents: Sequence[Document], max_tokens: int, device: torch.device) -> list[Microbatch]:
    """The same, with what documents begin with in common read once in each microbatch: those that have most in common
    are together. Documents that have nothing in common are packed as by `pack`."""
    order = sorted(documents, key=lambda document: (tuple(document.token_ids), document.source))
    common = [0, *(_common(one.token_ids[:-1], two.token_ids[:-1]) for one, two in itertools.pairwise(order))]
    saved = [same if same >= LEAST_SHARED else 0 for same in common]
    if not any(saved):
        return pack(documents, max_tokens, device)
    bins: list[list[Document]] = []
    room = 0
    for document, less in zip(order, saved, strict=True):
        need = document.length - 1
        own = max(need - less, min(LEAST_COUNTED, need)) if less else need
        if bins and own <= room:
            bins[-1].append(document)
            room -= own
        else:
            bins.append([document])
            room = max_tokens - need
    by_source = [sorted(chosen, key=lambda document: document.source) for chosen in bins]
    return [Microbatch.of(chosen, device, shared=True) for chosen in by_source]


def pack_together(examples: Sequence[Sequence[Document]], max_tokens: int, device: torch.device) -> list[Microbatch]:
    """The same, with the documents of an example in one microbatch unless together they are over ``max_tokens``."""
    pieces: list[Sequence[Document]] = []
    for documents in examples:
        together = sum(document.length - 1 for document in documents) <= max_tokens
        pieces += [documents] if together else [[document] for document in documents]
    chosen = best_fit([sum(document.length - 1 for document in piece) for piece in pieces], max_tokens)
    return [Microbatch.of([document for index in indices for document in pieces[index]], device) for indices in chosen]


def best_fit(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Best-fit decreasing: indices of the sizes of each bin, in order; a size over ``most`` is alone."""
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        need = sizes[index]
        fitting = [candidate for candidate in range(len(bins)) if room[candidate] >= need]
        if fitting:
            best = min(fitting, key=lambda candidate: (room[candidate], candidate))
            bins[best].append(index)
            room[best] -= need
        else:
            bins.append([index])
            room.append(most - need)
    return [sorted(chosen) for chosen in bins]


def shuffled(count: int, *, seed: int, epoch: int) -> list[int]:
    """A permutation that depends on the seed and the epoch only, so that a data cursor is just a step number."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return [int(index) for index in torch.randperm(count, generator=generator)]


def largest_microbatch(lengths: Sequence[int], max_tokens: int) -> int:
    """Inputs of the largest microbatch that `pack` makes of documents of these lengths, at most."""
    inputs = [length - 1 for length in lengths]
    return max(max(inputs), min(max_tokens, sum(inputs)))


# -- limits and splits


def apply_limit(
    documents: Sequence[Document], spec: SftJob | DraftJob, limit: int, *, field: str = "examples"
) -> tuple[list[Document], list[str]]:
    """Applies the overlong policy; returns what is left and notes for the user.

    Raises:
        InvalidRequest: a document is over the limit and the policy is error, or nothing is left.
    """
    kept: list[Document] = []
    dropped: list[int] = []
    cut: list[int] = []
    for document in documents:
        if document.length <= limit:
            kept.append(document)
            continue
        if spec.overlong == "error":
            raise overlong(
                f"{field}[{document.source}]", document.length, limit, "shorten it, or set overlong to drop or truncate"
            )
        if spec.overlong == "truncate" and any(document.trained[:limit]):
            kept.append(document.cut(limit))
            cut.append(document.source)
        else:
            dropped.append(document.source)
    if not kept:
        raise InvalidRequest(f"none of the {field} is within the limit of {limit} tokens", param=field)
    notes = []
    for verb, sources in (("dropped", dropped), ("truncated", cut)):
        if sources:
            notes.append(f"{len(sources)} documents over {limit} tokens {verb}: {field} {some(sources)}")
    return kept, notes


def overlong(where: str, tokens: int, limit: int, way_out: str, *, counted: str = "tokens") -> InvalidRequest:
    return InvalidRequest(
        f"{where} has {tokens} {counted}, over this engine's limit of {limit} for training (max_train_tokens): "
        f"{way_out}",
        param=where,
    )


def some(indices: Sequence[int]) -> str:
    unique = sorted(set(indices))
    return ", ".join(map(str, unique[:10])) + (f" and {len(unique) - 10} more" if len(unique) > 10 else "")
