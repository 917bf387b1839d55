"""Speculation with the model's mtp layer, or a block drafter in its place, where torch computes in place of kernels:
what is known of each slot, which draft tokens count, and the draft tokens of the next step.

The layer is one more decoder layer behind the model's, over the same rows, each with the token that follows it. So it
runs over prompts too: its keys and values must be there when the answer begins. Its output, normed, is what a further
draft token is drawn from with the one before, in the place of the model's hidden state. Keys and values that it leaves
at positions of rejected tokens are written again by the rows that come there. A block drafter draws all further draft
tokens in one pass over as many rows, each of that output and of a vector of its own for the draft token it does not
know; a row sees those before it, so the first ones are the same however many there are.

Where a prompt's beginning comes from the prefix cache, its last position has the keys and values of the request that
computed it, which may have gone on with another token: a draft token may be worse for it, an output is never different.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from services.engine.executors.cpu.sampler import Sampler
from services.engine.models.batch import CacheBuffers, ForwardBatch
from services.engine.requests.outputs import SampledToken
from services.engine.requests.request import Request
from services.engine.scheduler.step_plan import PENDING, Chunk

if TYPE_CHECKING:
    from services.engine.models.interface import CausalLM


@dataclass(slots=True)
class _Answer:
    """An answer in a slot, as of the last step that sampled for it."""

    request: Request
    computed: int
    """Tokens behind which its state is."""
    newest: int
    """Newest token, which is not computed."""
    ended: bool
    """True if that is the request's last one."""
    drafts: list[int] = field(default_factory=list)


