"""A stand-in for runner and model, so that the scheduler's plans can be executed and checked without torch.

A "state" is the tuple of all tokens that went into it, and a block's "KV" the tokens at its positions. So a wrong
block table, slot, start or snapshot shows up as a wrong history, and the sampled token is a function of the history.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.engine.executors.runner import CompletedStep
from services.engine.requests.outputs import SampledToken
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.draft_depth import StepCosts
from services.engine.scheduler.step_plan import (
    DRAFT,
    FIRST_SNAPSHOT,
    MOST_VERIFYING,
    PENDING,
    Chunk,
    StepPlan,
    StepResult,
)
from tests.unit.engine.toy_reads import toy_reports

VOCAB = 50


def next_token(history: tuple[int, ...]) -> int:
    """Next token of the "model" after these tokens: deterministic, never below 1."""
    return 1 + hash(history) % (VOCAB - 1)


def reference(prompt: tuple[int, ...], count: int) -> list[int]:
    """The first ``count`` tokens a lone request gets."""
    output: list[int] = []
    for _ in range(count):
        output.append(next_token((*prompt, *output)))
    return output


def answer(asked: Request, count: int) -> list[int]:
    """The first ``count`` tokens of a request: those it brings, or what a lone one gets."""
    return list(asked.sampling.forced_ids[:count]) or reference(asked.prompt_token_ids, count)


def behind(asked: Request, history: tuple[int, ...]) -> int:
    """The token of a request behind what it knows."""
    forced = asked.sampling.forced_ids
    return forced[len(history) - len(asked.prompt_token_ids)] if forced else next_token(history)


def request(name: str, prompt: tuple[int, ...], **changes: object) -> Request:
    sampling = {
        key: changes.pop(key)
        for key in ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "presence_penalty", "forced_ids")
        if key in changes
    }
    return Request(name, prompt, SamplingParams(**sampling), **changes)


@dataclass
class Live:
    """What the runner knows of the sequence in a slot."""

    request_id: str
    computed: int
    """Tokens in its state."""
    newest: int
    """Newest token, which is not in the state."""
    ended: bool = False
    drafts: list[int] = field(default_factory=list)
    drawn_in: int = 0
    """Step behind which the draft tokens were drawn."""


class ToyRunner:
    """Executes plans at their launch and fails on every violation of the plan's contract.

    With a depth above 1 it is what a device with a queue is to the host: plans run in the order of their launch, tokens
    that an unfinished step samples are taken from the slot, and the host gets to know them later. The same goes for
    draft tokens and for how many of them are accepted.
    """

    def __init__(self, config: SchedulerConfig, depth: int = 1, costs: StepCosts | None = None) -> None:
        self.config = config
        self.costs = costs
        self._depth = depth
        self.live: dict[int, Live] = {}
        """By slot."""
        self.unfollowed: set[str] = set()
        """Requests that the mtp layer has not seen all tokens of."""
        self.kv: dict[tuple[int, int], tuple[tuple[str, str], int]] = {}
        self.states: dict[int, tuple[tuple[str, str], tuple[int, ...]]] = {}
        self.computed_tokens = 0
        self.steps = 0

    @property
    def depth(self) -> int:
        return self._depth

    def launch(self, plan: StepPlan) -> CompletedStep:
        return CompletedStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        assert plan.chunks
        assert plan.num_tokens <= self.config.token_budget
        assert len(plan.chunks) <= self.config.max_num_seqs
        decodes = [chunk.is_decode for chunk in plan.chunks]
        assert decodes == sorted(decodes, reverse=True), "decodes come first"
        self._check_drafts(plan)
        slots = [slot for chunk in plan.chunks for slot in (chunk.slot, chunk.out_slot) if slot]
        ids = [chunk.request.request_id for chunk in plan.chunks]
        assert len(set(slots)) == len(slots)
        assert len(set(ids)) == len(ids)
        targets = [copy.target for copy in (*plan.copies_before, *plan.copies_after)]
        assert len(set(targets)) == len(targets)
        assert not {copy.source for copy in plan.copies_before} & set(slots), "a snapshot's slot became live too early"
        assert 0 not in targets
        self._check_snapshots(plan, slots, targets)
        self._check_prefill(plan)
        self._copy_blocks(plan)
        written: set[int] = set()
        for copy in plan.copies_before:
            self.states[copy.target] = self.states[copy.source]
        ran = [self._run(chunk, written) for chunk in plan.chunks]
        reports = toy_reports(plan, self.states)
        for copy in plan.copies_after:
            assert copy.source in slots
            assert copy.target not in slots
            self.states[copy.target] = self.states[copy.source]
        sampled = [(tokens, accepted) for tokens, accepted in ran if tokens]
        tokens = [SampledToken(token, -0.5) for row, _ in sampled for token in row]
        if not self.config.draft_tokens:
            return StepResult(tokens, reports=reports)
        for chunk in plan.chunks:
            if chunk.samples:
                self._draw(self.live[chunk.slot], chunk, plan.num_draft_tokens)
        return StepResult(tokens, [accepted for _, accepted in sampled], reports)

    def _draw(self, live: Live, chunk: Chunk, count: int) -> None:
        """Draws draft tokens, of which most are right."""
        live.drafts, live.drawn_in = [], self.steps
        if live.ended or not chunk.request.sampling.draftable:
            return
        history = (*self.states[chunk.slot][1], live.newest)
        for _ in range(count):
            right = next_token(history)
            live.drafts.append((right, right, right, right + 1)[hash((history, 17)) % 4])
            history = (*history, live.drafts[-1])

    def _check_drafts(self, plan: StepPlan) -> None:
        assert plan.num_draft_tokens <= self.config.draft_tokens
        assert plan.drafts or not plan.num_draft_tokens
        assert self.config.draft_tokens or not plan.drafts
        if plan.verifies:
            assert plan.num_decodes == len(plan.chunks) <= MOST_VERIFYING
        for chunk in plan.chunks:
            name = chunk.request.request_id
            if not plan.drafts:
                self.unfollowed.add(name)
            if chunk.num_draft_tokens:
                live = self.live[chunk.slot]
                assert live.request_id == name
                assert live.drawn_in == self.steps - 1, "the draft tokens are not those of the step before"
                assert chunk.num_draft_tokens <= len(live.drafts) or live.ended
                assert chunk.request.sampling.draftable
                assert name not in self.unfollowed

    def _check_snapshots(self, plan: StepPlan, live: list[int], targets: list[int]) -> None:
        """Checks the snapshots' positions in their chunks, and that nothing else in the step uses their slots."""
        slots = [slot for chunk in plan.chunks for _, slot in chunk.snapshots]
        assert all(0 < slot < self.config.num_slots for slot in slots)
        assert len(set(slots)) == len(slots)
        assert not set(slots) & set(live), "a snapshot would overwrite a live state"
        assert not set(slots) & set(targets)
        assert not set(slots) & {copy.source for copy in plan.copies_before}, "a snapshot was given up too early"
        for chunk in plan.chunks:
            positions = [position for position, _ in chunk.snapshots]
            assert positions == sorted(set(positions))
            if positions:
                assert chunk.start + FIRST_SNAPSHOT <= positions[0]
                assert positions[-1] < chunk.start + len(chunk.token_ids)
            assert all(position % self.config.prefill_alignment == 0 for position in positions)

    def _copy_blocks(self, plan: StepPlan) -> None:
        """Copies blocks for sequences that resume from a prefix ending inside a block."""
        size = self.config.block_size
        sources, targets = ([getattr(copy, end) for copy in plan.block_copies] for end in ("source", "target"))
        assert len(set(targets)) == len(targets)
        assert not set(targets) & set(sources)
        assert all(0 < block < self.config.num_blocks for block in (*sources, *targets))
        filled = [chunk.blocks[chunk.start // size] for chunk in plan.chunks if chunk.start % size]
        assert set(targets) <= set(filled), "a block was copied for nobody"
        for source, target in zip(sources, targets, strict=True):
            for offset in range(size):
                self.kv.pop((target, offset), None)
                if (source, offset) in self.kv:
                    self.kv[target, offset] = self.kv[source, offset]

    def _check_prefill(self, plan: StepPlan) -> None:
        """The setting that bounds the time between tokens; an answer that goes on after a preemption has waited."""
        resumed = {copy.target for copy in plan.copies_before}
        answers = any(chunk.is_decode and chunk.output_count and chunk.slot not in resumed for chunk in plan.chunks)
        if answers and self.config.mixed_prefill_tokens is not None:
            assert plan.num_tokens - plan.num_decode_tokens <= self.config.mixed_prefill_tokens

    def _run(self, chunk: Chunk, written: set[int]) -> tuple[list[int], int]:
        """The tokens sampled behind a chunk's rows, and how many of them count."""
        given = tuple(chunk.token_ids[: len(chunk.token_ids) - chunk.num_draft_tokens])
        assert list(chunk.token_ids[len(given) :]) == [DRAFT] * chunk.num_draft_tokens
        assert not chunk.out_slot
        prompt = chunk.request.prompt_token_ids
        assert chunk.max_output == min(chunk.request.sampling.max_tokens, self.config.max_model_len - len(prompt))
        output, start, drafts = list(chunk.output_ids), chunk.start, []
        if given == (PENDING,):
            live = self.live[chunk.slot]
            assert live.request_id == chunk.request.request_id
            assert self._depth > 1
            assert len(output) < chunk.output_count < len(output) + self._depth
            assert start == len(prompt) + chunk.output_count - 1
            if live.ended:
                return [0] * chunk.sampled_rows, 0
            # The plan has the least position; those between are in the state already, only the newest enters it now.
            ahead, start = live.computed - start, live.computed
            assert ahead >= 0
            assert ahead == 0 or chunk.request.sampling.draftable
            output = answer(chunk.request, chunk.output_count + ahead)
            assert output[-1] == live.newest
            given = (live.newest,)
        else:
            assert chunk.output_count == len(output)
        if chunk.num_draft_tokens:
            drafts = self.live[chunk.slot].drafts[: chunk.num_draft_tokens]
        known = (*prompt, *output)
        self._compute(chunk, given, start, known, written)
        if not chunk.samples:
            assert chunk.next_id == known[start + len(given)]
            return [], 0
        return self._sample(chunk, known, drafts)

    def _compute(
        self, chunk: Chunk, given: tuple[int, ...], start: int, known: tuple[int, ...], written: set[int]
    ) -> None:
        """Computes the tokens that are given, checking what is there of those before them."""
        size = self.config.block_size
        end = start + len(given)
        namespace = (chunk.request.pin.digest, chunk.request.cache_salt)
        assert 0 not in chunk.blocks
        assert 0 < chunk.slot < self.config.num_slots
        assert end <= len(chunk.blocks) * size
        assert end <= len(known)
        assert given == known[start:end]
        assert chunk.samples == (end == len(known))
        if self.config.prefill_alignment > 1 and not (chunk.is_decode and chunk.output_count):
            assert start % self.config.prefill_alignment == 0
            assert end % self.config.prefill_alignment == 0 or chunk.samples
            assert not chunk.is_decode, "the tail of a prompt would not be computed as the rest of it"
        history: tuple[int, ...] = ()
        if start:
            owner, history = self.states[chunk.slot]
            assert owner == namespace
        assert history == known[:start], "the state is of another history"
        for position in range(start):
            assert self.kv[chunk.blocks[position // size], position % size] == (namespace, known[position])
        for position in range(start, end):
            block = chunk.blocks[position // size]
            self.kv[block, position % size] = (namespace, known[position])
            written.add(block)
        others = set(chunk.blocks[start // size : -(-end // size)])
        assert others <= written
        for position, slot in chunk.snapshots:
            self.states[slot] = (namespace, known[:position])
        self.states[chunk.slot] = (namespace, known[:end])
        self.computed_tokens += len(given)

    def _sample(self, chunk: Chunk, known: tuple[int, ...], drafts: list[int]) -> tuple[list[int], int]:
        """Samples behind all that is known, and behind each draft token that is right. Wrong ones leave keys behind."""
        asked, size = chunk.request, self.config.block_size
        namespace = (asked.pin.digest, asked.cache_salt)
        prompt = len(asked.prompt_token_ids)
        tokens, right = [behind(asked, known)], True
        for position, draft in enumerate(drafts, len(known)):
            assert position < prompt + chunk.max_output - 1, "nothing is wanted behind it"
            right = right and draft == tokens[-1] and not self._ends(chunk, len(known) + 1 - prompt, draft)
            block = chunk.blocks[position // size]
            self.kv[block, position % size] = (namespace if right else ("wrong", str(position)), draft)
            if right:
                known = (*known, draft)
                self.states[chunk.slot] = (namespace, known)
                tokens.append(behind(asked, known))
        accepted = len(tokens)
        self.live[chunk.slot] = Live(
            asked.request_id, len(known), tokens[-1], self._ends(chunk, len(known) + 1 - prompt, tokens[-1])
        )
        return [*tokens, *[0] * (chunk.sampled_rows - accepted)], accepted

    def _ends(self, chunk: Chunk, count: int, token: int) -> bool:
        """True if the runner computes nothing behind a request's output token of that number."""
        sampling = chunk.request.sampling
        if not self.config.draft_tokens or not sampling.draftable:
            return False
        stops = count > sampling.min_tokens and token in sampling.stops(self.config.eos_token_ids)
        return stops or count >= chunk.max_output
