"""Constraints over the tiny model's vocabulary, and a runner that draws tokens at random."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from services.common.text.tokenizer import TextCodec
from services.engine.constraints.grammars import CompiledGrammar, GrammarLimits, budget_matcher, compile_grammar
from services.engine.constraints.masks import NO_MASKS, RowMasks
from services.engine.constraints.matcher import OutputMatcher
from services.engine.constraints.vocabulary import Bits, Vocabulary, tokens_of
from services.engine.executors.runner import CompletedStep
from services.engine.requests.outputs import SampledToken
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import Constraint, ConstraintKind, SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.draft_depth import StepCosts
from services.engine.scheduler.step_plan import PENDING, Chunk, StepPlan, StepResult

TINY = Path(__file__).resolve().parents[4] / "models" / "tiny"
SIZE = 2100
"""Wider than the tokenizer, as a model's logits may be."""


@cache
def codec() -> TextCodec:
    return TextCodec.from_directory(TINY)


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(codec(), SIZE, threads=2)


def constraint(kind: str, *source: str, param: str = "constraint") -> Constraint:
    return Constraint(ConstraintKind(kind), source, param)


def schema(value: Any) -> Constraint:
    return constraint("json_schema", json.dumps(value), param="response_format")


def compiled(wanted: Constraint, limits: GrammarLimits | None = None) -> CompiledGrammar:
    return compile_grammar(vocabulary(), wanted, limits or GrammarLimits())


def matcher(sampling: SamplingParams) -> OutputMatcher:
    if sampling.constraint is None:
        return budget_matcher(vocabulary(), sampling)
    return compiled(sampling.constraint).matcher(sampling)


