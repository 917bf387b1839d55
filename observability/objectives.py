"""Objectives: thresholds of the alerts. Each number is a value of the chart, `monitoring.thresholds`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number that an installation may set.

    In a query it stands at the end of a line, with its name as a comment behind it: that is what the chart looks for.
    """

    name: str
    """Name in the chart's values."""
    value: float
    """Default value."""

    def __str__(self) -> str:
        return f"{self.value:g} # {self.name}"


ERRORS = Threshold("errorShare", 0.005)
"""Share of requests that may fail with a status of 500 and above, in 30 days."""
FIRST_TOKEN = Threshold("firstTokenSeconds", 2.5)
"""Within which 95 % of streams have their first token."""
BETWEEN_TOKENS = Threshold("betweenTokensSeconds", 0.05)
"""Below which 95 % of the times between tokens are; what TEMPER_TPOT_SLO_MS asks of training by default."""
WAITING = Threshold("waitingRequests", 16)
"""Requests that wait in each engine."""
KV_CACHE = Threshold("kvCacheShare", 0.95)
"""Share of the KV blocks that live sequences use."""
VOLUME_FREE = Threshold("volumeFreeShare", 0.1)
"""Free share of a volume."""
THRESHOLDS = (ERRORS, FIRST_TOKEN, BETWEEN_TOKENS, WAITING, KV_CACHE, VOLUME_FREE)
