"""A stand-in for runner and model, so that the scheduler's plans can be executed and checked without torch.

A "state" is the tuple of all tokens that went into it, and a block's "KV" the tokens at its positions. So a wrong
block table, slot, start or snapshot shows up as a wrong history, and the sampled token is a function of the history.
"""

from __future__ import annotations

from services.engine.limits import SchedulerConfig
from services.engine.plan import Chunk, SampledToken, StepPlan, StepResult
from services.engine.ports import CompletedStep
from services.engine.request import Request, SamplingParams

VOCAB = 50


def next_token(history: tuple[int, ...]) -> int:
    """What the "model" says after these tokens: deterministic, never below 1."""
    return 1 + hash(history) % (VOCAB - 1)


def reference(prompt: tuple[int, ...], count: int) -> list[int]:
    """The first ``count`` tokens a lone request gets."""
    output: list[int] = []
    for _ in range(count):
        output.append(next_token((*prompt, *output)))
    return output


def request(name: str, prompt: tuple[int, ...], **changes: object) -> Request:
    sampling = {
        key: changes.pop(key) for key in ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids") if key in changes
    }
    return Request(name, prompt, SamplingParams(**sampling), **changes)


class ToyRunner:
    """Executes plans and fails on every violation of the plan's contract."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv: dict[tuple[int, int], tuple[tuple[str, str], int]] = {}
        self.states: dict[int, tuple[tuple[str, str], tuple[int, ...]]] = {}
        self.computed_tokens = 0
        self.steps = 0

    @property
    def depth(self) -> int:
        return 1

    def launch(self, plan: StepPlan) -> CompletedStep:
        return CompletedStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        assert plan.chunks
        assert plan.num_tokens <= self.config.token_budget
        assert len(plan.chunks) <= self.config.max_num_seqs
        decodes = [chunk.is_decode for chunk in plan.chunks]
        assert decodes == sorted(decodes, reverse=True), "decodes come first"
        slots = [chunk.slot for chunk in plan.chunks]
        ids = [chunk.request.request_id for chunk in plan.chunks]
        assert len(set(slots)) == len(slots)
        assert len(set(ids)) == len(ids)
        targets = [copy.target for copy in (*plan.copies_before, *plan.copies_after)]
        assert len(set(targets)) == len(targets)
        assert not {copy.source for copy in plan.copies_before} & set(slots), "a snapshot's slot became live too early"
        assert 0 not in targets
        written: set[int] = set()
        for copy in plan.copies_before:
            self.states[copy.target] = self.states[copy.source]
        tokens = [self._run(chunk, written) for chunk in plan.chunks]
        for copy in plan.copies_after:
            assert copy.source in slots
            assert copy.target not in slots
            self.states[copy.target] = self.states[copy.source]
        return StepResult([token for token in tokens if token is not None])

    def _run(self, chunk: Chunk, written: set[int]) -> SampledToken | None:
        size = self.config.block_size
        end = chunk.start + len(chunk.token_ids)
        known = (*chunk.request.prompt_token_ids, *chunk.output_ids)
        namespace = (chunk.request.pin.digest, chunk.request.cache_salt)
        assert 0 not in chunk.blocks
        assert 0 < chunk.slot < self.config.num_slots
        assert end <= len(chunk.blocks) * size
        assert end <= len(known)
        assert chunk.output_count == len(chunk.output_ids)
        assert tuple(chunk.token_ids) == known[chunk.start : end]
        assert chunk.samples == (end == len(known))
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
        self.states[chunk.slot] = (namespace, known[:end])
        self.computed_tokens += len(chunk.token_ids)
        return SampledToken(next_token(known), -0.5) if chunk.samples else None