def request(name: str, prompt: tuple[int, ...] = (5, 6, 7), *, priority: int = 0, **fields: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": 64, **fields})
    return Request(name, prompt, sampling, priority=priority, matcher=matcher(sampling) if sampling.masked else None)


def mask_of(of: OutputMatcher) -> Bits:
    """The mask of the next token."""
    masks = np.zeros((1, of.vocabulary.words), dtype=np.int32)
    grammar = of.begin_mask(masks[0])
    if grammar is not None:
        of.vocabulary.fill([(grammar, 0)], masks)
    of.end_mask(masks[0])
    return masks[0]


def text_of(tokens: list[int]) -> str:
    return b"".join(codec().token_bytes(token) for token in tokens).decode()


def drawn(of: OutputMatcher, seed: int, limit: int = 2000) -> list[int] | None:
    """Tokens at random up to where the output ends, without one that ends it; None: it did not end."""
    draw = random.Random(seed)
    output: list[int] = []
    while len(output) < limit:
        token = draw.choice(tokens_of(mask_of(of)))
        if token in of.vocabulary.eos_ids:
            return output
        output.append(token)
        if of.advance(token):
            return output
    return None


@dataclass
class _Opened:
    runner: RandomRunner
    plan: StepPlan
    value: StepResult | None = None

    def drafts(self) -> list[list[int]]:
        return [self.runner.drafts_of(chunk) for chunk in self.plan.chunks if chunk.samples]

    def seal(self, masks: RowMasks) -> None:
        self.runner.log.append("seal")
        self.value = self.runner.sample(self.plan, masks)
        self.runner.unsealed = None

    def result(self) -> StepResult:
        assert self.value is not None, "collected before it was sealed"
        return self.value


@dataclass
class RandomRunner:
    """Draws by the request and the position alone: outputs do not depend on steps, preemptions and neighbours. Fails on
    every violation of the order in which steps are launched, sealed and collected."""

    config: SchedulerConfig
    depth: int
    costs: StepCosts | None = None
    log: list[str] = field(default_factory=list)
    unsealed: StepPlan | None = None
    newest: dict[int, tuple[str, int]] = field(default_factory=dict)
    masked_rows: int = 0
    known: dict[str, list[int]] = field(default_factory=dict)
    """Outputs from which draft tokens are drawn: two of three are right."""
    counts: dict[int, tuple[str, int, bool]] = field(default_factory=dict)
    """Of each slot the request, its output tokens, and whether the runner knows that it has ended."""

    def launch(self, plan: StepPlan) -> CompletedStep:
        assert self.unsealed is None, "launched behind a step that is not sealed"
        assert not plan.masked
        assert not any(chunk.masked for chunk in plan.chunks)
        self.log.append("launch")
        return CompletedStep(self.sample(plan, NO_MASKS))

    def open(self, plan: StepPlan) -> _Opened:
        assert self.unsealed is None, "opened behind a step that is not sealed"
        assert plan.masked
        self.log.append("open")
        self.unsealed = plan
        return _Opened(self, plan)

    def sample(self, plan: StepPlan, masks: RowMasks) -> StepResult:
        rows = [row for chunk in plan.chunks for row in chunk.rows]
        assert list(masks.rows) == sorted(set(masks.rows))
        assert all(rows[row].masked for row in masks.rows)
        of_row = dict(zip(masks.rows, masks.bits, strict=True))
        self.masked_rows += len(of_row)
        if not self.config.draft_tokens:
            return StepResult([self._token(chunk, of_row.get(row)) for row, chunk in enumerate(rows)])
        tokens: list[SampledToken] = []
        accepted: list[int] = []
        for chunk in plan.chunks:
            if chunk.samples:
                wanted = [row not in masks.unwanted for row in range(len(tokens), len(tokens) + chunk.sampled_rows)]
                count = self._accept(chunk, [of_row.get(row) for row in range(len(tokens), len(rows))], wanted, tokens)
                accepted.append(count)
        return StepResult(tokens, accepted)

    def count(self, chunk: Chunk) -> int:
        """Output tokens before a chunk: at least those of the plan."""
        name, count, _ = self.counts.get(chunk.slot, ("", 0, False))
        return count if chunk.token_ids[0] == PENDING and name == chunk.request.request_id else chunk.output_count

    def drafts_of(self, chunk: Chunk) -> list[int]:
        count, known = self.count(chunk), self.known.get(chunk.request.request_id, [])
        return [
            known[number] if number < len(known) and number % 3 else 7 + number
            for number in range(count, count + chunk.num_draft_tokens)
        ]

    def _accept(self, chunk: Chunk, masks: list[Bits | None], wanted: list[bool], tokens: list[SampledToken]) -> int:
        """Appends a token for each row of a chunk; returns how many count."""
        name, sampling = chunk.request.request_id, chunk.request.sampling
        pending = chunk.token_ids[0] == PENDING
        if pending and self.counts[chunk.slot] == (name, self.counts[chunk.slot][1], True):
            tokens += [SampledToken(0, 0.0)] * chunk.sampled_rows
            return 0
        count, drafts = self.count(chunk), self.drafts_of(chunk)
        accepted, goes_on, ended = 0, True, False
        for row in range(chunk.sampled_rows):
            goes_on = goes_on and wanted[row]
            if not goes_on:
                tokens.append(SampledToken(0, 0.0))
                continue
            token = self._token(chunk._replace(output_count=count + row), masks[row])
            tokens.append(token)
            accepted += 1
            ended = token.token_id in sampling.stops(self.config.eos_token_ids) or count + accepted >= chunk.max_output
            goes_on = not ended and row < len(drafts) and token.token_id == drafts[row]
        self.counts[chunk.slot] = name, count + accepted, ended
        return accepted

    def _token(self, chunk: Chunk, mask: Bits | None) -> SampledToken:
        name = chunk.request.request_id
        if chunk.token_ids[0] == PENDING:
            assert self.newest[chunk.slot][0] == name
        draw = random.Random(f"{name}/{chunk.output_count}")
        token = draw.choice(tokens_of(mask)) if mask is not None else draw.randrange(2039)
        self.newest[chunk.slot] = name, token
        return SampledToken(token, -0.5)
