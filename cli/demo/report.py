"""Report of the demo: a table and a plot in the terminal, demo-report.png, demo-report.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import plotext
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

GOAL = 0.25
"""Rise of the mean reward on held-out items that is needed for the demo to count as a success."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round of GRPO. Rewards are mean exact accuracies; seconds are wall-clock."""

    round: int
    sampled_by: str | None
    """The adapter version the answers were sampled from; None: the base model."""
    adapter: str
    """The version that the round published and that answers since."""
    reward_sampled: float
    """Mean reward of the sampled answers it learned from, at temperature 1, before it learned."""
    reward_held_out: float
    """Mean reward of greedy answers to held-out questions, after it learned."""
    seconds_sampling: float
    seconds_training: float


@dataclass(frozen=True, slots=True)
class Report:
    """demo-report.json."""

    reward_before: float
    reward_after: float
    rounds: Sequence[Round]
    adapter_versions: Sequence[str]
    """Everything that was published, in order."""
    sft: dict[str, str]
    """The question that the supervised job taught, the answer before it and the answer since."""
    held_out_items: int
    seed: int
    seconds: float
    """Seconds from start to stop, the start of all processes included."""

    @property
    def gain(self) -> float:
        return self.reward_after - self.reward_before

    def document(self) -> dict[str, Any]:
        """Every field above, and `gain`."""
        return {**asdict(self), "gain": self.gain}

    def write(self, file: Path) -> None:
        """The document as JSON."""
        file.write_text(json.dumps(self.document(), indent=2) + "\n", encoding="utf-8")


def table(report: Report) -> Table:
    """One row a round, the untrained model first."""
    rows = Table(
        title="Reward per round: of the samples, and of greedy answers to held-out questions",
        title_justify="left",
        header_style="bold",
    )
    for column in ("round", "sampled from", "reward", "published", "held out", "sample s", "train s"):
        rows.add_column(column, justify="left" if column in ("sampled from", "published") else "right")
    rows.add_row("0", "", "", "base model", f"{report.reward_before:.2f}", "", "")
    for entry in report.rounds:
        rows.add_row(
            str(entry.round),
            entry.sampled_by or "base model",
            f"{entry.reward_sampled:.2f}",
            entry.adapter,
            f"{entry.reward_held_out:.2f}",
            f"{entry.seconds_sampling:.1f}",
            f"{entry.seconds_training:.1f}",
        )
    return rows


def _series(report: Report) -> tuple[list[int], list[float], list[int], list[float]]:
    """Held-out reward from round 0 on, reward of the samples from round 1 on."""
    numbers = [entry.round for entry in report.rounds]
    held_out = [report.reward_before, *(entry.reward_held_out for entry in report.rounds)]
    return [0, *numbers], held_out, numbers, [entry.reward_sampled for entry in report.rounds]


def terminal_plot(report: Report, console: Console) -> Text:
    """The two curves in characters, in colour where the console has it."""
    rounds, held_out, sampled_rounds, sampled = _series(report)
    figure = plotext.figure
    figure.clear()
    figure.theme("simple")
    figure.plot_size(min(console.width, 76), 16)
    figure.draw(figure.signal(rounds, held_out).lines().label("held out, greedy"))
    figure.draw(figure.signal(sampled_rounds, sampled, marker="o").label("sampled, temperature 1"))
    figure.ruler("y").lim(0, 1)
    figure.ruler("x").ticks(rounds)
    figure.legend(x=rounds[-1], y=0, ha="right", va="bottom", relative=True)
    figure.title("reward per round of GRPO")
    return Text.from_ansi(figure.build().string(not console.is_terminal))


def save_plot(report: Report, file: Path) -> None:
    """The same curves as a PNG of 960 × 600 pixels."""
    rounds, held_out, sampled_rounds, sampled = _series(report)
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(rounds, held_out, marker="o", color="#1f6feb", label="held-out questions, greedy")
    axes.plot(sampled_rounds, sampled, marker="s", linestyle="--", color="#d29922", label="sampled, temperature 1")
    for x, y in zip(rounds, held_out, strict=True):
        axes.annotate(f"{y:.2f}", (x, y), textcoords="offset points", xytext=(0, 8), ha="center")
    names = ["base", *(entry.adapter for entry in report.rounds)]
    axes.set_xticks(rounds, [f"{number}\n{name}" for number, name in zip(rounds, names, strict=True)])
    axes.set_ylim(0, 1.08)
    axes.set_xlabel("round of GRPO and the version it published")
    axes.set_ylabel("mean reward (exact dates)")
    axes.set_title("Temper learns date arithmetic while it serves")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file)
