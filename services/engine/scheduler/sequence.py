"""Sequence: a request inside the scheduler, with its output, blocks and state slot. No torch here."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceABC
from typing import NamedTuple, cast

from services.common.errors import TemperError
from services.engine.constraints.matcher import ConstraintBroken, OutputMatcher
from services.engine.kv_cache.keys import Namespace, Tier, namespace_of, tokens_to_bytes
from services.engine.kv_cache.radix_tree import PrefixMatch
from services.engine.requests.outputs import Finished, SampledToken, SequenceUpdate
from services.engine.requests.prompt_scoring import PromptProgress, PromptRead, PromptReport
from services.engine.requests.request import FinishReason, Request
from services.engine.scheduler.step_plan import MOST_VERIFIED, PENDING, Chunk

Rank = tuple[int, int, int]


class Ending(NamedTuple):
    """How a request ends."""

    reason: FinishReason
    error: TemperError | None = None
    token: SampledToken | None = None
    """The last one, if it is told with the end."""


class Sequence:
    """One request with its output, blocks and slot; only the scheduler changes it.

    Plans may be in flight, and everything here is as it will be when they have run: ``computed`` tokens have their KV
    and state in the cache; the ``known`` ones are prompt and output, the last ``pending`` of which the steps in flight
    sample.
    """

    __slots__ = (
        "_min_tokens",
        "_stops",
        "blocks",
        "cached_from",
        "cached_tokens",
        "computed",
        "draft_token",
        "draftable",
        "ended",
        "first_token_at",
        "held_up",
        "known",
        "known_at_end",
        "load_began",
        "load_id",
        "load_patience",
        "load_tier",
        "load_tried",
        "load_until",
        "loaded_tokens",
        "matcher",
        "max_output",
        "namespace",
        "output_ids",
        "pending",
        "preemptions",
        "prefix_match",
        "prompt",
        "rank",
        "reading",
        "reported",
        "request",
        "sampling_logprobs",
        "saved_seconds",
        "scheduled_at",
        "short",
        "slot",
        "snapshot_positions",
        "spare_slot",
    )

    def __init__(self, request: Request, max_output: int, number: int, eos_token_ids: frozenset[int]) -> None:
        self.request = request
        self.namespace: Namespace = namespace_of(request.pin.digest, request.cache_salt)
        """What it may share histories with."""
        self.prompt = tokens_to_bytes(request.prompt_token_ids)
        """Its tokens as bytes."""
        self.max_output = max_output
        sampling = request.sampling
        self._min_tokens = sampling.min_tokens
        self._stops = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | eos_token_ids
        self.rank: Rank = (request.priority, request.arrival, number)
        """Lower goes first; unique."""
        self.output_ids: list[int] = []
        self.sampling_logprobs = array("f")
        self.blocks: list[int] = []
        self.slot = 0
        self.spare_slot = 0
        """State slot that a chunk with a draft token writes to, with speculation; it and ``slot`` change roles if the
        draft token is accepted."""
        self.draft_token = -1
        """Draft token proposed for the next position, or -1."""
        self.draftable = sampling.draftable
        self.matcher = cast(OutputMatcher | None, request.matcher)
        """What may follow the output; it knows all tokens but the pending ones."""
        self.known = len(request.prompt_token_ids)
        self.known_at_end = self.known + max_output
        """What ``known`` reaches if nothing ends the answer before; never fed back."""
        self.pending = 0
        self.computed = 0
        self.snapshot_positions: tuple[int, ...] = ()
        """Positions behind which to take a snapshot of the state on the way, ascending."""
        self.load_tried = False
        """Whether it has been looked for in the tiers."""
        self.held_up = False
        """Whether it could have started last time but for a seat or its memory: nobody behind it passes it any more."""
        self.short = False
        """Whether it lacked little when it began; the rest of a prompt that was cut is no short one."""
        self.prefix_match: PrefixMatch | None = None
        """What the prefix cache had of it when it was looked for while it waits."""
        self.load_id = 0
        """Of the load that it waits for; 0: it waits for none."""
        self.load_patience = 0.0
        """Seconds that the load is worth waiting for."""
        self.load_began = 0.0
        self.load_until = 0.0
        """When it no longer waits."""
        self.load_tier: Tier | None = None
        """Where that comes from."""
        self.loaded_tokens = 0
        """How far it reaches."""
        self.reading = PromptProgress.of(request)
        """None: the prompt is computed and nothing of it is told."""
        self.cached_tokens: int | None = None
        """None until it is admitted the first time."""
        self.cached_from: Tier | None = None
        """The tier that they came from; None: the device had them."""
        self.saved_seconds = 0.0
        """What computing them would have taken, less the wait for a tier."""
        self.preemptions = 0
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.reported = False
        self.ended = False

    def first_scheduled(self, now: float, seconds: float) -> None:
        """It runs for the first time.

        Args:
            seconds: what computing the tokens would have taken that come from the cache.
        """
        self.cached_tokens = self.computed
        self.scheduled_at = now
        self.saved_seconds = seconds
        if 0 < self.loaded_tokens <= self.computed:
            self.cached_from = self.load_tier
            self.saved_seconds = seconds - (now - self.load_began)

    def all_tokens(self) -> bytes:
        """Prompt and output as bytes, TOKEN_BYTES a token, without what is pending."""
        return self.prompt + tokens_to_bytes(self.output_ids) if self.output_ids else self.prompt

    def tokens(self, start: int, end: int) -> SequenceABC[int]:
        """Prompt and output tokens in [start, end)."""
        prompt = self.request.prompt_token_ids
        length = len(prompt)
        if end <= length:
            return prompt[start:end]
        if start >= length:
            return self.output_ids[start - length : end - length]
        return [*prompt[start:], *self.output_ids[: end - length]]

    def advance(self, end: int, snapshots: SequenceABC[tuple[int, int]] = ()) -> Chunk:
        """Plans the tokens up to position ``end``; blocks and outputs of the chunk are the live lists, not copies.

        Args:
            snapshots: see Chunk.
        """
        known, start = self.known, self.computed
        samples = end == known
        matcher = self.matcher
        output_count = known - len(self.request.prompt_token_ids)
        chunk = Chunk(
            self.request,
            (PENDING,) if self.pending else self.tokens(start, end),
            start,
            self.blocks,
            self.slot,
            samples,
            self.output_ids,
            output_count,
            next_id=PENDING if samples else self.tokens(end, end + 1)[0],
            masked=samples and matcher is not None and matcher.may_mask(output_count),
            snapshots=snapshots,
        )
        self.computed = end
        if samples:
            self.known = known + 1
            self.pending += 1
        return chunk

    @property
    def waiting(self) -> bool:
        """Whether the sequence neither runs nor has ended."""
        return not self.slot and not self.ended

    @property
    def uncomputed(self) -> int:
        return self.known - self.computed

    @property
    def takes_draft(self) -> bool:
        """Whether there is a draft token and a token behind it is still wanted."""
        return (
            self.draft_token >= 0
            and self.spare_slot > 0
            and self.uncomputed < MOST_VERIFIED
            and self.known + 1 < self.known_at_end
        )

    def verify(self) -> Chunk:
        """Plans all tokens that are uncomputed and, where it is of use, the draft token behind them.

        With a draft token nothing counts as computed before the results are in: see ``accept``.
        """
        end = self.known
        if not self.takes_draft:
            return self.advance(end)
        chunk = Chunk(
            self.request,
            [*self.tokens(self.computed, end), self.draft_token],
            self.computed,
            self.blocks,
            self.slot,
            True,
            self.output_ids,
            len(self.output_ids),
            num_draft_tokens=1,
            out_slot=self.spare_slot,
        )
        self.known = end + 1
        self.pending += 1
        return chunk

    def accept(self, chunk: Chunk) -> None:
        """Accepts the draft token of a chunk: its tokens are computed, and one more is sampled."""
        self.computed = chunk.start + len(chunk.token_ids)
        self.slot, self.spare_slot = self.spare_slot, self.slot
        self.known += 1
        self.pending += 1

    def take(self, token: SampledToken, now: float) -> tuple[SequenceUpdate | None, Ending | None]:
        """Takes in the oldest pending token: what to tell of it beside how the request ends, and how, if it does."""
        if token.error is not None:
            return None, Ending(FinishReason.ERROR, TemperError(token.error))
        try:
            reason = self.append(token, now)
        except ConstraintBroken as error:
            return None, Ending(FinishReason.ERROR, error)
        if reason is None:
            return self.update(token), None
        if reason is FinishReason.STOP and token.token_id not in self._stops:
            # The language allows nothing more. A token that ends an answer is no part of its text; this one is.
            return self.update(token), Ending(reason)
        return None, Ending(reason, token=token)

    def append(self, token: SampledToken, now: float) -> FinishReason | None:
        """Takes in the oldest pending token; returns why it is the last, None if it is not.

        Raises:
            ConstraintBroken: the token does not belong to the language of the output.
        """
        output = self.output_ids
        if not output:
            self.first_token_at = now
        output.append(token.token_id)
        self.sampling_logprobs.append(token.sampling_logprob)
        self.pending -= 1
        count = len(output)
        # As the sampler masks it: a stop token may be chosen once min_tokens other tokens exist.
        if count > self._min_tokens and token.token_id in self._stops:
            return FinishReason.STOP
        if self.matcher is not None and self.matcher.advance(token.token_id):
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.max_output else None

    def cut(self, count: int) -> None:
        """Forgets all but the first ``count`` output tokens of a request that is about to end."""
        self.output_ids = self.output_ids[:count]
        self.sampling_logprobs = self.sampling_logprobs[:count]

    def update(self, token: SampledToken) -> SequenceUpdate:
        """What to tell of a token that is not the last."""
        if self.reported:
            return SequenceUpdate(self.request.request_id, token)
        self.reported = True
        version = self.request.pin.version
        return SequenceUpdate(self.request.request_id, token, cached_tokens=self.cached_tokens, adapter=version)

    def report(self, report: PromptReport, read: PromptRead) -> SequenceUpdate:
        """What to tell of the prompt."""
        vector = None
        if self.reading is not None and report.pooled is not None:
            vector = self.reading.vector(report.pooled, read)
        first, self.reported = not self.reported, True
        return SequenceUpdate(
            self.request.request_id,
            cached_tokens=self.cached_tokens if first else None,
            adapter=self.request.pin.version if first else None,
            prompt=report.scores,
            embedding=vector,
        )

    def last_update(
        self, reason: FinishReason, error: TemperError | None = None, token: SampledToken | None = None
    ) -> SequenceUpdate:
        first = not self.reported
        return SequenceUpdate(
            self.request.request_id,
            token,
            reason,
            error,
            cached_tokens=self.cached_tokens if first else None,
            adapter=self.request.pin.version if first else None,
            finished=Finished(
                self.request,
                self.output_ids,
                self.sampling_logprobs,
                reason,
                self.cached_tokens or 0,
                self.preemptions,
                self.scheduled_at,
                self.first_token_at,
                self.cached_from,
                self.saved_seconds,
            ),
        )
