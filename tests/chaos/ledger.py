"""Ledger: what a campaign did and saw, as JSON and as tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from tests.chaos.histories.checker import Operation

_LISTED = 40
"""Breaches that are kept of a campaign in which everything breaks."""


@dataclass(slots=True)
class Ledger:
    """What happened."""

    faults: Counter[str] = field(default_factory=Counter)
    parts: dict[str, Counter[str]] = field(default_factory=dict)
    """Counts by part of the traffic."""
    sequence: list[str] = field(default_factory=list)
    """Faults in their order."""
    start: float = 0.0
    """Seconds that the fleet took to be ready, undisturbed."""
    first_answers: list[float] = field(default_factory=list)
    """Seconds from the last fault to a whole answer, by gateway."""
    settled: float = 0.0
    """Seconds from the last fault until everything that was begun had ended."""
    grown: dict[str, float] = field(default_factory=dict)
    """MiB by which processes that lived through it have grown, by name."""
    breaches: list[str] = field(default_factory=list)
    wrong: dict[str, list[Operation]] = field(default_factory=dict)
    """Histories that are not linearizable."""

    def histories(self) -> Counter[str]:
        """Histories that were checked, their operations, those whose outcome was lost, and undecided ones."""
        found: Counter[str] = Counter()
        for counts in self.parts.values():
            for name, count in counts.items():
                if ": " in name:
                    found[name.rpartition(": ")[2]] += count
        return found

    def summary(self) -> dict[str, Any]:
        """As it is kept."""
        return {
            "faults": self.faults.total(),
            "by_kind": dict(sorted(self.faults.items())),
            "traffic": {name: dict(sorted(counts.items())) for name, counts in self.parts.items()},
            "histories": dict(self.histories()),
            "start_s": self.start,
            "first_answers_s": self.first_answers,
            "settled_s": self.settled,
            "grown_mib": self.grown,
            "breaches": self.breaches[:_LISTED],
            "sequence": self.sequence,
            "wrong_histories": {
                what: [f"{o.called - found[0].called:.3f} to {o.answered - found[0].called:.3f}: {o}" for o in found]
                for what, found in self.wrong.items()
            },
        }

    def tables(self) -> list[Table]:
        """As people read it."""
        faults = Table("fault", "times", title="Faults")
        for kind, count in sorted(self.faults.items()):
            faults.add_row(kind, str(count))
        traffic = Table("part", "what", "times", title="Traffic")
        for name, counts in self.parts.items():
            for what, count in sorted(counts.items()):
                traffic.add_row(name, what, str(count))
        end = Table("what", "value", title="End")
        end.add_row("first whole answer of each gateway", ", ".join(f"{s} s" for s in self.first_answers))
        end.add_row("everything ended after", f"{self.settled} s")
        end.add_row("histories", ", ".join(f"{count} {name}" for name, count in self.histories().items()))
        end.add_row("breaches", str(len(self.breaches)))
        return [faults, traffic, end]
