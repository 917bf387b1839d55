"""Report of the demo's loop: demo-loop.json, demo-loop.md, demo-loop.png, and a table in the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from cli.demo.loop.learner import Ended
from cli.demo.loop.traffic import Visit, satisfaction

GOAL = 0.3
"""Rise of the satisfaction that the demo stands for."""
PROMOTED = 2
"""Versions that must be promoted on the way, at least."""
MOST_EXPOSED = 0.1
"""Share of the requests that may reach the bad version while it is tried."""
_WINDOW = 100
"""Visits that a point of the curve is the mean of."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle of the learner, with the seconds of the demo between which it ran."""

    ended: Ended
    began: float
    tried: float | None
    """When its canary began."""
    until: float


@dataclass(frozen=True, slots=True)
class Trial:
    """Canary of the version that somebody made past the gate."""

    version: str
    outcome: str
    reason: str
    began: float
    until: float
    visits: int
    """Visits while it ran."""
    exposed: int
    """Those that the version answered."""

    @property
    def exposure(self) -> float:
        return self.exposed / self.visits if self.visits else 0.0


@dataclass(frozen=True, slots=True)
class LoopReport:
    """Everything that was found. Satisfaction is the mean rating of visitors, from -1 to 1."""

    seed: int
    before: float
    """Satisfaction with the base model."""
    after: float
    """With the last version, at the end."""
    cycles: Sequence[Cycle]
    poisoned: Cycle
    """Cycle that learnt from trolls."""
    trial: Trial
    visits: Sequence[Visit]
    seconds: float
    """Seconds from start to stop, the start of all processes included."""

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def promoted(self) -> Sequence[Cycle]:
        return [cycle for cycle in self.cycles if cycle.ended.outcome == "promoted"]

    def missed(self) -> list[str]:
        """Goals that were not reached, in words."""
        exposure = self.trial.exposure
        return [
            text
            for fails, text in (
                (self.gain < GOAL, f"the satisfaction rose by {self.gain:.2f}, less than {GOAL}"),
                (len(self.promoted) < PROMOTED, f"{len(self.promoted)} versions were promoted, not {PROMOTED}"),
                (self.poisoned.ended.outcome != "rejected", f"the poisoned data were {self.poisoned.ended.outcome}"),
                (self.trial.outcome != "rolled_back", f"the bad version is {self.trial.outcome}"),
                (exposure > MOST_EXPOSED, f"{exposure:.0%} of the requests reached the bad version"),
            )
            if fails
        ]

    def versions(self) -> list[tuple[str, int, float]]:
        """Each version in the order in which it first answered: visits and their satisfaction, without trolls."""
        found: dict[str, list[Visit]] = {}
        for visit in self.visits:
            if not visit.troll:
                found.setdefault(visit.version, []).append(visit)
        return [(version, len(those), satisfaction(those)) for version, those in found.items()]

    def document(self) -> dict[str, Any]:
        """The report as JSON has it: everything but the single visits."""
        trial = asdict(self.trial) | {"exposure": round(self.trial.exposure, 4)}
        return {
            "seed": self.seed,
            "satisfaction_before": round(self.before, 4),
            "satisfaction_after": round(self.after, 4),
            "gain": round(self.gain, 4),
            "cycles": [asdict(cycle) for cycle in self.cycles],
            "poisoned": asdict(self.poisoned),
            "bad_version": trial,
            "by_version": [
                {"version": version, "visits": visits, "satisfaction": round(mean, 4)}
                for version, visits, mean in self.versions()
            ],
            "visits": len(self.visits),
            "missed": self.missed(),
            "seconds": self.seconds,
        }

    def write(self, file: Path) -> None:
        """The document as JSON."""
        file.write_text(json.dumps(self.document(), indent=2) + "\n", encoding="utf-8")


def rows(report: LoopReport) -> list[tuple[str, str, str, str]]:
    """What was tried, in order: cycle, candidate, outcome, and what decided."""
    found = [
        (str(cycle.ended.cycle), cycle.ended.candidate or "-", cycle.ended.outcome.replace("_", " "), _why(cycle.ended))
        for cycle in (*report.cycles, report.poisoned)
    ]
    trial = report.trial
    why = f"{trial.reason}; it answered {trial.exposed} of {trial.visits} visitors ({trial.exposure:.1%})"
    return [*found, ("by hand", trial.version, trial.outcome.replace("_", " "), why)]


