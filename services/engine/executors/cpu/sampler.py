"""Chooses the next tokens of a whole batch with tensor operations.

Order of the edits, as in vLLM: masks of constraints, logit_bias, min_tokens, penalties, temperature, min_p, top_k,
top_p. A token is drawn by an exponential race (argmax of logit - log Exp(1), the Gumbel-max trick) with the
counter-based noise of noise.py, so that a row's draw does not depend on the other rows. Without filters blocks of
tokens race by their mass, and then the tokens of the winner: the distribution is the same.

Filters are thresholds: the allowed tokens of a row are those whose logit is at least t. Equal logits are all in or all
out, which keeps the choice independent of how a sort breaks ties.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from services.engine.constraints.masks import NO_MASKS, RowMasks
from services.engine.executors.cpu.sampling_params import SamplingRows
from services.engine.executors.rng import BLOCK, FIRST_BLOCK, exponential, row_keys
from services.engine.requests.outputs import SampledToken
from services.engine.scheduler.step_plan import Chunk

_MIN_CANDIDATES = 64
"""Candidates looked at before a row falls back to the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class _Alternatives:
    """Raw log-probabilities of the rows that asked for them, by row."""

    logprobs: dict[int, float]
    top: dict[int, tuple[list[int], list[float]]]


class Sampler:
    """Batched sampling.

    Args:
        eos_token_ids: what min_tokens masks beside a request's own stop tokens.
        device: where logits come from.
        salt: with which requests without a seed get one; None: a new one.
        block: tokens that race together, see noise.BLOCK.
    """

    def __init__(
        self, eos_token_ids: Sequence[int], device: torch.device, salt: int | None = None, *, block: int = BLOCK
    ) -> None:
        self._eos = tuple(eos_token_ids)
        self._device = device
        self._salt = secrets.randbits(64) if salt is None else salt
        self._rows: SamplingRows | None = None
        self._block = block
        self._places = torch.arange(block, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def sample(self, logits: Tensor, chunks: Sequence[Chunk], masks: RowMasks = NO_MASKS) -> list[SampledToken]:
        """Samples one token for each row. Its log-probabilities are those without masks.

        Args:
            logits: [R, V] float32, not changed.
            chunks: R chunks that sample, in the order of the rows.
            masks: of some rows: other tokens than these have no probability there.

        Returns:
            R tokens. A row with NaN or infinite logits gets ``error`` instead; the others are not affected.
        """
        if not chunks:
            return []
        rows = self._rows
        if rows is None or not rows.same_requests(chunks):
            rows = SamplingRows(chunks, self._eos, self._salt, self._device, previous=rows)
            self._rows = rows
        scaled = logits if rows.unit_temperature else logits / rows.temperature
        log_z = torch.logsumexp(scaled, dim=-1)
        edited = rows.edit(self._masked(logits, masks), chunks)
        if edited is logits:
            edited = scaled
        elif not rows.unit_temperature:
            edited = edited / rows.temperature
        tokens = self._choose(edited, rows, chunks)
        if rows.forced_rows:
            tokens[rows.forced] = torch.tensor([chunks[row].forced_id for row in rows.forced_rows], device=self._device)
        picked = scaled.gather(1, tokens.unsqueeze(1)).squeeze(1) - log_z
        alternatives = self._alternatives(logits, tokens, rows)
        return _results(tokens.tolist(), picked.tolist(), alternatives)

    def _masked(self, logits: Tensor, masks: RowMasks) -> Tensor:
        """The logits with -inf for what is masked; ``logits`` itself if nothing is."""
        if not masks.rows:
            return logits
        allowed = np.unpackbits(masks.bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        rows = torch.tensor(masks.rows, device=self._device)
        logits = logits.clone()
        logits[rows] = logits[rows].masked_fill_(torch.from_numpy(allowed == 0).to(self._device), -math.inf)
        return logits

    def _choose(self, logits: Tensor, rows: SamplingRows, chunks: Sequence[Chunk]) -> Tensor:
        """[R, V] final logits to [R] int64 tokens."""
        if rows.all_greedy:
            return logits.argmax(dim=-1)
        counters = np.fromiter((chunk.output_count for chunk in chunks), dtype=np.uint64, count=len(chunks))
        keys = torch.from_numpy(row_keys(rows.seeds, counters)).to(self._device, non_blocking=True)
        if rows.all_plain:
            return self._plain(logits, keys)
        if rows.all_filtered:
            return self._filtered(logits, keys, rows.top_k, rows.top_p, rows.log_min_p, rows.candidates)
        tokens = logits.argmax(dim=-1)
        if len(rows.plain):
            tokens[rows.plain] = self._plain(logits[rows.plain], keys[rows.plain])
        if len(rows.filtered):
            index = rows.filtered
            tokens[index] = self._filtered(
                logits[index], keys[index], rows.top_k, rows.top_p, rows.log_min_p, rows.candidates
            )
        return tokens

    def _plain(self, logits: Tensor, keys: Tensor) -> Tensor:
        """Samples from the whole vocabulary: a block, then a token of it."""
        rows, vocab = logits.shape
        blocks = -(-vocab // self._block)
        if blocks > 1:
            padded = F.pad(logits, (0, blocks * self._block - vocab), value=-math.inf).view(rows, blocks, self._block)
            names = torch.arange(blocks, dtype=torch.int32, device=self._device) + FIRST_BLOCK
            block = (torch.logsumexp(padded, dim=-1) - exponential(keys, names).log_()).argmax(dim=-1)
            logits = padded[torch.arange(rows, device=self._device), block]
            first = block.unsqueeze(1) * self._block
        else:
            first = torch.zeros(rows, 1, dtype=torch.int64, device=self._device)
        ids = first.to(torch.int32) + self._places[: logits.shape[1]]
        chosen = (logits - exponential(keys, ids).log_()).argmax(dim=-1)
        return (first.squeeze(1) + chosen).clamp_(max=vocab - 1)

    def _filtered(
        self, logits: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, candidates: int
    ) -> Tensor:
        """Samples among the most likely `candidates` tokens; rows whose filters allow more see all of them."""
        size = min(max(candidates, _MIN_CANDIDATES), logits.shape[1])
        values, ids = torch.topk(logits, size, dim=-1)
        kth = values.gather(1, (top_k.clamp(max=size) - 1).clamp(min=0))
        threshold = torch.maximum(values[:, :1] + log_min_p, kth.masked_fill(top_k == 0, -math.inf))
        complete = values[:, -1:] < threshold
        if size < logits.shape[1] and not bool(complete.all()):
            mass = torch.logsumexp(logits.masked_fill(logits < threshold, -math.inf), dim=-1, keepdim=True)
        else:
            mass = torch.logsumexp(values.masked_fill(values < threshold, -math.inf), dim=-1, keepdim=True)
        probabilities = (values - mass).exp_()
        before = probabilities.cumsum(dim=-1) - probabilities
        # The smallest set of the most likely tokens whose mass reaches top_p; the first is always in.
        last = ((before < top_p).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
        nucleus = values.gather(1, last).masked_fill_(top_p >= 1.0, -math.inf)
        threshold = torch.maximum(threshold, nucleus)
        race = values - exponential(keys, ids.to(torch.int32)).log_()
        choice = race.masked_fill_(values < threshold, -math.inf).argmax(dim=-1, keepdim=True)
        tokens = ids.gather(1, choice).squeeze(1)
        if size < logits.shape[1]:
            rest = (~(values[:, -1:] < threshold)).squeeze(1).nonzero().squeeze(1)
            if len(rest):
                tokens[rest] = self._filtered(
                    logits[rest], keys[rest], top_k[rest], top_p[rest], log_min_p[rest], 8 * size
                )
        return tokens

    def _alternatives(self, logits: Tensor, tokens: Tensor, rows: SamplingRows) -> _Alternatives:
        if not rows.logprob_rows:
            return _Alternatives({}, {})
        selected = logits[rows.logprob_index]
        log_z = torch.logsumexp(selected, dim=-1, keepdim=True)
        chosen = selected.gather(1, tokens[rows.logprob_index].unsqueeze(1)) - log_z
        logprobs = dict(zip(rows.logprob_rows, chosen.squeeze(1).tolist(), strict=True))
        top: dict[int, tuple[list[int], list[float]]] = {}
        if rows.most_alternatives:
            values, ids = torch.topk(selected, min(rows.most_alternatives, logits.shape[1]), dim=-1)
            for row, count, row_ids, row_values in zip(
                rows.logprob_rows, rows.logprob_counts, ids.tolist(), (values - log_z).tolist(), strict=True
            ):
                top[row] = (row_ids[:count], row_values[:count])
        return _Alternatives(logprobs, top)


def _results(tokens: list[int], picked: list[float], alternatives: _Alternatives) -> list[SampledToken]:
    results = []
    for row, (token, logprob) in enumerate(zip(tokens, picked, strict=True)):
        if math.isnan(logprob):
            # log softmax is NaN exactly if some logit is NaN or +inf, or all of them are -inf.
            results.append(SampledToken(0, 0.0, error="the model produced logits that are not finite numbers"))
        elif row in alternatives.logprobs:
            ids, values = alternatives.top.get(row, ((), ()))
            results.append(SampledToken(token, logprob, alternatives.logprobs[row], ids, values))
        else:
            results.append(SampledToken(token, logprob))
    return results
