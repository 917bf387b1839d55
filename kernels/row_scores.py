"""Scores of given tokens by rows of logits: log-probability, rank, and the likeliest tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowScores(NamedTuple):
    """Scores of N rows, each with one target."""

    logprobs: Tensor
    """[N] float32: log softmax(logits)[target]."""
    ranks: Tensor
    """[N] int32: 1 + the number of tokens with a higher logit."""
    top_ids: Tensor
    """[N, k] int32, most likely first."""
    top_logprobs: Tensor
    """[N, k] float32; where the token is the target, exactly its ``logprobs``."""


def row_scores(logits: Tensor, targets: Tensor, alternatives: int) -> RowScores:
    """Scores the target of each row.

    Args:
        logits: [N, vocab] of any float type; the sums are of float32.
        targets: [N] int64.
        alternatives: k, at most the size of the vocabulary.
    """
    exact = logits.float()
    chosen = exact.gather(1, targets[:, None])
    return ranked(logits, chosen, chosen.squeeze(1) - torch.logsumexp(exact, dim=-1), alternatives)


def ranked(logits: Tensor, chosen: Tensor, logprobs: Tensor, alternatives: int) -> RowScores:
    """Ranks and likeliest tokens, once the log-probabilities of the targets are known.

    Args:
        logits: [N, vocab].
        chosen: [N, 1], the targets' logits.
        logprobs: [N] float32.
    """
    ranks = (logits > chosen).sum(-1, dtype=torch.int32) + 1
    values, ids = torch.topk(logits, alternatives, dim=-1)
    # Behind the same difference the target has the same number here as in logprobs.
    tops = (values.float() - chosen.float()) + logprobs[:, None]
    return RowScores(logprobs, ranks, ids.to(torch.int32), tops)
