"""The scores of rows of logits on a CUDA device: the sums in one pass over the logits, in the type they are in.
Reference: `kernels.row_scores`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.train.head import score_rows
from kernels.row_scores import RowScores, ranked


def row_scores(logits: Tensor, targets: Tensor, alternatives: int) -> RowScores:
    """Twin of the reference's row_scores(); nothing here waits for the device.

    Args:
        logits: [N, vocab], rows contiguous.
        targets: [N] int64.
        alternatives: at most the size of the vocabulary.
    """
    logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    hits = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    score_rows(logits, targets, 1.0, logprobs, hits, slope=False)
    return ranked(logits, logits.gather(1, targets[:, None]), logprobs, alternatives)