def table(report: LoopReport) -> Table:
    """The rows for a terminal."""
    shown = Table(title="What was tried", title_justify="left", header_style="bold")
    for column in ("cycle", "candidate", "outcome", "decided by"):
        shown.add_column(column, overflow="fold")
    for row in rows(report):
        shown.add_row(*row)
    return shown


def markdown(report: LoopReport, plot: Path) -> str:
    """The report for people."""
    versions = [f"| {version} | {visits} | {mean:+.2f} |" for version, visits, mean in report.versions()]
    tried = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows(report)]
    missed = report.missed()
    return "\n".join(
        [
            "# The loop, as it ran",
            "",
            f"Satisfaction {report.before:+.2f} → {report.after:+.2f} (mean rating, from -1 to 1) in "
            f"{report.seconds:.0f} s, {len(report.visits)} visits, seed {report.seed}. "
            + (f"Missed: {'; '.join(missed)}." if missed else "Every goal is reached."),
            "",
            f"![Satisfaction over time]({plot.name})",
            "",
            "| cycle | candidate | outcome | decided by |",
            "|---|---|---|---|",
            *tried,
            "",
            "| version | visits | satisfaction |",
            "|---|---|---|",
            *versions,
            "",
        ]
    )


def save_plot(report: LoopReport, file: Path) -> None:
    """Satisfaction over time with everything that was tried, as a PNG of 1200 × 660 pixels."""
    figure = Figure(figsize=(10, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    honest = [visit for visit in report.visits if not visit.troll]
    times, means = _curve(honest)
    axes.plot(times, means, color="#1f6feb", label=f"satisfaction, mean of {_WINDOW} visits")
    for cycle in report.cycles:
        if cycle.tried is not None:
            axes.axvspan(cycle.tried, cycle.until, color="#d29922", alpha=0.2, linewidth=0)
        text = f"{cycle.ended.candidate or 'candidate'}: {cycle.ended.outcome.replace('_', ' ')}"
        _mark(axes, cycle.until, text, "#2da44e" if cycle.ended.outcome == "promoted" else "#6e7781")
    trolls = [visit.at for visit in report.visits if visit.troll]
    if trolls:
        axes.axvspan(min(trolls), max(trolls), color="#8250df", alpha=0.2, linewidth=0, label="trolls come")
    _mark(axes, report.poisoned.until, f"poisoned: {report.poisoned.ended.outcome}", "#8250df")
    axes.axvspan(
        report.trial.began, report.trial.until, color="#cf222e", alpha=0.2, linewidth=0, label="bad version tried"
    )
    _mark(axes, report.trial.until, f"{report.trial.version}: {report.trial.outcome.replace('_', ' ')}", "#cf222e")
    axes.plot([], [], color="#d29922", alpha=0.4, linewidth=8, label="canary")
    axes.set_ylim(-1, 1.05)
    axes.set_xlabel("seconds")
    axes.set_ylabel("satisfaction of visitors (-1 to 1)")
    axes.set_title("A chat that learns from its visitors while it serves them")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(file)


def _curve(visits: Sequence[Visit]) -> tuple[list[float], list[float]]:
    """Time and mean of each run of so many visits, one half overlapping the next."""
    step = max(1, _WINDOW // 8)
    ends = range(min(_WINDOW, len(visits)), len(visits) + 1, step)
    parts = [visits[max(0, end - _WINDOW) : end] for end in ends if end]
    return [part[len(part) // 2].at for part in parts], [satisfaction(part) for part in parts]


def _mark(axes: Any, at: float, text: str, color: str) -> None:
    axes.axvline(at, color=color, linewidth=1, linestyle="--")
    axes.annotate(text, (at, -0.97), rotation=90, ha="right", va="bottom", fontsize=8, color=color)


def _why(ended: Ended) -> str:
    if ended.effect is not None:
        return f"{ended.visitors} visitors: {ended.effect:+.2f}"
    return ended.why
