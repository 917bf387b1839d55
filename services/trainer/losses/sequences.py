"""Sums over each sequence of packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence_sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[D]: the sum over each sequence's rows. In order, unlike an index_add on a GPU, so it repeats bit by bit.

    Args:
        values: [N], the rows of the sequences one behind another.
        lengths: rows of each; they add up to N.
    """
    return torch.stack([part.sum() for part in torch.split(values, list(lengths))])


def per_row(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[N]: the value [D] of each row's sequence."""
    return torch.repeat_interleave(values, torch.tensor(lengths, device=values.device), output_size=sum(lengths))
