"""Draft tokens of speculative decoding: planned behind the tokens of answers and verified by the step that samples. No
torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceABC

from services.engine.requests.outputs import SampledToken
from services.engine.scheduler.sequence import Sequence
from services.engine.scheduler.sequence_memory import SequenceMemory
from services.engine.scheduler.step_builder import StepBuilder
from services.engine.scheduler.step_plan import MOST_VERIFIED, StepPlan, StepResult


class Speculation:
    """Plans draft tokens and verifies them against the sampled ones."""

    def __init__(self, memory: SequenceMemory) -> None:
        self._memory = memory
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def add_answers(
        self, step: StepBuilder, running: SequenceABC[Sequence], grow: Callable[[Sequence], bool]
    ) -> list[Sequence]:
        """Plans the decoding sequences, each with a draft token behind it, and again the tokens behind a rejected one.

        Args:
            grow: allocates the block of a sequence's next token; False: the sequence was preempted instead.

        Returns:
            Sequences that have more of their prompts to compute.
        """
        partial: list[Sequence] = []
        for sequence in running:
            answering = sequence.computed >= len(sequence.request.prompt_token_ids)
            if sequence.uncomputed > 1 and not (answering and sequence.uncomputed <= MOST_VERIFIED):
                partial.append(sequence)
            elif grow(sequence):
                # A draft token is not worth a preemption.
                if sequence.takes_draft and not self._memory.grow_for_draft(sequence):
                    sequence.draft_token = -1
                if sequence.uncomputed > 1 or sequence.takes_draft:
                    step.add_verified(sequence)
                else:
                    step.add(sequence, sequence.known)
        return [sequence for sequence in partial if sequence.slot]

    def verified(
        self, step: StepBuilder, plan: StepPlan, result: StepResult
    ) -> Iterator[tuple[Sequence, list[SampledToken]]]:
        """Each sequence of a step that has not ended, with its sampled token, and the token behind its draft token if
        that was accepted. The second one counts only if the first does not end the request."""
        tokens = iter(result.tokens)
        chunks = (chunk for chunk in plan.chunks if chunk.samples)
        for sequence, chunk, draft_token in zip(step.sampling, chunks, result.draft_token_ids, strict=True):
            token, *more = [next(tokens) for _ in range(chunk.sampled_rows)]
            self.num_draft_tokens += chunk.num_draft_tokens
            accepted = bool(more) and token.error is None and token.token_id == chunk.token_ids[-1]
            self.num_accepted_tokens += accepted
            if sequence.ended:
                continue
            if accepted:
                sequence.accept(chunk)
            sequence.draft_token = draft_token if sequence.draftable else -1
            yield sequence, [token, more[0]] if accepted else [token]
