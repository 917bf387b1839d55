"""Step plan: what a runner computes in one step, as plain data, and the result that it returns. No torch here.

The scheduler owns blocks, slots and positions. The runner turns a StepPlan into tensors, runs the
model and the sampler, and returns a StepResult with one entry for every chunk that asked for a token.

A plan may be made while the one before it still runs. A sequence whose newest token is sampled by that step decodes the
token ``PENDING``, which the runner takes from where the sampler leaves it on the device.

With speculation a chunk may end with a draft token, a proposal for the token that it will sample. The draft token is
accepted if the sampled token, drawn with the request's own noise as always, is the same. Then the token sampled behind
it counts too, so a request's tokens are the same with and without draft tokens. A chunk with a draft token writes its
state to another slot than it read. If the draft token is rejected, the old state is still there, and the accepted
tokens are computed again with the next chunk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from services.engine.requests.outputs import SampledToken
from services.engine.requests.prompt_scoring import PromptRead, PromptReport
from services.engine.requests.request import Request

MOST_VERIFIED = 4
"""Most tokens of a chunk with a draft token, the draft token included. Tokens behind rejected draft tokens are computed
again, so a chunk grows until it reaches this limit and goes without a draft token."""

FIRST_SNAPSHOT = 8
"""Least tokens from the start of a chunk to its first snapshot: kernels read the last few tokens of the convolution
from the slot that they write at the end."""

PENDING = -1
"""Token id in ``Chunk.token_ids`` for the token that the previous step samples for the same slot, not known on the
host."""


class Chunk(NamedTuple):
    """Chunk: consecutive tokens of one sequence that this step computes.

    A decode is a chunk of one token that samples; a prefill chunk may be any length and samples only if it reaches
    the end of the known tokens. ``blocks`` covers at least ``start + len(token_ids)`` positions.

    A named tuple, as SampledToken, because one is made for every row of every step; a frozen dataclass takes four times
    as long.
    """

    request: Request
    token_ids: Sequence[int]
    """Token ids; ``(PENDING,)`` for a decode whose token the unfinished step before it samples."""
    start: int
    """Position of the first token = number of tokens whose KV and state are already in the cache."""
    blocks: Sequence[int]
    """Block table of the sequence, never containing block 0 (scratch)."""
    slot: int
    """State slot, never 0 (scratch)."""
    samples: bool
    output_ids: Sequence[int]
    """Tokens generated so far, oldest first: the live list, which lacks a pending token and grows while this plan is in
    flight."""
    output_count: int
    """Tokens generated before this step, a pending one included: for min_tokens and the seed's counter."""
    num_draft_tokens: int = 0
    """Number of draft tokens at the end of ``token_ids``: 0 or 1. Each adds a sampled row."""
    out_slot: int = 0
    """State slot to write to; 0: ``slot``. Otherwise the convolution and recurrent state of ``slot`` stay unchanged."""
    next_id: int = PENDING
    """Token behind a chunk that does not sample."""
    masked: bool = False
    """True if the token is sampled under a mask, which is made when the tokens before it are known."""
    snapshots: Sequence[tuple[int, int]] = ()
    """Snapshots inside the chunk as (position, slot), ascending: the state behind the tokens before the position also
    goes to that slot. Positions are at least FIRST_SNAPSHOT behind the chunk's start, and before its end."""

    @property
    def forced_id(self) -> int:
        """Given token to take instead of a sampled one, or -1."""
        forced = self.request.sampling.forced_ids
        return forced[self.output_count] if forced else -1

    @property
    def sampled_rows(self) -> int:
        return 1 + self.num_draft_tokens if self.samples else 0

    @property
    def rows(self) -> list[Chunk]:
        """Chunks of the sampled rows, one for each; they differ only in the output count."""
        if not self.num_draft_tokens:
            return [self] if self.samples else []
        return [self, self._replace(output_count=self.output_count + 1)]

    @property
    def verifies(self) -> bool:
        """True if it decodes several tokens of an answer: with a draft token, or again the tokens behind a rejected
        one."""
        length = len(self.token_ids)
        return self.samples and 1 < length <= MOST_VERIFIED and self.start >= len(self.request.prompt_token_ids)

    @property
    def is_decode(self) -> bool:
        return self.samples and len(self.token_ids) == 1 and self.start > 0


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy of the recurrent and convolution state of all DeltaNet layers between two slots."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy of the keys and values of one block in all full-attention layers, before the model runs. A sequence that
    resumes from a prefix ending inside the source fills up the target."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Step plan: one iteration. ``chunks`` has decodes first, then those that verify, then prefill chunks."""

    chunks: Sequence[Chunk]
    copies_before: Sequence[StateCopy] = ()
    """Snapshots to restore into live slots before the model runs."""
    copies_after: Sequence[StateCopy] = ()
    """Live slots to snapshot after the model has run."""
    block_copies: Sequence[BlockCopy] = ()
    """Block copies before the model runs. No block is the target of two, or both a source and a target."""
    reads: Sequence[PromptRead] = ()
    """Prompt rows to read beside the sampled ones."""
    masked: bool = False
    """True if a chunk is masked: the runner gets the masks after the plan."""

    @property
    def num_decodes(self) -> int:
        return bisect_left(self.chunks, True, key=lambda chunk: not chunk.is_decode)

    @property
    def num_verified(self) -> int:
        """Number of tokens of the chunks that verify."""
        return sum(len(chunk.token_ids) for chunk in self.chunks[self.num_decodes :] if chunk.verifies)

    @property
    def num_tokens(self) -> int:
        decodes = self.num_decodes
        return decodes + sum(len(chunk.token_ids) for chunk in self.chunks[decodes:])


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step, in the order of the plan's chunks that sample."""

    tokens: Sequence[SampledToken]
    """Sampled tokens, one for each sampled row: two for a chunk with a draft token."""
    draft_token_ids: Sequence[int] = ()
    """Draft tokens, with speculation: for each chunk that samples, the proposal behind its accepted tokens, or -1."""
    reports: Sequence[PromptReport] = ()
    """Report for each of the plan's reads."""


def segments(chunk: Chunk) -> Sequence[Chunk]:
    """Segments of a chunk: up to its first snapshot, from there to the next one, and so on to its end. Each is a chunk
    without snapshots that continues from the state behind the one before. Its slot is the chunk's; its out_slot is
    where the state behind it goes."""
    if not chunk.snapshots:
        return (chunk,)
    known, begin = chunk.token_ids, chunk.start
    ends = [*chunk.snapshots, (begin + len(known), chunk.out_slot or chunk.slot)]
    parts: list[Chunk] = []
    for end, slot in ends:
        part = known[begin - chunk.start : end - chunk.start]
        parts.append(chunk._replace(token_ids=part, start=begin, out_slot=slot, snapshots=()))
        begin = end
    between = (part._replace(samples=False, next_id=after.token_ids[0]) for part, after in pairwise(parts))
    return [*between, parts[-1]]


def split_at_snapshots(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """Segments of all chunks."""
    if not any(chunk.snapshots for chunk in chunks):
        return chunks
    return [link for chunk in chunks for link in segments(chunk)]
