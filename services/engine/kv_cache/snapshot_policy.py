"""Snapshot policy: positions in a prompt at which a prefill saves the state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_KV_SHARE = 0.5
"""Memory of the snapshots inside a prompt, as a share of the memory of the same tokens' KV."""

_TILE = 64
"""Tokens of a tile in which the kernels compute a prompt (kernels.gpu.segments.TILE), counted from the first computed
token. A snapshot inside a tile costs one more tile."""
_SHORT = 2048
"""Prompts with fewer tokens to compute have at most one snapshot inside a tile. A second one costs an H200 4 % of the
prefill's time at 512 and 1,024 tokens and 0.2 % at 2,048 (`benchmarks.prefix_cache.device`)."""


def interval(slot_bytes: int, token_bytes: float) -> int:
    """Tokens between two snapshots of a long text without known branching points.

    A snapshot saves at most the computation of one interval, just as the KV of those tokens does. So its memory is
    compared with theirs: 48 MiB at 32 KiB a token (4B, float32 states) give 3,072 tokens. Copying a state takes an H200
    25 µs, as long as computing two tokens, so time does not matter.
    """
    return max(1, round(slot_bytes / (_KV_SHARE * token_bytes)))


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """Chooses snapshot positions. A position is a number of tokens; the state behind them is saved."""

    unit: int
    """Positions are multiples of this."""
    gap: int
    """Least tokens between two positions, and between the first computed token and a position."""
    interval: int

    def positions(self, computed: int, limit: int, shared: Iterable[int], boundaries: Sequence[int]) -> tuple[int, ...]:
        """Snapshot positions of a prompt whose first ``computed`` tokens come from the cache.

        Args:
            limit: highest position.
            shared: positions at which other known requests branch off, the most important first.
            boundaries: ends of messages, ascending; a conversation may continue there.

        Returns:
            Positions, ascending:
            - all possible ones of ``shared``;
            - the end of the prompt, or of its last message if that is near;
            - the end of the first message, which other prompts may begin with;
            - in long prompts further ones an interval apart, at ends of messages if there are any.
            In a short prompt all but the most important one are moved forward to the beginning of their tile.
        """
        chosen: list[int] = []
        short = limit - computed < _SHORT

        def choose(position: int, apart: int) -> None:
            if any(abs(position - one) < apart for one in chosen):
                return
            if short and any((one - computed) % _TILE for one in chosen):
                position -= (position - computed) % _TILE
            position -= position % self.unit
            if computed + self.gap <= position <= limit and all(abs(position - one) >= apart for one in chosen):
                chosen.append(position)

        for position in shared:
            choose(min(position, limit), 1)
        within = [position for position in boundaries if computed < position <= limit]
        for position in (*within[-1:], *within[:1], limit):
            choose(position, self.gap)
        for position in (*reversed(within), *range(self.interval, limit, self.interval)):
            choose(position, self.interval)
        return tuple(sorted(chosen))
