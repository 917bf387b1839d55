"""Step plan: what a runner computes in one step, as plain data, and the result that it returns. No torch here.

The scheduler owns blocks, slots and positions. The runner turns a StepPlan into tensors, runs the
model and the sampler, and returns a StepResult with one entry for every chunk that asked for a token.

A plan may be made while the ones before it still run. A sequence whose newest token is sampled by such a step decodes
the token ``PENDING``, which the runner takes from where the sampler leaves it on the device.

With speculation the runner draws draft tokens behind a step, proposals for the next tokens of each answer, and keeps
them. The next step's chunk of the answer may end with some of them (``DRAFT``), and a token is sampled behind each of
its tokens. A draft token is accepted if the token sampled before it, drawn with the request's own noise as always, is
the same; then the one sampled behind it counts too. So a request's tokens are the same with and without draft tokens.
The runner decides that without the host: it knows how many tokens of a slot are computed, and rolls the state back to
the last accepted token. The plan's positions and counts are the least ones, as if all draft tokens in flight were
rejected; the host learns from ``StepResult.accepted`` how many there are.
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

MOST_DRAFT_TOKENS = 16
"""Most draft tokens of a chunk, with any drafter."""

MOST_VERIFYING = 32
"""Most chunks of a step with draft tokens."""


def most_sampled_rows(max_num_seqs: int, draft_tokens: int) -> int:
    """Most sampled rows of a step with so many draft tokens a chunk, or none."""
    return max(max_num_seqs, min(max_num_seqs, MOST_VERIFYING) * (1 + draft_tokens))


FIRST_SNAPSHOT = 8
"""Least tokens from the start of a chunk to its first snapshot: kernels read the last few tokens of the convolution
from the slot that they write at the end."""

NO_LIMIT = 2**31 - 1

PENDING = -1
"""Token id in ``Chunk.token_ids`` for the token that the previous step samples for the same slot, not known on the
host."""

DRAFT = -2
"""Token id in ``Chunk.token_ids`` for a draft token that the previous step leaves on the device for the same slot."""


class Chunk(NamedTuple):
    """Chunk: consecutive tokens of one sequence that this step computes.

    A decode is a chunk of one token that samples; a prefill chunk may be any length and samples only if it reaches
    the end of the known tokens. ``blocks`` covers at least ``start + len(token_ids)`` positions.

    A named tuple, as SampledToken, because one is made for every row of every step; a frozen dataclass takes four times
    as long.
    """

    request: Request
    token_ids: Sequence[int]
    """Token ids; a decode whose token the unfinished step before it samples is of ``(PENDING,)``, with draft tokens of
    ``(PENDING, DRAFT, ...)``. Its first token may also be known and draft tokens follow."""
    start: int
    """Position of the first token = number of tokens whose KV and state are already in the cache. Of a pending token
    the least one, see above."""
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
    max_output: int = NO_LIMIT
    """Number of output tokens at which the request ends. The runner computes nothing behind that of a request that may
    have draft tokens (``SamplingParams.draftable``), nor behind its stop tokens."""
    num_draft_tokens: int = 0
    """Number of draft tokens at the end of ``token_ids``. Each adds a sampled row."""
    out_slot: int = 0
    """State slot to write to; 0: ``slot``. Otherwise the convolution and recurrent state of ``slot`` stay unchanged.
    Only segments() have one."""
    drafted_ids: Sequence[int] = ()
    """Tokens behind ``output_ids`` that a sampled row follows, of its own step: only ``rows`` have them."""
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
        """Chunks of the sampled rows, one for each; they differ in the output count and the tokens that they follow."""
        return [self.followed_by(self.drafts[:row]) for row in range(self.sampled_rows)]

    @property
    def drafts(self) -> Sequence[int]:
        """Draft tokens at the end of ``token_ids``."""
        return self.token_ids[len(self.token_ids) - self.num_draft_tokens :]

    def followed_by(self, token_ids: Sequence[int]) -> Chunk:
        """Chunk of a sampled row that follows these tokens of its step as well."""
        return self._replace(
            output_count=self.output_count + len(token_ids), drafted_ids=(*self.drafted_ids, *token_ids)
        )

    @property
    def is_decode(self) -> bool:
        return self.samples and self.start > 0 and len(self.token_ids) == 1 + self.num_draft_tokens


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
    """Step plan: one iteration. ``chunks`` has decodes first, then prefill chunks. A step with draft tokens has decodes
    only, at most MOST_VERIFYING."""

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
    drafts: bool = False
    """True if the drafter runs over the rows of the step: its keys and values of them are wanted later."""
    num_draft_tokens: int = 0
    """Draft tokens to draw behind each chunk that samples, for the next step; 0 without ``drafts``."""

    @property
    def num_decodes(self) -> int:
        return bisect_left(self.chunks, True, key=lambda chunk: not chunk.is_decode)

    @property
    def num_decode_tokens(self) -> int:
        """Number of tokens of the decodes, draft tokens included."""
        return sum(len(chunk.token_ids) for chunk in self.chunks[: self.num_decodes])

    @property
    def verifies(self) -> bool:
        """True if it has draft tokens."""
        return any(chunk.num_draft_tokens for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step, in the order of the plan's chunks that sample."""

    tokens: Sequence[SampledToken]
    """Sampled tokens, one for each sampled row: those of a chunk with draft tokens that count come first."""
    accepted: Sequence[int] = ()
    """With speculation: for each chunk that samples, how many of its tokens count; 0: its request ended in a step
    before. Without: empty, and every token counts."""
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
