"""Depth of speculation: how many draft tokens are worth their time, from what a card takes for them and from how many
were accepted. No torch here.

A step of several rows a sequence takes longer than one of plain decodes, and drawing draft tokens takes time as well.
So their number is chosen for each step: of those that were measured the one that gives the most expected tokens a
second, and none unless that wins clearly. Sequences whose draft tokens do not pay get none for good, as the drafter
then need not follow them. What sequences of an adapter had is what the next one of it is expected to have.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.engine.scheduler.step_plan import MOST_VERIFYING

_HOPE = (0.85, 0.75, 0.7, 0.65)
"""Shares that are expected before anything is known, the last one also at the places behind."""
_MARGIN = 1.02
"""Least gain for which draft tokens are drawn."""
_HOPED = 3
"""Observations that what is expected at first counts as."""
_FAST, _SLOW = 1 / 16, 1 / 64
"""Weights of a new observation behind many, for a sequence, and for an adapter or all."""
_TRIAL = 12
"""Chunks with draft tokens after which a sequence may be found not to gain by them."""
_MOST_UNDRAFTED = 32
"""Steps without draft tokens after which a sequence gets none any more: the mtp layer has followed it in vain."""
_PROBE = 16
"""Of so many new sequences of an adapter whose draft tokens do not pay, one tries again."""
_MOST_ADAPTERS = 256


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds that a runner takes for steps of decodes, measured at its start.

    Raises:
        ValueError: a step of plain decodes is missing where one with draft tokens is given.
    """

    measured: Mapping[tuple[int, int], float]
    """(chunks, draft tokens): of a step of so many decodes with so many draft tokens each, and of drawing as many
    behind it."""

    def __post_init__(self) -> None:
        if missing := {chunks for chunks, _ in self.measured} - {
            chunks for chunks, count in self.measured if count == 0
        }:
            raise ValueError(f"steps of {sorted(missing)} decodes have no seconds without draft tokens")

    def seconds(self, chunks: int, draft_tokens: int) -> float | None:
        """Seconds of a step of so many chunks with so many draft tokens each, and of drawing as many behind it. Between
        numbers that were measured it is on the line between theirs; of fewer than any, that of the fewest; None: of
        more."""
        counts = sorted(count for count, drafted in self.measured if drafted == draft_tokens)
        place = bisect_left(counts, chunks)
        if place == len(counts):
            return None
        above = self.measured[counts[place], draft_tokens]
        if place == 0 or counts[place] == chunks:
            return above
        low, high = counts[place - 1], counts[place]
        below = self.measured[low, draft_tokens]
        return below + (above - below) * (chunks - low) / (high - low)


@dataclass(slots=True)
class Acceptance:
    """Shares of draft tokens that are accepted, of a sequence, an adapter or all.

    Raises:
        ValueError: there are no shares, or not as many places that they were seen at.
    """

    adapter: str
    shares: list[float]
    """Share at each place behind the newest token of those whose predecessors were accepted."""
    checked: int = 0
    """Chunks with draft tokens that were checked."""
    seen: list[int] = field(default_factory=list)
    """Draft tokens that each share was learned from; empty: none yet."""
    undrafted: int = 0
    """Steps in a row that sampled without drawing draft tokens."""

    def __post_init__(self) -> None:
        self.seen = self.seen or [0] * len(self.shares)
        if not self.shares or len(self.seen) != len(self.shares):
            raise ValueError(f"{len(self.shares)} shares, and {len(self.seen)} places that they were seen at")

    def add(self, drafted: int, accepted: int, least: float) -> None:
        """Adds a chunk. The first observations weigh as much as it takes to forget what was hoped for.

        Args:
            drafted: draft tokens that were checked; those behind a rejected one say nothing.
            accepted: how many of them were.
            least: weight of an observation behind many.
        """
        for place in range(min(drafted, accepted + 1)):
            weight = max(least, 1 / (_HOPED + self.seen[place]))
            self.shares[place] += weight * ((place < accepted) - self.shares[place])
            self.seen[place] += 1

    def most_tokens(self, draft_tokens: int) -> float:
        """Tokens of a chunk with so many draft tokens, if each share is a standard error above what was seen."""
        total = chance = 1.0
        for share, seen in zip(self.shares[:draft_tokens], self.seen, strict=False):
            known = min(_HOPED + seen, 2 / _FAST)
            chance *= min(1.0, share + math.sqrt(share * (1 - share) / known))
            total += chance
        return total


