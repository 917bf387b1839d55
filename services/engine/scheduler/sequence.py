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
from services.engine.scheduler.draft_depth import Acceptance
from services.engine.scheduler.step_plan import PENDING, Chunk

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
    them. Draft tokens in flight count as rejected: if they are accepted, up to ``uncertain`` more tokens are computed
    and known.
    """

    __slots__ = (
        "_min_tokens",
        "_stops",
        "acceptance",
        "blocks",
        "cached_from",
        "cached_tokens",
        "complete",
        "computed",
        "draftable",
        "drawn",
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
        "uncertain",
    )

    def __init__(
        self,
        request: Request,
        max_output: int,
        number: int,
        eos_token_ids: frozenset[int],
        *,
        speculative: bool = False,
    ) -> None:
        self.request = request
        self.namespace: Namespace = namespace_of(request.pin.digest, request.cache_salt, request.pin.version)
        """Cache namespace: it shares prefixes with requests of the same one."""
        self.prompt = tokens_to_bytes(request.prompt_token_ids)
        """Prompt tokens as bytes."""
        self.max_output = max_output
        sampling = request.sampling
        self._min_tokens = sampling.min_tokens
        self._stops = sampling.stops(eos_token_ids)
        self.rank: Rank = (request.priority, request.arrival, number)
        """Rank: the lower one goes first; unique."""
        self.output_ids: list[int] = []
        self.sampling_logprobs = array("f")
        self.blocks: list[int] = []
        self.slot = 0
        self.draftable = speculative and sampling.draftable
        """True if the runner may accept draft tokens for it, and computes nothing behind its last token."""
        self.acceptance: Acceptance | None = None
        """How many of its draft tokens are accepted; None: it gets none, for good."""
        self.drawn = 0
        """Draft tokens that the plan before the next one draws for it."""
        self.uncertain = 0
        """Draft tokens of its chunks in flight."""
        self.matcher = cast(OutputMatcher | None, request.matcher)
        """Matcher of the constraint; it has taken all tokens but the pending ones. None: there is no constraint."""
        self.complete = False
        """True if the constraint lets nothing follow the output. No draft token in flight counts then: the plan that
        checks them gets its masks after that is known."""
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
            self.max_output,
            next_id=PENDING if samples else self.tokens(end, end + 1)[0],
            masked=samples and self.may_mask(output_count),
            snapshots=snapshots,
        )
        self.computed = end
        if samples:
            self.known = known + 1
            self.pending += 1
        return chunk

    def may_mask(self, output_count: int) -> bool:
        """True if a token may need a mask: that behind so many output tokens or, as draft tokens are in flight, a later
        one."""
        return self.matcher is not None and self.matcher.may_mask(output_count + self.uncertain)

    @property
    def waiting(self) -> bool:
        """True if the sequence neither runs nor has ended."""
        return not self.slot and not self.ended

    @property
    def uncomputed(self) -> int:
        return self.known - self.computed

    @property
    def drafting(self) -> bool:
        """True if it may get draft tokens now or later."""
        return self.acceptance is not None

    @property
    def most_computed(self) -> int:
        """Most tokens that may be computed when the plans in flight have run: what its blocks must cover."""
        return min(self.computed + self.uncertain, self.known_at_end - 1)

    @property
    def most_draft_tokens(self) -> int:
        """Most draft tokens behind the newest planned one that may still be wanted: no row reaches beyond the end."""
        return self.known_at_end - self.known - self.uncertain

    def accept(self, num_draft_tokens: int, accepted: int) -> None:
        """Learns how many tokens of a chunk count; they are pending until they are taken.

        Args:
            num_draft_tokens: the chunk's.
            accepted: at least 1.
        """
        self.known += accepted - 1
        self.pending += accepted - 1
        # A preempted sequence starts again only when nothing samples for it any more: a slot is still the chunk's.
        if self.slot:
            self.computed += accepted - 1
            self.uncertain -= num_draft_tokens

    def computed_at_end(self) -> int | None:
        """Number of tokens that the state in its slot is behind, if it ended or gave way now; None: that is not known,
        because draft tokens are in flight.

        The runner computes nothing behind the last token of a request that may have draft tokens, so the state lacks
        that one. Of others the next plan in flight computes the last token, too.
        """
        output = self.output_ids
        count = len(output)
        if self.draftable and output and (self._stops_at(count, output[-1]) or count >= self.max_output):
            return len(self.request.prompt_token_ids) + count - 1
        return self.computed if self.complete or not self.uncertain else None

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
        if self._stops_at(count, token.token_id):
            return FinishReason.STOP
        if self.matcher is not None and self.matcher.advance(token.token_id):
            self.complete = True
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.max_output else None

    def _stops_at(self, count: int, token_id: int) -> bool:
        """True if an output token of that number ends the output. As in the sampler's mask: a stop token may be chosen
        once there are min_tokens other tokens."""
        return count > self._min_tokens and token_id in self._stops

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
