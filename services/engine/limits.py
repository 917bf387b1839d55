"""The scheduler's limits and its counters. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import ContextLengthExceeded, InvalidRequest


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine.

    Raises:
        ValueError: the numbers contradict each other.
    """

    max_num_seqs: int
    """Sequences that run at the same time."""
    token_budget: int
    """Tokens a step computes at most."""
    block_size: int
    num_blocks: int
    """KV blocks, scratch block 0 included."""
    num_slots: int
    """State slots, scratch slot 0 and those of prefix snapshots included."""
    max_model_len: int
    """Prompt and output tokens of one sequence."""
    eos_token_ids: frozenset[int] = frozenset()
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "token_budget", "block_size", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.token_budget < self.max_num_seqs:
            raise ValueError(
                f"token_budget {self.token_budget} is below max_num_seqs {self.max_num_seqs}: decodes would starve"
            )
        if self.num_slots <= self.max_num_seqs:
            raise ValueError(
                f"num_slots {self.num_slots} must be above max_num_seqs {self.max_num_seqs} (slot 0 is scratch)"
            )
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is scratch), got {self.num_blocks}")

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV fits all blocks together."""
        return (self.num_blocks - 1) * self.block_size

    def max_output(self, prompt_tokens: int, max_tokens: int) -> int:
        """How many tokens a request may generate, at least 1.

        Raises:
            ContextLengthExceeded: the prompt leaves no room in the model's context.
            InvalidRequest: the request could never fit the KV blocks, even alone.
        """
        if prompt_tokens >= self.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_tokens} tokens, but the context of {self.max_model_len} tokens must also hold "
                "at least one output token: shorten the prompt",
                param="prompt",
            )
        output = min(max_tokens, self.max_model_len - prompt_tokens)
        # The last token is never fed back, so it needs no KV.
        if prompt_tokens + output - 1 > self.capacity_tokens:
            raise InvalidRequest(
                f"{prompt_tokens} prompt tokens and up to {output} output tokens need "
                f"{-(-(prompt_tokens + output - 1) // self.block_size)} KV blocks of {self.block_size} tokens, the "
                f"engine has {self.num_blocks - 1}: shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        return output


@dataclass(frozen=True, slots=True)
class Counts:
    """What is in use now. ``used`` is by live sequences, ``cached`` by the prefix cache alone."""

    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    slots_used: int
    slots_cached: int
    slots_total: int
    preemptions: int
    """Since the start."""
