"""Scoring of a call: its data becomes packed microbatches with what the losses need of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from services.common.jobs.documents import Document
from services.common.jobs.training_sessions.data import Datum
from services.trainer.packing import Microbatch, pack


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """One microbatch; rows are the tokens that are scored, in the order of its documents."""

    microbatch: Microbatch
    targets: Tensor
    """[N] int64; the data may name other tokens than those that follow."""
    weights: Tensor
    """[N] float32; 0 only of tokens that are scored for their log-probability alone."""
    advantages: Tensor | None
    behaviour: Tensor | None


def scored_batches(data: Sequence[Datum], max_tokens: int, device: torch.device) -> list[ScoredBatch]:
    """Packs the data into few microbatches of at most ``max_tokens`` inputs; a longer datum is alone in one."""
    documents = [
        Document(
            token_ids=(*datum.inputs, datum.predicted[-1]),
            trained=(False, *datum.scored),
            source=index,
        )
        for index, datum in enumerate(data)
    ]
    return [_with_rows(microbatch, data, device) for microbatch in pack(documents, max_tokens, device)]


def spread(datum: Datum, logprobs: Sequence[float]) -> list[float | None]:
    """Log-probabilities of a datum's scored tokens in the places of its lists; None where nothing was scored."""
    values = iter(logprobs)
    scored = [next(values) if there else None for there in datum.scored]
    return [None] * datum.unpredicted + scored


def _with_rows(microbatch: Microbatch, data: Sequence[Datum], device: torch.device) -> ScoredBatch:
    chosen = [data[document.source] for document in microbatch.documents]

    def floats(name: Literal["advantages", "logprobs"]) -> Tensor | None:
        if getattr(chosen[0], name) is None:  # a loss needs it of every datum or takes it of none
            return None
        rows = [value for datum in chosen for value in _rows(datum, datum.aligned(name))]
        return torch.tensor(rows, dtype=torch.float32, device=device)

    weights = [weight for datum in chosen for weight in _rows(datum, datum.effective_weights)]
    targets = [token for datum in chosen for token, there in zip(datum.predicted, datum.scored, strict=True) if there]
    return ScoredBatch(
        microbatch=microbatch,
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
        weights=torch.tensor(weights, dtype=torch.float32, device=device),
        advantages=floats("advantages"),
        behaviour=floats("logprobs"),
    )


def _rows(datum: Datum, values: Sequence[float]) -> list[float]:
    return [value for value, there in zip(values, datum.scored, strict=True) if there]
