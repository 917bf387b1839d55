"""Where on its way through a prompt a prefill leaves snapshots of the state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_KV_SHARE = 0.5
"""Snapshots on the way may take this much of the memory that the KV of the same tokens takes."""

_TILE = 64
"""Tokens that the kernels compute a prompt by (kernels.gpu.segments.TILE), counted from where the computing begins. A
snapshot elsewhere is a tile more to compute."""
_SHORT = 2048
"""A prompt with fewer tokens to compute has one such tile at most: a second one takes an H200 4 % of its time at 512
and 1,024 tokens, 0.2 % at 2,048 (`benchmarks.prefix_cache.device`)."""


def interval(slot_bytes: int, token_bytes: float) -> int:
    """Tokens between two snapshots of a long text in which nothing says where others will go on.

    A snapshot saves at most the computing of one interval, as does the KV of these tokens with it, so that what it may
    cost is measured by that: 48 MiB beside 32 KiB a token (4B, float32 states) are 3,072 tokens. To copy a state takes
    an H200 25 µs, as computing two tokens does: time does not matter.
    """
    return max(1, round(slot_bytes / (_KV_SHARE * token_bytes)))


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """Chooses positions; each is a number of tokens, behind which the state is kept."""

    unit: int
    """They are multiples of it."""
    gap: int
    """Between two, and behind where the computing begins, there are at least so many tokens."""
    interval: int

    def positions(self, computed: int, limit: int, shared: Iterable[int], boundaries: Sequence[int]) -> tuple[int, ...]:
        """For a prompt of which the first ``computed`` tokens come from the cache.

        Args:
            limit: the last one.
            shared: where others that are known today go on, the most important first.
            boundaries: where messages end, ascending: where a conversation may go on.

        Returns:
            Ascending: all of ``shared`` that are possible; the end of the prompt, or of its last message if that is
            near; the end of the first message, which others may begin with; and on long ways some between, an interval
            apart, at ends of messages if there are any. In a short prompt all but the most important one lie up to a
            tile before that.
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
