"""A request inside the scheduler: what it has generated, what it holds. No torch here."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceABC

from services.engine.memory.prefix import Namespace
from services.engine.request import Request

Rank = tuple[int, int, int]


class Sequence:
    """One request with its output, blocks and slot; only the scheduler changes it.

    ``computed`` tokens have their KV and state in the cache; the ``known`` ones are prompt and output together.
    """

    __slots__ = (
        "blocks",
        "cached_tokens",
        "computed",
        "ended",
        "first_token_at",
        "max_output",
        "output_ids",
        "preemptions",
        "rank",
        "reported",
        "request",
        "sampling_logprobs",
        "scheduled_at",
        "slot",
        "splits",
    )

    def __init__(self, request: Request, max_output: int, number: int) -> None:
        self.request = request
        self.max_output = max_output
        self.rank: Rank = (request.priority, request.arrival, number)
        """Lower goes first; unique."""
        self.output_ids: list[int] = []
        self.sampling_logprobs = array("f")
        self.blocks: list[int] = []
        self.slot = 0
        self.computed = 0
        self.splits: tuple[int, ...] = ()
        """Positions at which to end a prefill chunk and take a state snapshot, ascending."""
        self.cached_tokens: int | None = None
        """None until it is admitted the first time."""
        self.preemptions = 0
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.reported = False
        self.ended = False

    @property
    def namespace(self) -> Namespace:
        return self.request.pin.digest, self.request.cache_salt

    @property
    def known(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_ids)

    def tokens(self, start: int, end: int) -> SequenceABC[int]:
        """Prompt and output tokens in [start, end)."""
        prompt = self.request.prompt_token_ids
        length = len(prompt)
        if end <= length:
            return prompt[start:end]
        if start >= length:
            return self.output_ids[start - length : end - length]
        return [*prompt[start:], *self.output_ids[: end - length]]
