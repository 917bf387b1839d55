"""Reads prompts where torch computes in place of kernels; on a GPU it is
services/engine/executors/cuda/prompt_scoring.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kernels.row_scores import row_scores
from services.engine.executors.prompt_rows import ReadRows
from services.engine.requests.prompt_scoring import PromptReport, PromptScores
from services.engine.scheduler.step_plan import StepPlan

if TYPE_CHECKING:
    from services.engine.models.interface import CausalLM

_TILE = 64
"""Rows whose logits exist at once: 64 MB at 248,320 tokens."""


def read_prompts(model: CausalLM, hidden: Tensor, plan: StepPlan) -> Sequence[PromptReport]:
    """Reports, one for each read of the plan.

    Args:
        hidden: [T, hidden] of all rows of the step, normed.
    """
    offsets = [0, *accumulate(len(chunk.token_ids) for chunk in plan.chunks)]
    wanted = ReadRows.of(plan.reads, plan.chunks, offsets)
    k = min(wanted.most_alternatives, model.config.vocab_size)
    rows = torch.from_numpy(wanted.rows).to(hidden.device)
    targets = torch.from_numpy(wanted.targets).to(hidden.device, torch.int64)
    tiles = [
        row_scores(model.logits(hidden.index_select(0, rows[begin : begin + _TILE])), targets[begin : begin + _TILE], k)
        for begin in range(0, max(len(rows), 1), _TILE)
    ]
    scores = PromptScores(*(torch.cat(part).cpu().numpy() for part in zip(*tiles, strict=True)))
    sums = [hidden[begin:end].sum(0, dtype=torch.float32).cpu().numpy() for begin, end in wanted.pooled]
    vectors = np.stack(sums) if sums else np.empty((0, hidden.shape[1]), dtype=np.float32)
    return wanted.reports(scores, vectors)
