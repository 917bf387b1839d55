"""A stand-in for runner and model, so that the scheduler's plans can be executed and checked without torch.

A "state" is the tuple of all tokens that went into it, and a block's "KV" the tokens at its positions. So a wrong
block table, slot, start or snapshot shows up as a wrong history, and the sampled token is a function of the history.
"""

from __future__ import annotations

from services.engine.executors.runner import CompletedStep
from services.engine.requests.outputs import SampledToken
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.step_plan import FIRST_SNAPSHOT, PENDING, Chunk, StepPlan, StepResult
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


class ToyRunner:
    """Executes plans at their launch and fails on every violation of the plan's contract.

    With a depth above 1 it is what a device with a queue is to the host: plans run in the order of their launch, tokens
    that an unfinished step samples are taken from the slot, and the host gets to know them later.
    """

    def __init__(self, config: SchedulerConfig, depth: int = 1) -> None:
        self.config = config
        self._depth = depth
        self.last_tokens: dict[int, tuple[str, int]] = {}
        """Newest token of each slot, with its sequence."""
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
        verifying = [chunk.verifies for chunk in plan.chunks[sum(decodes) :]]
        assert verifying == sorted(verifying, reverse=True) or not self.config.speculative
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
        sampled = [histories for histories in ran if histories]
        asked = [row.request for chunk in plan.chunks for row in chunk.rows]
        behind_which = [history for histories in sampled for history in histories]
        tokens = [SampledToken(behind(*row), -0.5) for row in zip(asked, behind_which, strict=True)]
        if not self.config.speculative:
            return StepResult(tokens, reports=reports)
        return StepResult(tokens, [self._draft(histories) for histories in sampled], reports)

    def _draft(self, histories: list[tuple[int, ...]]) -> int:
        """Right about every other time, sometimes none."""
        history = histories[0]
        for longer in histories[1:]:
            history = longer if longer[-1] == next_token(history) else history
        draft = next_token((*history, next_token(history)))
        return (draft, draft, draft + 1, 1, -1)[hash((history, 17)) % 5]

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
            assert plan.num_tokens - plan.num_decodes - plan.num_verified <= self.config.mixed_prefill_tokens

    def _run(self, chunk: Chunk, written: set[int]) -> list[tuple[int, ...]]:
        """The histories behind which tokens are sampled."""
        size = self.config.block_size
        end = chunk.start + len(chunk.token_ids)
        output = list(chunk.output_ids)
        if list(chunk.token_ids) == [PENDING]:
            owner_id, newest = self.last_tokens[chunk.slot]
            assert owner_id == chunk.request.request_id
            assert self._depth > 1
            assert len(output) < chunk.output_count < len(output) + self._depth
            # Those between are in the state already; only the newest enters it now.
            output = answer(chunk.request, chunk.output_count)
            assert output[-1] == newest
            token_ids = (newest,)
        else:
            assert chunk.output_count == len(output)
            token_ids = tuple(chunk.token_ids)
        assert chunk.num_draft_tokens <= self.config.speculative
        assert (chunk.num_draft_tokens > 0) == (chunk.out_slot > 0)
        known = (*chunk.request.prompt_token_ids, *output)
        if chunk.num_draft_tokens:
            assert chunk.verifies
            assert not chunk.request.sampling.edits_logits
            assert chunk.request.sampling.draftable
            assert len(output) + 2 <= min(
                chunk.request.sampling.max_tokens, self.config.max_model_len - len(chunk.request.prompt_token_ids)
            )
            known = (*known, token_ids[-1])
        namespace = (chunk.request.pin.digest, chunk.request.cache_salt)
        assert 0 not in chunk.blocks
        assert 0 < chunk.slot < self.config.num_slots
        assert end <= len(chunk.blocks) * size
        assert end <= len(known)
        assert token_ids == known[chunk.start : end]
        assert chunk.samples == (end == len(known))
        if self.config.prefill_alignment > 1 and not (chunk.is_decode and chunk.output_count):
            assert chunk.start % self.config.prefill_alignment == 0
            assert end % self.config.prefill_alignment == 0 or chunk.samples
            assert not chunk.is_decode, "the tail of a prompt would not be computed as the rest of it"
        history: tuple[int, ...] = ()
        if chunk.start:
            owner, history = self.states[chunk.slot]
            assert owner == namespace
        assert history == known[: chunk.start], "the state is of another history"
        for position in range(chunk.start):
            assert self.kv[chunk.blocks[position // size], position % size] == (namespace, known[position])
        for position in range(chunk.start, end):
            block = chunk.blocks[position // size]
            self.kv[block, position % size] = (namespace, known[position])
            written.add(block)
        others = set(chunk.blocks[chunk.start // size : -(-end // size)])
        assert others <= written
        for position, slot in chunk.snapshots:
            self.states[slot] = (namespace, known[:position])
        self.states[chunk.out_slot or chunk.slot] = (namespace, known[:end])
        self.computed_tokens += len(chunk.token_ids)
        if not chunk.samples:
            assert chunk.next_id == known[end]
            return []
        self.last_tokens[chunk.slot] = chunk.request.request_id, behind(chunk.request, known)
        return [known[: len(known) - back] for back in range(chunk.num_draft_tokens, -1, -1)]