class DraftDepth:
    """Chooses numbers of draft tokens.

    Args:
        most: most draft tokens of a chunk.
        costs: None: they are not known, and every sequence gets the most at all times.
    """

    def __init__(self, most: int, costs: StepCosts | None) -> None:
        self._most = most
        self._seconds = None if costs is None else _table(costs, most)
        self._needed = [] if self._seconds is None else _needed(self._seconds)
        self._hope = [*_HOPE, *_HOPE[-1:] * (most - len(_HOPE))]
        self._all = Acceptance("", list(self._hope))
        self._adapters: dict[str, Acceptance] = {}
        """The ones used last are at the end."""
        self._refused: dict[str, int] = {}
        """Sequences of each adapter that began without draft tokens, since the last probe."""

    def begin(self, adapter: str, beside: int) -> Acceptance | None:
        """What a new sequence of an adapter is expected to have; None: it gets no draft tokens, as they would not pay.

        Args:
            beside: sequences that will run beside it, taken to be as it is.
        """
        known = self._of(adapter)
        if self._seconds is None or self._best([known] * (1 + beside), 1 + beside):
            self._refused.pop(adapter, None)
            return Acceptance(adapter, list(known.shares))
        hoped = Acceptance(adapter, list(self._hope))
        if not self._best([hoped] * (1 + beside), 1 + beside):
            return None
        refused = self._refused.get(adapter, 0) + 1
        self._refused[adapter] = refused % _PROBE
        return hoped if refused == _PROBE else None

    def choose(self, sampling: Sequence[Acceptance | None]) -> int:
        """Number of draft tokens for the next step.

        Args:
            sampling: of each sequence that it will have.
        """
        drafting = [one for one in sampling if one is not None]
        best = self._best(drafting, len(sampling))
        for one in drafting:
            one.undrafted = 0 if best else one.undrafted + 1
        return best

    def skip(self, sampling: Iterable[Acceptance | None]) -> None:
        """Counts a step for whose sequences nothing is drawn, as prompts are to be computed beside the next one."""
        for one in sampling:
            if one is not None:
                one.undrafted += 1

    def add(self, one: Acceptance, drafted: int, accepted: int) -> None:
        """Learns from a sequence's chunk; see Acceptance.add()."""
        group = self._of(one.adapter)
        for known, least in ((one, _FAST), (group, _SLOW), (self._all, _SLOW)):
            known.checked += 1
            known.add(drafted, accepted, least)

    def gives_up(self, one: Acceptance) -> bool:
        """True if a sequence shall get no draft tokens any more."""
        if self._seconds is None:
            return False
        return one.undrafted >= _MOST_UNDRAFTED or (one.checked >= _TRIAL and not self._may_pay(one))

    def _of(self, adapter: str) -> Acceptance:
        known = self._adapters.pop(adapter, None)
        if known is None:
            known = Acceptance(adapter, list(self._all.shares))
            if len(self._adapters) >= _MOST_ADAPTERS:
                oldest = next(iter(self._adapters))
                del self._adapters[oldest]
                self._refused.pop(oldest, None)
        self._adapters[adapter] = known
        return known

    def _may_pay(self, one: Acceptance) -> bool:
        """True if draft tokens may pay in some step of sequences like this one. One that is given up by mistake falls
        behind the others, as it takes part in their longer steps: so it is given the benefit of the doubt."""
        return any(one.most_tokens(1 + place) > tokens for place, tokens in enumerate(self._needed))

    def _best(self, drafting: Sequence[Acceptance], chunks: int) -> int:
        """Number of draft tokens with the most tokens a second for so many chunks, of which some draft."""
        if not drafting or chunks > MOST_VERIFYING:
            return 0
        if self._seconds is None:
            return self._most
        tokens = [float(chunks)] * (1 + self._most)
        for one in drafting:
            chance, more = 1.0, 0.0
            for place in range(self._most):
                chance *= one.shares[place]
                more += chance
                tokens[1 + place] += more
        plain, *deeper = self._seconds[chunks - 1]
        best, rate = 0, _MARGIN * chunks / plain
        for number, seconds in enumerate(deeper, 1):
            if tokens[number] / seconds > rate:
                best, rate = number, tokens[number] / seconds
        return best


def _table(costs: StepCosts, most: int) -> list[list[float]]:
    """Seconds of steps of 1 to MOST_VERIFYING chunks, each with 0 to ``most`` draft tokens; what was not measured takes
    forever."""
    table: list[list[float]] = []
    for chunks in range(1, MOST_VERIFYING + 1):
        seconds = [costs.seconds(chunks, number) for number in range(1 + most)]
        table.append([math.inf if each is None else each for each in seconds])
    return table


def _needed(table: list[list[float]]) -> list[float]:
    """Least expected tokens of a chunk for which 1, 2 … draft tokens pay, with the best number of chunks for them."""
    known = [row for row in table if row[0] < math.inf]
    deeper = range(1, len(table[0]))
    return [min((_MARGIN * row[number] / row[0] for row in known), default=math.inf) for number in deeper]
