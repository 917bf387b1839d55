"""Draft tokens behind a step that samples: drawn on the device, without waiting for it.

The plain twin is services/engine/executors/cpu/mtp.py. The host does not know yet whether a step's own draft token was
right, so the row to draft from and the number of the token are chosen on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.engine.executors.cuda.sampling.sampler import CudaSampler, DeviceResults, SampleRows
from services.engine.models.interface import DeviceForward
from services.engine.requests.outputs import SampledToken
from services.engine.scheduler.step_plan import Chunk

Words = npt.NDArray[np.int32]
_WORDS = 5


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Chunks of a step that a draft token is drawn for."""

    words: Words
    """[5, C]: of each, its first place among the sampled rows; the draft token it checks, -1 for none; the row of the
    batch of that first place; the state slot; the number of the token after the one sampled there."""
    places: Sequence[int]
    """[C]: places of these chunks among those that sample."""
    sampling: int
    """Chunks that sample."""

    @classmethod
    def of(cls, chunks: Sequence[Chunk], rows: Sequence[int]) -> DraftRows:
        """Args: rows: sampled_rows() of the chunks."""
        columns: list[tuple[int, ...]] = []
        places: list[int] = []
        at = count = 0
        for chunk in chunks:
            if not chunk.samples:
                continue
            if chunk.request.sampling.draftable:
                draft = chunk.token_ids[-1] if chunk.num_draft_tokens else -1
                columns.append((at, draft, rows[at], chunk.slot, chunk.output_count + 1))
                places.append(count)
            at += chunk.sampled_rows
            count += 1
        words = np.array(columns, dtype=np.int32).reshape(-1, _WORDS).T
        return cls(np.ascontiguousarray(words), places, count)

    def read(self, tokens: Sequence[SampledToken]) -> list[int]:
        """Draft token of each chunk that samples, -1 for none.

        Args:
            tokens: [C], what sample_draft_tokens() left, on the host.
        """
        drafts = [-1] * self.sampling
        for place, token in zip(self.places, tokens, strict=True):
            drafts[place] = -1 if token.error else token.token_id
        return drafts


def fill_next_ids(next_ids: Tensor, logit_rows: Tensor | None, tokens: Tensor) -> None:
    """Puts the sampled tokens [R] behind the rows they were sampled from, which are the first ones without a list."""
    if logit_rows is None:
        next_ids[: tokens.shape[0]].copy_(tokens)
    else:
        next_ids.index_copy_(0, logit_rows.long(), tokens)


def sample_draft_tokens(
    forward: DeviceForward,
    sampler: CudaSampler,
    out: Tensor,
    words: Tensor,
    tokens: Tensor,
    sampling: SampleRows,
) -> DeviceResults:
    """Draws a draft token for each column of words, with the noise that the token itself will be drawn with.

    Args:
        out: [T, hidden], what forward.draft() returned.
        words: [5, C] int32, DraftRows.words on the device.
        tokens: [R] int32, what the step sampled.
        sampling: of the step.
    """
    first, draft, row, slot, number = words
    right = (tokens.index_select(0, first) == draft).to(torch.int32)
    logits = forward.draft_logits(out.index_select(0, row + right))
    features = replace(sampling.features, edits=False, biases=False, alternatives=False)
    # The third row is the token of a forced request, and nothing is drafted for one.
    return sampler.launch(logits, replace(sampling, features=features), torch.stack((slot, number + right, slot)))
