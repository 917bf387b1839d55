"""Completions that a model samples offline: packed prompts, then one token a step of all that go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.engine.models.batch import ForwardBatch
from services.engine.models.config import ModelConfig
from services.engine.models.footprint import Formats, block_bytes, slot_bytes
from services.engine.models.interface import CausalLM

_BLOCK = 16


@dataclass(slots=True)
class _Sequence:
    """One completion under way."""

    prompt: Sequence[int]
    slot: int
    first_block: int
    blocks: int
    completion: list[int] = field(default_factory=list)

    @property
    def fresh(self) -> Sequence[int]:
        """Tokens that the model has not read yet."""
        return self.completion[-1:] or self.prompt

    @property
    def read(self) -> int:
        """Tokens that it has read."""
        return len(self.prompt) + len(self.completion) - 1 if self.completion else 0


class OfflineSampler:
    """Samples with a model's serving forward in plain torch.

    Args:
        ends: tokens that end a completion; the one that did is its last.
        max_new_tokens: of a completion.
        temperature: 0: the likeliest token.
        tokens_at_once: prompts are sampled together as far as they and their completions have so few tokens; one at
            least.
        seed: of the draws. Which prompts are sampled together has a say in them, too.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        ends: Sequence[int],
        max_new_tokens: int,
        temperature: float,
        tokens_at_once: int,
        seed: int = 0,
        give_way: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._ends, self._most = model, frozenset(ends), max_new_tokens
        self._temperature, self._at_once, self._give_way = temperature, tokens_at_once, give_way
        self._generator = torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def sample(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """A completion of each prompt."""
        done: list[list[int]] = []
        start = 0
        while start < len(prompts):
            end, tokens = start, 0
            while end < len(prompts) and (end == start or tokens + len(prompts[end]) + self._most <= self._at_once):
                tokens += len(prompts[end]) + self._most
                end += 1
            done += self._together(prompts[start:end])
            start = end
        return done

    def _together(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        everything, first = [], 1
        for slot, prompt in enumerate(prompts, start=1):
            blocks = -(-(len(prompt) + self._most) // _BLOCK)
            everything.append(_Sequence(prompt, slot, first, blocks))
            first += blocks
        cache = self._model.allocate_cache(first, _BLOCK, len(prompts) + 1)
        left = everything
        while left:
            self._give_way()
            hidden = self._model.forward(self._batch(left, decodes=bool(left[0].completion)), cache, None)
            for sequence, token in zip(left, self._drawn(self._model.logits(hidden)), strict=True):
                sequence.completion.append(token)
            left = [one for one in left if one.completion[-1] not in self._ends and len(one.completion) < self._most]
        return [sequence.completion for sequence in everything]

    def _drawn(self, logits: Tensor) -> list[int]:
        if self._temperature == 0:
            return [int(token) for token in logits.argmax(-1).tolist()]
        chances = torch.softmax(logits / self._temperature, -1).cpu()
        return [int(token) for token in torch.multinomial(chances, 1, generator=self._generator)[:, 0].tolist()]

    def _batch(self, sequences: Sequence[_Sequence], *, decodes: bool) -> ForwardBatch:
        device = self._model.device

        def tensor(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        lengths = [len(one.fresh) for one in sequences]
        places = [one.first_block * _BLOCK + at for one in sequences for at in _positions(one)]
        tables = torch.zeros(len(sequences), max(one.blocks for one in sequences), dtype=torch.int64)
        for row, one in enumerate(sequences):
            tables[row, : one.blocks] = torch.arange(one.first_block, one.first_block + one.blocks)
        return ForwardBatch(
            token_ids=tensor([token for one in sequences for token in one.fresh]),
            positions=tensor([at for one in sequences for at in _positions(one)]),
            kv_slots=tensor(places),
            block_tables=tables.to(device),
            state_slots=tensor([one.slot for one in sequences]),
            adapter_slots=tensor([0] * len(sequences)),
            has_adapters=False,
            num_decodes=len(sequences) if decodes else 0,
            lengths=lengths,
            starts=[one.read for one in sequences],
            logit_rows=torch.cumsum(tensor(lengths), 0) - 1,
        )


def _positions(sequence: _Sequence) -> range:
    return range(sequence.read, sequence.read + len(sequence.fresh))


def cache_bytes(config: ModelConfig, sequences: int, tokens: int, itemsize: int) -> int:
    """Bytes of the caches of so many sequences of so many tokens each."""
    formats = Formats(itemsize=itemsize)
    blocks = 1 + sequences * -(-tokens // _BLOCK)
    return blocks * block_bytes(config, _BLOCK, formats) + (sequences + 1) * slot_bytes(config, formats)