class CpuSpeculation:
    """Used by the runner, before and after the model runs.

    Args:
        sampler: one that draws as the runner's, for tokens that are not drawn yet: then the draft tokens are those that
            will be drawn, as far as the mtp layer is right.
        batch: makes the model's batch of chunks.
        eos_token_ids: tokens that end a request that does not ignore them.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: CacheBuffers,
        sampler: Sampler,
        batch: Callable[[Sequence[Chunk]], ForwardBatch],
        eos_token_ids: Sequence[int],
    ) -> None:
        self._model, self._cache, self._sampler, self._batch = model, cache, sampler, batch
        self._eos = frozenset(eos_token_ids)
        form = model.drafter_form
        self._at_once = form is not None and form.block > 0
        self._answers: dict[int, _Answer] = {}
        """By slot."""

    def resolved(self, chunk: Chunk) -> Chunk:
        """The chunk with the tokens, position and count that the plan could not know. Of a request that has ended it
        computes nothing that is kept."""
        if chunk.token_ids[0] != PENDING and not chunk.num_draft_tokens:
            return chunk
        answer = self._answers[chunk.slot]
        first, count = chunk.token_ids[0], chunk.num_draft_tokens
        if first == PENDING:
            if chunk.request.sampling.penalises:
                raise ValueError("a CPU computes plans one by one: tokens that are penalised must be known")
            if answer.ended:
                nothing = (0,) * (1 + count)
                return chunk._replace(token_ids=nothing, start=1, blocks=(0,), slot=0)
            ahead = answer.computed - chunk.start
            chunk = chunk._replace(start=answer.computed, output_count=chunk.output_count + ahead)
            first = answer.newest
        drafts = (*answer.drafts, *(0,) * count)[:count]
        return chunk._replace(token_ids=(first, *drafts))

    def accepted(
        self, chunks: Sequence[Chunk], tokens: Sequence[SampledToken], unwanted: Sequence[int] = ()
    ) -> list[int]:
        """How many tokens of each chunk that samples count, and keeps them as the newest ones.

        Args:
            chunks: resolved ones.
            tokens: one for each sampled row.
            unwanted: sampled rows that do not count, see RowMasks.
        """
        counts: list[int] = []
        at = 0
        for chunk in chunks:
            if not chunk.samples:
                continue
            sampled = tokens[at : at + chunk.sampled_rows]
            wanted = next((row - at for row in unwanted if at <= row < at + len(sampled)), len(sampled))
            at += len(sampled)
            if chunk.slot == 0:
                counts.append(0)
                continue
            count = 1
            drafts = chunk.drafts
            ended = self._ends(chunk, 1, sampled[0])
            while count < wanted and not ended and sampled[count - 1].token_id == drafts[count - 1]:
                count += 1
                ended = self._ends(chunk, count, sampled[count - 1])
            counts.append(count)
            computed = chunk.start + len(chunk.token_ids) - len(drafts) + count - 1
            self._answers[chunk.slot] = _Answer(chunk.request, computed, sampled[count - 1].token_id, ended)
        return counts

    def _ends(self, chunk: Chunk, count: int, token: SampledToken) -> bool:
        """True if nothing is computed behind a chunk's token of that number."""
        sampling = chunk.request.sampling
        if not sampling.draftable:
            return False
        number = chunk.output_count + count
        stops = number > sampling.min_tokens and token.token_id in sampling.stops(self._eos)
        return stops or number >= chunk.max_output or token.error is not None

    def draft(
        self,
        hidden: Tensor,
        step: Any,
        chunks: Sequence[Chunk],
        tokens: Sequence[SampledToken],
        accepted: Sequence[int],
        num_draft_tokens: int,
    ) -> None:
        """Runs the mtp layer over the rows of a step and draws draft tokens behind each answer that may have them.

        Args:
            hidden: [T, hidden] of all rows, normed.
            step: of the model's forward_all().
            chunks: resolved ones.
        """
        next_ids: list[int] = []
        rows: list[int] = []
        drawn: list[Chunk] = []
        at = 0
        counts = iter(accepted)
        for chunk in chunks:
            sampled = [token.token_id for token in tokens[at : at + chunk.sampled_rows]]
            at += len(sampled)
            next_ids += chunk.token_ids[1 : len(chunk.token_ids) - chunk.num_draft_tokens]
            next_ids += sampled or [chunk.next_id]
            if not chunk.samples:
                continue
            count = next(counts)
            if count and chunk.request.sampling.draftable and not self._answers[chunk.slot].ended:
                rows.append(len(next_ids) - 1 - chunk.num_draft_tokens + count - 1)
                drawn.append(chunk.followed_by(sampled[:count]))
        device = self._model.device
        out = self._model.draft(hidden, torch.tensor(next_ids, device=device), step, self._cache)
        if rows and num_draft_tokens:
            self._draw(out[torch.tensor(rows, device=device)], drawn, num_draft_tokens)

    def _draw(self, out: Tensor, chunks: Sequence[Chunk], count: int) -> None:
        """Draws draft tokens, the rows of all but the first ones one behind the other or in one pass.

        Args:
            out: [R, hidden] of the layer's rows in front of the first ones.
            chunks: R chunks as of the rows of the first ones.
        """
        rows = chunks
        block = self._block(out, chunks, count - 1) if self._at_once and count > 1 else None
        for depth in range(count):
            if depth and block is not None:
                out = block[:, depth - 1]
            elif depth:
                out = self._further(out, chunks, depth - 1, [row.drafted_ids[-1] for row in rows])
            drawn = self._sampler.sample(self._model.logits(out), rows)
            rows = [row.followed_by((token.token_id,)) for row, token in zip(rows, drawn, strict=True)]
        for row in rows:
            self._answers[row.slot].drafts = list(row.drafted_ids[-count:])

    def _further(self, out: Tensor, chunks: Sequence[Chunk], ahead: int, ids: Sequence[int]) -> Tensor:
        """The layer's rows at the next positions: behind the newest tokens and ``ahead`` draft tokens, each with the
        draft token that follows."""
        step = self._places(chunks, ahead, 1)
        return self._model.draft(out, torch.tensor(ids, device=self._model.device), step, self._cache)

    def _block(self, out: Tensor, chunks: Sequence[Chunk], count: int) -> Tensor:
        """[R, count, hidden]: a block drafter's rows at the next positions."""
        found = self._model.draft_block(out, count, self._places(chunks, 0, count), self._cache)
        return found.view(len(chunks), count, -1)

    def _places(self, chunks: Sequence[Chunk], ahead: int, count: int) -> Any:
        """Step of ``count`` rows a chunk, behind the newest token and ``ahead`` draft tokens."""
        places = [
            chunk._replace(
                token_ids=(0,) * count,
                start=self._answers[chunk.slot].computed + ahead,
                num_draft_tokens=0,
                snapshots=(),
            )
            for chunk in chunks
        ]
        return self._model.begin_step(self._batch(places), self._cache)
