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
    """End of a request: reason, error and last token."""

    reason: FinishReason
    error: TemperError | None = None
    token: SampledToken | None = None
    """Last token, if it is reported with the end."""


class Sequence:
    """Sequence: a request with its output, blocks and slot; only the scheduler changes it.

    Plans may be in flight; everything here is as it will be when they have run. ``computed`` tokens have their KV and
    state in the cache. The ``known`` tokens are prompt and output; the steps in flight sample the last ``pending`` of
    them.
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
        """Cache namespace: it shares prefixes with requests of the same one."""
        self.prompt = tokens_to_bytes(request.prompt_token_ids)
        """Prompt tokens as bytes."""
        self.max_output = max_output
        sampling = request.sampling
        self._min_tokens = sampling.min_tokens
        self._stops = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | eos_token_ids
        self.rank: Rank = (request.priority, request.arrival, number)
        """Rank: the lower one goes first; unique."""
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
        """Matcher of the constraint; it has taken all tokens but the pending ones. None: there is no constraint."""
        self.known = len(request.prompt_token_ids)
        self.known_at_end = self.known + max_output
        """Value of ``known`` if nothing ends the answer before; its last token is never fed back."""
        self.pending = 0
        self.computed = 0
        self.snapshot_positions: tuple[int, ...] = ()
        """Positions in the prompt at which to save the state, ascending."""
        self.load_tried = False
        """True once the tiers were searched for it."""
        self.held_up = False
        """True once it was refused a seat or memory: nobody behind it overtakes it any more."""
        self.short = False
        """True if it had few tokens to compute when it started; the rest of a split prompt does not count as short."""
        self.prefix_match: PrefixMatch | None = None
        """Latest match with the prefix cache while it waits."""
        self.load_id = 0
        """Number of the load that it waits for; 0: it waits for none."""
        self.load_patience = 0.0
        """Seconds for which waiting for the load is worth it."""
        self.load_began = 0.0
        self.load_until = 0.0
        """Time at which it stops waiting for the load."""
        self.load_tier: Tier | None = None
        """Slowest tier that the load comes from."""
        self.loaded_tokens = 0
        """Tokens of the prompt that the load brings."""
        self.reading = PromptProgress.of(request)
        """Progress of reading the prompt's rows; None: nothing of the prompt is reported."""
        self.cached_tokens: int | None = None
        """Prompt tokens that came from the prefix cache; None until it is first admitted."""
        self.cached_from: Tier | None = None
        """Tier that the cached tokens came from; None: the device had them."""
        self.saved_seconds = 0.0
        """Time that computing the cached tokens would have taken, less the wait for a tier."""
        self.preemptions = 0
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.reported = False
        self.ended = False

    def first_scheduled(self, now: float, seconds: float) -> None:
        """Records that the sequence runs for the first time.

        Args:
            seconds: time that computing the cached tokens would have taken.
        """
        self.cached_tokens = self.computed
        self.scheduled_at = now
        self.saved_seconds = seconds
        if 0 < self.loaded_tokens <= self.computed:
            self.cached_from = self.load_tier
            self.saved_seconds = seconds - (now - self.load_began)

    def all_tokens(self) -> bytes:
        """Prompt and output tokens as bytes, TOKEN_BYTES each, without the pending ones."""
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
        """True if the sequence neither runs nor has ended."""
        return not self.slot and not self.ended

    @property
    def uncomputed(self) -> int:
        return self.known - self.computed

    @property
    def takes_draft(self) -> bool:
        """True if there is a draft token and a token behind it is still wanted."""
        return (
            self.draft_token >= 0
            and self.spare_slot > 0
            and self.uncomputed < MOST_VERIFIED
            and self.known + 1 < self.known_at_end
        )

    def verify(self) -> Chunk:
        """Plans all uncomputed tokens and, if it is of use, the draft token behind them.

        With a draft token nothing counts as computed before the results are in; see ``accept``.
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
        """Takes the oldest pending token. Returns its update, and how the request ends with it; either may be None."""
        if token.error is not None:
            return None, Ending(FinishReason.ERROR, TemperError(token.error))
        try:
            reason = self.append(token, now)
        except ConstraintBroken as error:
            return None, Ending(FinishReason.ERROR, error)
        if reason is None:
            return self.update(token), None
        if reason is FinishReason.STOP and token.token_id not in self._stops:
            # The constraint allows nothing more. A stop token is no part of the text, but this token is.
            return self.update(token), Ending(reason)
        return None, Ending(reason, token=token)

    def append(self, token: SampledToken, now: float) -> FinishReason | None:
        """Appends the oldest pending token; returns why it is the last, None if it is not.

        Raises:
            ConstraintBroken: the constraint does not allow the token.
        """
        output = self.output_ids
        if not output:
            self.first_token_at = now
        output.append(token.token_id)
        self.sampling_logprobs.append(token.sampling_logprob)
        self.pending -= 1
        count = len(output)
        # As in the sampler's mask: a stop token may be chosen once there are min_tokens other tokens.
        if count > self._min_tokens and token.token_id in self._stops:
            return FinishReason.STOP
        if self.matcher is not None and self.matcher.advance(token.token_id):
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.max_output else None

    def cut(self, count: int) -> None:
        """Drops all but the first ``count`` output tokens of a request that is about to end."""
        self.output_ids = self.output_ids[:count]
        self.sampling_logprobs = self.sampling_logprobs[:count]

    def update(self, token: SampledToken) -> SequenceUpdate:
        """Update for a token that is not the last."""
        if self.reported:
            return SequenceUpdate(self.request.request_id, token)
        self.reported = True
        version = self.request.pin.version
        return SequenceUpdate(self.request.request_id, token, cached_tokens=self.cached_tokens, adapter=version)

    def report(self, report: PromptReport, read: PromptRead) -> SequenceUpdate:
        """Update with what was read of the prompt."""
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
