"""Packing of documents into token batches.

Documents (services/common/jobs/documents.py) of a microbatch lie one behind another without padding;
`CausalLM.forward_train` keeps them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.errors import InvalidRequest
from services.common.jobs import DraftJob, SftJob
from services.common.jobs.documents import Document


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

    @classmethod
    def of(cls, documents: Sequence[Document], device: torch.device) -> Microbatch:
        """Packs the documents in the order given."""
        inputs: list[int] = []
        rows: list[int] = []
        targets: list[int] = []
        owners: list[int] = []
        lengths: list[int] = []
        for index, document in enumerate(documents):
            start = len(inputs)
            inputs.extend(document.token_ids[:-1])
            lengths.append(len(inputs) - start)
            for position in range(1, document.length):
                if document.trained[position]:
                    rows.append(start + position - 1)
                    targets.append(document.token_ids[position])
                    owners.append(index)

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
        return cls(documents, tensor(inputs), tuple(lengths), tensor(rows), tensor(targets), tensor(owners), weights)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def pack(documents: Sequence[Document], max_tokens: int, device: torch.device) -> list[Microbatch]:
    """Few microbatches of at most ``max_tokens`` inputs; a longer document is alone in one. Deterministic."""
    chosen = best_fit([document.length - 1 for document in documents], max_tokens)
    return [Microbatch.of([documents[index] for index in indices], device) for indices in chosen]


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
