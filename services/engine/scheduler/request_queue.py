"""Request queue: running and waiting sequences and their deadlines. No torch here."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.engine.kv_cache.block_pool import IntegrityError
from services.engine.requests.request import Request
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.sequence import Rank, Sequence

_FEW_DEADLINES = 64


class RequestQueue:
    """Request queue. Every live sequence either runs (it has a slot) or waits; both lists are sorted by rank.

    Args:
        config: tells when a sequence ends.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def get(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def add(self, request: Request) -> Sequence:
        """Queues a request.

        Raises:
            ContextLengthExceeded, InvalidRequest: it can never fit, or its id is in use.
        """
        if request.request_id in self._by_id:
            raise InvalidRequest(f"request_id {request.request_id!r} is in use", param="request_id")
        max_output = self._config.max_output(len(request.prompt_token_ids), request.sampling.max_tokens)
        if max_output < len(request.sampling.forced_ids):
            raise ContextLengthExceeded(
                f"{len(request.prompt_token_ids)} prompt tokens and {len(request.sampling.forced_ids)} given ones are "
                f"over the context of {self._config.max_model_len} tokens",
                param="forced_ids",
            )
        self._added += 1
        sequence = Sequence(
            request,
            max_output,
            self._added,
            self._config.eos_token_ids,
            speculative=self._config.draft_tokens > 0,
        )
        self._by_id[request.request_id] = sequence
        insort(self.waiting, sequence, key=_rank)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, self._added, sequence))
        return sequence

    def start(self, sequence: Sequence) -> None:
        """Moves a sequence from waiting to running."""
        _remove(self.waiting, sequence)
        insort(self.running, sequence, key=_rank)

    def preempt(self, sequence: Sequence) -> None:
        """Moves a sequence from running to waiting. Its rank puts it before everything that arrived later."""
        _remove(self.running, sequence)
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that ends; called before its blocks and slots are freed."""
        _remove(self.running if sequence.slot else self.waiting, sequence)
        del self._by_id[sequence.request.request_id]
        sequence.ended = True

    def pop_expired(self, now: float) -> Iterator[tuple[float, Sequence]]:
        """Live sequences whose deadline has passed, with that deadline, each once; the caller ends them."""
        if len(self._deadlines) > _FEW_DEADLINES + 2 * len(self._by_id):
            # Most sequences end before their deadline; behind one that has not, they would stay here with their
            # prompts.
            self._deadlines = [entry for entry in self._deadlines if not entry[2].ended]
            heapq.heapify(self._deadlines)
        while self._deadlines and (self._deadlines[0][2].ended or self._deadlines[0][0] <= now):
            deadline, _, sequence = heapq.heappop(self._deadlines)
            if not sequence.ended:
                yield deadline, sequence

    def check(self) -> None:
        """Compares the lists with each other and with the state of their sequences.

        Raises:
            IntegrityError: a sequence is lost, out of order or holds what it should not.
        """
        live = [*self.running, *self.waiting]
        if len(live) != len(self._by_id) or any(self._by_id.get(s.request.request_id) is not s for s in live):
            raise IntegrityError(f"{len(live)} sequences run or wait, {len(self._by_id)} are registered")
        for sequences, name in ((self.running, "running"), (self.waiting, "waiting")):
            if any(a.rank >= b.rank for a, b in pairwise(sequences)):
                raise IntegrityError(f"the {name} sequences are out of order")
        for sequence in live:
            there = len(sequence.request.prompt_token_ids) + len(sequence.output_ids)
            if sequence.ended or sequence.computed >= sequence.known or sequence.known != there + sequence.pending:
                raise IntegrityError(f"{sequence.request.request_id} has ended, miscounts or has nothing to compute")
            # With draft tokens accepted, the last plans in flight may turn out to be in vain.
            if sequence.known - (sequence.pending if sequence.draftable else 0) > sequence.known_at_end:
                raise IntegrityError(f"{sequence.request.request_id} is planned past its last token")
        for sequence in self.waiting:
            if sequence.blocks or sequence.slot or sequence.computed or sequence.uncertain:
                raise IntegrityError(f"{sequence.request.request_id} waits but holds blocks or a slot")
        for sequence in self.running:
            if len(sequence.blocks) * self._config.block_size < sequence.most_computed or not sequence.slot:
                raise IntegrityError(f"{sequence.request.request_id} runs without its blocks or slot")


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


def _remove(sequences: list[Sequence], sequence: Sequence) -> None:
    """Removes a sequence from a list that is sorted by rank."""
    index = bisect_left(sequences, sequence.rank, key=_rank)
    if index >= len(sequences) or sequences[index] is not sequence:
        raise IntegrityError(f"{sequence.request.request_id} is not where it should be")
    del sequences[index]
