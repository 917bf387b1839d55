"""What the scheduler tells the runner to do in one step, and what the runner answers. No torch here.

The scheduler owns all bookkeeping (blocks, slots, positions); the runner turns a StepPlan into tensors, runs the
model and the sampler, and returns a StepResult with one entry for every chunk that asked for a token.

A plan may be made while the one before it still runs. A sequence whose newest token that step samples then decodes the
token ``PENDING``: the runner takes it from where the sampler leaves it on the device.

With speculation a chunk may end with a draft token, a proposal for the token that it will sample. It is accepted if the
token sampled before it, drawn with the request's own noise as always, is that very token; then the token sampled behind
it counts too. So a request's tokens are the same with and without draft tokens. A chunk with a draft token writes its
state to another slot than it read: if the draft token is rejected, the old state is still there, and the tokens that
count go in again with the next chunk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import NamedTuple

from services.engine.requests.outputs import SampledToken
from services.engine.requests.prompt_scoring import PromptRead, PromptReport
from services.engine.requests.request import Request

MOST_VERIFIED = 4
"""Tokens of a chunk with a draft token at most, the draft token included: so often can tokens go in again before a
chunk goes without."""

FIRST_SNAPSHOT = 8
"""A chunk's first snapshot lies at least so many tokens behind its start: kernels read the convolution's past, a few
tokens, from the slot that they write in the end."""

PENDING = -1
"""In ``Chunk.token_ids``: the token that the previous step samples for the same slot, unknown on the host yet."""


class Chunk(NamedTuple):
    """A run of consecutive tokens of one sequence that this step computes.

    A decode is a chunk of one token that samples; a prefill chunk may be any length and samples only if it reaches
    the end of the known tokens. ``blocks`` covers at least ``start + len(token_ids)`` positions.

    A named tuple, as SampledToken, because one is made for every row of every step: a frozen dataclass takes four times
    as long.
    """

    request: Request
    token_ids: SequenceABC[int]
    """``(PENDING,)`` for a decode whose token the step before, still unfinished, samples."""
    start: int
    """Position of the first token = number of tokens whose KV and state are already in the cache."""
    blocks: SequenceABC[int]
    """Block table of the sequence, never containing block 0 (scratch)."""
    slot: int
    """State slot, never 0 (scratch)."""
    samples: bool
    output_ids: SequenceABC[int]
    """Tokens generated so far, oldest first: the live list, which lacks a pending token and grows while this plan is in
    flight."""
    output_count: int
    """Tokens generated before this step, a pending one included: for min_tokens and the seed's counter."""
    num_draft_tokens: int = 0
    """How many of the last ``token_ids`` are draft tokens: 0 or 1. Each is one more sampled row."""
    out_slot: int = 0
    """State slot to write to, if it is not ``slot``; the conv and recurrent state of ``slot`` then stay as they are."""
    next_id: int = PENDING
    """The token behind a chunk that does not sample."""
    masked: bool = False
    """The token is sampled under a mask that is made when the tokens before it are known."""
    snapshots: SequenceABC[tuple[int, int]] = ()
    """(position, slot), ascending: the state behind the tokens before that position, which lies inside of the chunk (at
    least FIRST_SNAPSHOT behind its start, and before its end), goes to that slot as well."""

    @property
    def forced_id(self) -> int:
        """The token that is to be taken here, -1 where one is drawn."""
        forced = self.request.sampling.forced_ids
        return forced[self.output_count] if forced else -1

    @property
    def sampled_rows(self) -> int:
        return 1 + self.num_draft_tokens if self.samples else 0

    @property
    def rows(self) -> list[Chunk]:
        """One chunk for each sampled row, alike but for the output count."""
        if not self.num_draft_tokens:
            return [self] if self.samples else []
        return [self, self._replace(output_count=self.output_count + 1)]

    @property
    def verifies(self) -> bool:
        """Whether it goes on with an answer, a draft token or tokens behind a wrong one in it: a decode of several
        tokens."""
        length = len(self.token_ids)
        return self.samples and 1 < length <= MOST_VERIFIED and self.start >= len(self.request.prompt_token_ids)

    @property
    def is_decode(self) -> bool:
        return self.samples and len(self.token_ids) == 1 and self.start > 0


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy the recurrent and convolution state of all DeltaNet layers between slots."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the keys and values of one block in all full-attention layers, before the model runs: the sequence that is
    to fill the target goes on behind a prefix that ends inside of the source."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration. Decodes come first in ``chunks``, then those that verify, then prefill chunks."""

    chunks: SequenceABC[Chunk]
    copies_before: SequenceABC[StateCopy] = ()
    """Snapshots to restore into live slots before the model runs."""
    copies_after: SequenceABC[StateCopy] = ()
    """Live slots to snapshot after the model has run."""
    block_copies: SequenceABC[BlockCopy] = ()
    """Before the model runs. No block is the target of two, or both a source and a target."""
    reads: SequenceABC[PromptRead] = ()
    """What is read of prompts beside the tokens to sample."""
    masked: bool = False
    """Whether a chunk is: the runner gets masks behind the plan."""

    @property
    def num_decodes(self) -> int:
        return bisect_left(self.chunks, True, key=lambda chunk: not chunk.is_decode)

    @property
    def num_verified(self) -> int:
        """Tokens of the chunks that verify."""
        return sum(len(chunk.token_ids) for chunk in self.chunks[self.num_decodes :] if chunk.verifies)

    @property
    def num_tokens(self) -> int:
        decodes = self.num_decodes
        return decodes + sum(len(chunk.token_ids) for chunk in self.chunks[decodes:])


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the plan's chunks that have ``samples`` set gave, in their order."""

    tokens: SequenceABC[SampledToken]
    """One for each sampled row: two for a chunk with a draft token."""
    draft_token_ids: SequenceABC[int] = ()
    """Draft tokens, with speculation: for each chunk that samples one for the position behind the tokens that count, or
    -1."""
    reports: SequenceABC[PromptReport] = ()
    """One for each of the plan's reads."""
