"""Draft tokens of speculative decoding: how many of those that the runner draws a plan checks, how many it draws for
the next one, and what counts of a result. No torch here.

Draft tokens are checked in steps of decodes alone. A number of them is chosen with each plan, for the next one; if that
has prompts beside its decodes, they are in vain.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC

from services.engine.requests.outputs import SampledToken
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.draft_depth import DraftDepth, StepCosts
from services.engine.scheduler.sequence import Sequence
from services.engine.scheduler.sequence_memory import SequenceMemory
from services.engine.scheduler.step_builder import StepBuilder
from services.engine.scheduler.step_plan import MOST_VERIFYING, StepPlan, StepResult


class Speculation:
    """Plans draft tokens and takes the accepted ones.

    Args:
        costs: of the runner's steps.
    """

    def __init__(self, config: SchedulerConfig, memory: SequenceMemory, costs: StepCosts | None) -> None:
        self._config = config
        self._memory = memory
        self._depth = DraftDepth(config.draft_tokens, costs)
        self._drawn: list[Sequence] = []
        """Sequences that the youngest plan draws draft tokens for."""
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def begin(self, sequence: Sequence, others: int) -> None:
        """Decides whether a new sequence gets draft tokens.

        Args:
            others: sequences that run or wait.
        """
        if sequence.draftable:
            beside = min(others, self._config.max_num_seqs - 1)
            sequence.acceptance = self._depth.begin(sequence.request.pin.digest, beside)

    def plan(self, step: StepBuilder, running: SequenceABC[Sequence]) -> None:
        """Puts draft tokens behind the decodes of a step that is planned otherwise, and chooses how many it draws."""
        if self._config.draft_tokens == 0:
            return
        if step.decodes_only and len(step.sequences) <= MOST_VERIFYING:
            self._check_drawn(step)
        for sequence in self._drawn:
            sequence.drawn = 0
        sampling = step.planned_sampling()
        for sequence in sampling:
            if sequence.acceptance is not None and self._depth.gives_up(sequence.acceptance):
                sequence.acceptance = None
        expected = [sequence.acceptance for sequence in sampling]
        if any(sequence.uncomputed > 1 for sequence in running):
            self._depth.skip(expected)
        else:
            step.num_draft_tokens = self._depth.choose(expected)
        self._drawn = [sequence for sequence in sampling if sequence.drafting] if step.num_draft_tokens else []
        for sequence in self._drawn:
            sequence.drawn = step.num_draft_tokens
            # Those behind the first one have keys and values of the mtp layer at positions of their own.
            wanted = sequence.computed + sequence.uncertain + step.num_draft_tokens - 1
            self._memory.covers(sequence, min(wanted, sequence.known_at_end - 1))
        step.drafts = any(sequence.drafting for sequence in step.planned)

    def _check_drawn(self, step: StepBuilder) -> None:
        """Puts the draft tokens of the plan before behind the decodes of a step, where they are of use and find their
        place. None is worth a preemption."""
        budget = self._config.token_budget - len(step.sequences)
        for place, sequence in enumerate(step.sequences):
            count = min(sequence.drawn, sequence.most_draft_tokens, budget) if sequence.drafting else 0
            if count > 0 and not self._memory.covers(sequence, sequence.computed + sequence.uncertain + count):
                count = min(count, self._memory.room(sequence))
            if count > 0:
                step.add_drafts(place, count)
                budget -= count

    def taken(self, step: StepBuilder, plan: StepPlan, result: StepResult) -> Iterator[tuple[Sequence, SampledToken]]:
        """Sequences with their tokens that count, one after the other. Those behind the last one of a request, which
        the caller ends in between, are left out."""
        if self._config.draft_tokens == 0:
            yield from zip(step.sampling, result.tokens, strict=True)
            return
        at = 0
        chunks = (chunk for chunk in plan.chunks if chunk.samples)
        for sequence, chunk, accepted in zip(step.sampling, chunks, result.accepted, strict=True):
            tokens = result.tokens[at : at + accepted]
            at += chunk.sampled_rows
            drafted = chunk.num_draft_tokens
            if drafted and accepted:
                self.num_drafts += 1
                self.num_draft_tokens += drafted
                self.num_accepted_tokens += accepted - 1
            if sequence.ended:
                continue
            sequence.accept(drafted, accepted)
            for token in tokens:
                if not sequence.ended:
                    yield sequence, token
            if drafted and sequence.acceptance is not None:
                # Behind the end of a request nothing is accepted, right or wrong.
                checked = accepted - 1 if sequence.ended else drafted
                self._depth.add(sequence.acceptance, checked, accepted - 1)
