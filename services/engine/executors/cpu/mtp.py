"""Drafts the token after next with the model's mtp layer, where torch computes in place of kernels.

The layer is one more decoder layer behind the model's, over the same rows, each with the token that follows it. So it
runs in every step, over prompts too: its keys and values must be there when the answer begins. Where a prompt's
beginning comes from the prefix cache, its last position has the keys and values of the request that computed it, which
may have gone on with another token: a draft token may be worse for it, an output is never different.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from services.engine.executors.cpu.sampler import Sampler
from services.engine.models.batch import CacheBuffers
from services.engine.requests.outputs import SampledToken
from services.engine.scheduler.step_plan import Chunk

if TYPE_CHECKING:
    from services.engine.models.interface import CausalLM


class MtpDrafter:
    """Used by the runner, after each step.

    Args:
        sampler: one that draws as the runner's, for tokens that are not drawn yet.
    """

    def __init__(self, model: CausalLM, cache: CacheBuffers, sampler: Sampler) -> None:
        self._model, self._cache, self._sampler = model, cache, sampler

    def draft(self, hidden: Tensor, step: Any, chunks: Sequence[Chunk], tokens: Sequence[SampledToken]) -> list[int]:
        """Draft token of each chunk that samples, -1 for requests that none are made for.

        Args:
            hidden: [T, hidden] of all rows of the step, normed.
            tokens: what the step sampled, one for each sampled row.
        """
        next_ids: list[int] = []
        rows: list[int] = []
        drawn: list[Chunk] = []
        drafts: list[int] = []
        places: list[int] = []
        at = 0
        for chunk in chunks:
            sampled = [token.token_id for token in tokens[at : at + chunk.sampled_rows]]
            at += len(sampled)
            next_ids += chunk.token_ids[1 : len(chunk.token_ids) - chunk.num_draft_tokens]
            next_ids += sampled or [chunk.next_id]
            if not chunk.samples:
                continue
            right = chunk.num_draft_tokens and sampled[0] == chunk.token_ids[-1]
            if chunk.request.sampling.draftable:
                rows.append(len(next_ids) - 1 - chunk.num_draft_tokens + right)
                drawn.append(chunk._replace(output_count=chunk.output_count + 1 + right))
                places.append(len(drafts))
            drafts.append(-1)
        if not any(chunk.request.sampling.draftable for chunk in chunks):
            return drafts
        device = self._model.device
        out = self._model.draft(hidden, torch.tensor(next_ids, device=device), step, self._cache)
        if rows:
            logits = self._model.logits(out[torch.tensor(rows, device=device)])
            for place, token in zip(places, self._sampler.sample(logits, drawn), strict=True):
                drafts[place] = -1 if token.error else token.token_id
        return drafts
