"""Depth of speculation: how many draft tokens are worth their time, from what a card takes for them and from how many
were accepted. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds that a runner takes for steps of decodes, measured at its start.

    Raises:
        ValueError: a step of plain decodes is missing where one with draft tokens is given.
    """

    steps: Mapping[tuple[int, int], float]
    """(chunks, rows of a chunk): of a step of so many decodes; one row: without draft tokens."""
    drafts: Mapping[tuple[int, int], float]
    """(chunks, draft tokens): of drawing so many draft tokens behind a step of so many chunks."""

    def __post_init__(self) -> None:
        if missing := {chunks for chunks, _ in self.steps} - {chunks for chunks, rows in self.steps if rows == 1}:
            raise ValueError(f"steps of {sorted(missing)} decodes have no seconds without draft tokens")
