"""What a check finds, and the report of all of them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


class Status(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    SKIPPED = "skipped"
    """Nothing was found out; the sentence says why."""
    WARNING = "warning"
    """It works, and will surprise somebody."""
    FAILURE = "failure"
    """It does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Raises:
        ValueError: no sentence, or a problem without a way out.
    """

    status: Status
    message: str
    """One sentence, without the full stop."""
    way_out: str = ""
    """What to do about it; only where there is something to do."""
    mend: Callable[[], str] | None = field(default=None, compare=False)
    """Mends it and says what it did; None: only people can."""

    def __post_init__(self) -> None:
        problem = self.status in (Status.WARNING, Status.FAILURE)
        if not self.message or problem != bool(self.way_out):
            raise ValueError(f"a finding has a sentence, and a way out exactly if it is a problem: {self}")


def ok(message: str) -> Finding:
    return Finding(Status.OK, message)


def skipped(message: str) -> Finding:
    return Finding(Status.SKIPPED, message)


def warning(message: str, way_out: str, mend: Callable[[], str] | None = None) -> Finding:
    return Finding(Status.WARNING, message, way_out, mend)


def failure(message: str, way_out: str, mend: Callable[[], str] | None = None) -> Finding:
    return Finding(Status.FAILURE, message, way_out, mend)


class NotHere(Exception):
    """Ends a check that has nothing to look at; the text says why."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A finding with the check that made it."""

    check: str
    finding: Finding
    seconds: float
    mended: str = ""
    """What --fix did; empty: nothing."""

    def document(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "status": self.finding.status.value,
            "message": self.finding.message,
            "way_out": self.finding.way_out or None,
            "can_be_mended": self.finding.mend is not None,
            "mended": self.mended or None,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """All that was checked."""

    version: str
    """Of Temper."""
    checked: Sequence[Checked]

    @property
    def status(self) -> Status:
        """The worst there is; what was skipped counts as ok."""
        found = {entry.finding.status for entry in self.checked}
        return next((status for status in (Status.FAILURE, Status.WARNING) if status in found), Status.OK)

    @property
    def exit_code(self) -> int:
        """0: all is well; 1: there are warnings; 2: something does not work."""
        return {Status.FAILURE: 2, Status.WARNING: 1}.get(self.status, 0)

    def document(self) -> dict[str, Any]:
        """As report.schema.json describes it."""
        return {
            "version": self.version,
            "status": self.status.value,
            "checks": [entry.document() for entry in self.checked],
        }
