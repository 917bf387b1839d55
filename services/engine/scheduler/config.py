"""Configuration of the scheduler. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.engine.scheduler.step_plan import MOST_DRAFT_TOKENS


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Configuration of the scheduler of one engine.

    Raises:
        ValueError: the numbers contradict each other.
    """

    max_num_seqs: int
    """Most sequences that run at the same time."""
    token_budget: int
    """Most tokens that a step computes."""
    block_size: int
    num_blocks: int
    """Number of KV blocks, scratch block 0 included."""
    num_slots: int
    """Number of state slots, scratch slot 0 and those of prefix snapshots included."""
    max_model_len: int
    """Most prompt and output tokens of one sequence."""
    eos_token_ids: frozenset[int] = frozenset()
    prefix_cache: bool = True
    cache_journal: bool = False
    """Whether somebody follows the changes of the prefix cache."""
    mixed_prefill_tokens: int | None = None
    """Most prefill tokens of a step that also decodes, which bounds the time between two output tokens. None: what the
    token budget leaves. A step without decodes always has the whole budget."""
    prefill_alignment: int = 1
    """Alignment of prefill chunks. Above 1: they end at multiples of this many positions or where the known tokens end,
    and never leave a single token, which would run as a decode. If the kernels compute in tiles of as many tokens, a
    prompt's bits then do not depend on how it was split."""
    draft_tokens: int = 0
    """Most draft tokens of a sequence in a step, which the runner proposes and the next step checks. 0: there is no
    speculation."""
    block_bytes: int = 1
    """Size of a KV block, for the priorities of the prefix cache."""
    slot_bytes: int = 1
    """Size of a sequence's state, for the same."""
    token_seconds: float = 1e-4
    """First estimate of the time to compute a prompt token; steps measure it from then on."""
    attention_cost: float = 0.0
    """Cost of a token's attention to one earlier token, as a share of everything else about the token."""
    snapshot_interval: int = 0
    """Tokens between two snapshots in long texts; 0: computed from the sizes above."""
    short_prefill: int = 256
    """Most tokens to compute of a short sequence, which is computed ahead of longer ones."""
    long_beside_short: int = 256
    """Tokens of longer sequences in such a step."""
    session_seconds: float = 600.0
    """Time after a request of a conversation session for which its cache entries stay pinned."""
    most_sessions: int = 4096
    """Most conversation sessions that are remembered."""
    load_patience: float = 2.0
    """Longest wait of a request for a load from a tier, seconds."""
    load_share: float = 0.75
    """Longest wait for a load as a share of the computation that it saves."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "token_budget", "block_size", "max_model_len", "prefill_alignment"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.token_budget < self.max_num_seqs:
            raise ValueError(
                f"token_budget {self.token_budget} is below max_num_seqs {self.max_num_seqs}: decodes would starve"
            )
        if not 0 <= self.draft_tokens <= MOST_DRAFT_TOKENS:
            raise ValueError(f"draft_tokens must be between 0 and {MOST_DRAFT_TOKENS}, got {self.draft_tokens}")
        if self.draft_tokens and self.prefill_alignment > 1:
            raise ValueError(
                "draft_tokens must be 0 with a prefill_alignment above 1: rows are computed several at once"
            )
        if self.token_budget - (self.max_num_seqs - 1) < self.least_prefill:
            raise ValueError(
                f"token_budget {self.token_budget} leaves less than {self.least_prefill} tokens beside "
                f"{self.max_num_seqs - 1} decodes, which prefill_alignment {self.prefill_alignment} needs: raise it"
            )
        if self.mixed_prefill_tokens is not None and self.mixed_prefill_tokens < self.least_prefill:
            raise ValueError(
                f"mixed_prefill_tokens must be at least {self.least_prefill} (with prefill_alignment "
                f"{self.prefill_alignment}), got {self.mixed_prefill_tokens}: prompts would starve"
            )
        if self.num_slots <= self.max_num_seqs:
            raise ValueError(
                f"num_slots {self.num_slots} must be above max_num_seqs {self.max_num_seqs} (slot 0 is scratch)"
            )
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is scratch), got {self.num_blocks}")

    @property
    def least_tail(self) -> int:
        """Least tokens that a prefill chunk before the last, or a prefix hit, leaves to compute."""
        return 1 if self.prefill_alignment == 1 else 2

    @property
    def least_prefill(self) -> int:
        """Least token budget with which any prompt advances."""
        return self.prefill_alignment + self.least_tail - 1

    def chunk_end(self, computed: int, known: int, budget: int) -> int:
        """End of a prefill chunk, a position.

        Args:
            computed: tokens computed so far, a multiple of the alignment.
            known: number of known tokens, more than ``computed``.
            budget: most tokens to compute, at least ``least_prefill``.
        """
        end = computed + budget
        if end >= known:
            return known
        end -= end % self.prefill_alignment
        return end if known - end >= self.least_tail else end - self.prefill_alignment

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens whose KV fits all blocks together."""
        return (self.num_blocks - 1) * self.block_size

    def max_output(self, prompt_tokens: int, max_tokens: int) -> int:
        """Number of tokens that a request may generate, at least 1.

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
