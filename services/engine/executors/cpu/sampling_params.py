"""The sampling parameters of a batch as tensors, kept from step to step while the batch has the same requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import Chunk

_MIN_TEMPERATURE = 1e-5
"""Below this, logits / temperature would overflow; the distribution is a single token long before."""


@dataclass(slots=True)
class _Counts:
    """Token counts of one request with penalties, carried on from step to step. Draft tokens are not in them."""

    params: SamplingParams
    prompt: npt.NDArray[np.int64]
    """Distinct prompt tokens; empty unless the repetition penalty needs them."""
    counts: dict[int, int] = field(default_factory=dict)
    seen: int = 0

    @classmethod
    def of(cls, request: Request) -> _Counts:
        needed = request.prompt_token_ids if request.sampling.repetition_penalty != 1.0 else ()
        return cls(request.sampling, np.unique(np.array(needed, dtype=np.int64)))

    def behind(self, chunk: Chunk) -> dict[int, int]:
        """Counts of a sampled row: of the output, and of the tokens of its own step that it follows."""
        self.update(chunk.output_ids)
        if not chunk.drafted_ids:
            return self.counts
        counts = self.counts.copy()
        for token in chunk.drafted_ids:
            counts[token] = counts.get(token, 0) + 1
        return counts

    def update(self, output_ids: Sequence[int]) -> None:
        if self.seen > len(output_ids):
            self.counts.clear()
            self.seen = 0
        for token in output_ids[self.seen :]:
            self.counts[token] = self.counts.get(token, 0) + 1
        self.seen = len(output_ids)


class SamplingRows:
    """Row r belongs to chunk r. Tensors are [R, 1] so that they broadcast over the vocabulary.

    top_k, top_p and log_min_p hold the filtered rows only, in the order of ``filtered``.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        eos: Sequence[int],
        salt: int,
        device: torch.device,
        previous: SamplingRows | None,
    ) -> None:
        self._requests = [chunk.request for chunk in chunks]
        self._device = device
        params = [request.sampling for request in self._requests]
        self.seeds = np.array([_seed(request, salt) for request in self._requests], dtype=np.uint64)
        temperatures = [1.0 if p.greedy else max(p.temperature, _MIN_TEMPERATURE) for p in params]
        self.unit_temperature = all(t == 1.0 for t in temperatures)
        self.temperature = self._column(temperatures)

        greedy = [r for r, p in enumerate(params) if p.greedy]
        filtered = [r for r, p in enumerate(params) if not p.greedy and _has_filters(p)]
        plain = sorted(set(range(len(params))) - set(greedy) - set(filtered))
        self.all_greedy = len(greedy) == len(params)
        self.all_plain = len(plain) == len(params)
        self.all_filtered = len(filtered) == len(params)
        self.plain = self._index(plain)
        self.filtered = self._index(filtered)
        self.top_k = self._index([params[r].top_k for r in filtered]).unsqueeze(1)
        self.top_p = self._column([params[r].top_p for r in filtered])
        self.log_min_p = self._column([math.log(p) if (p := params[r].min_p) > 0 else -math.inf for r in filtered])
        # One more than the largest k shows whether the k-th value is tied with the next.
        self.candidates = max((params[r].top_k + 1 for r in filtered), default=0)

        self.forced_rows = [r for r, p in enumerate(params) if p.forced_ids]
        """Rows whose tokens are given: what is drawn there is put aside."""
        self.forced = self._index(self.forced_rows)

        self.logprob_rows = [r for r, p in enumerate(params) if p.top_logprobs is not None]
        self.logprob_counts = [params[r].top_logprobs or 0 for r in self.logprob_rows]
        self.most_alternatives = max(self.logprob_counts, default=0)
        self.logprob_index = self._index(self.logprob_rows)

        biases = [(r, token, bias) for r, p in enumerate(params) for token, bias in p.logit_bias.items()]
        self._bias_rows = self._index([r for r, _, _ in biases])
        self._bias_tokens = self._index([token for _, token, _ in biases])
        self._biases = torch.tensor([bias for _, _, bias in biases], dtype=torch.float32).to(device)
        self._minimums = [
            (r, p.min_tokens, sorted(p.stop_token_ids | (frozenset() if p.ignore_eos else frozenset(eos))))
            for r, p in enumerate(params)
            if p.min_tokens > 0
        ]
        kept: dict[int, _Counts] = {}
        if previous is not None:
            kept = {id(previous._requests[row]): counts for row, counts in previous._penalised}
        self._penalised: list[tuple[int, _Counts]] = []
        """Rows with penalties; those of one request share its counts."""
        for row, request in enumerate(self._requests):
            if request.sampling.penalises:
                counts = kept.get(id(request)) or kept.setdefault(id(request), _Counts.of(request))
                self._penalised.append((row, counts))

    def same_requests(self, chunks: Sequence[Chunk]) -> bool:
        mine = self._requests
        return len(mine) == len(chunks) and all(c.request is r for c, r in zip(chunks, mine, strict=True))

    def edit(self, logits: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """Applies logit_bias, min_tokens and penalties to a copy; returns ``logits`` itself if there are none."""
        masked = self._masked(chunks)
        if not len(self._biases) and not masked[0] and not self._penalised:
            return logits
        logits = logits.clone()
        if len(self._biases):
            logits.index_put_((self._bias_rows, self._bias_tokens), self._biases, accumulate=True)
        if masked[0]:
            logits[self._index(masked[0]), self._index(masked[1])] = -math.inf
        for row, counts in self._penalised:
            self._penalise(logits[row], counts, counts.behind(chunks[row]))
        return logits

    def _masked(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[int]]:
        rows: list[int] = []
        tokens: list[int] = []
        for row, minimum, stops in self._minimums:
            if chunks[row].output_count < minimum:
                rows.extend([row] * len(stops))
                tokens.extend(stops)
        return rows, tokens

    def _penalise(self, logits: Tensor, penalised: _Counts, counts: dict[int, int]) -> None:
        """Applies penalties in place to one row [V]; the definitions are those of OpenAI (presence, frequency) and CTRL
        (repetition)."""
        params = penalised.params
        output = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
        if params.repetition_penalty != 1.0:
            index = torch.from_numpy(np.union1d(penalised.prompt, output)).to(self._device)
            values = logits[index]
            factor = params.repetition_penalty
            logits[index] = torch.where(values > 0, values / factor, values * factor)
        if counts and (params.frequency_penalty or params.presence_penalty):
            amounts = np.fromiter(counts.values(), dtype=np.float32, count=len(counts))
            amounts = amounts * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty)
            logits[torch.from_numpy(output).to(self._device)] -= torch.from_numpy(amounts).to(self._device)

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).unsqueeze(1).to(self._device)

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device)


def _has_filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _seed(request: Request, salt: int) -> int:
    """The request's own seed, or one that is fixed for this request and unpredictable to others."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    return hash((salt, request.request_id, request.arrival)) % 2**64
