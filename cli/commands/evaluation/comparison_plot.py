"""Plot of targets side by side, as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cli.output import CliError

_WIDTH = 0.8
"""Part of a suite's place that its targets share."""


def save_comparison(found: dict[str, Any], file: Path) -> None:
    """Draws the answer of /v1/evaluations/compare: the scores of each suite beside each other, with their intervals.

    Raises:
        CliError: the file cannot be written.
    """
    # matplotlib takes a second to import, which no other command should wait for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    suites = list(dict.fromkeys(one["suite"] for one in found["data"]))
    entries = found["entries"]
    figure = Figure(figsize=(max(6.0, 1.5 + 1.6 * len(suites)), 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, entry in enumerate(entries):
        cells = [one for one in found["data"] if one["entry"] == number]
        shift = _WIDTH * ((number + 0.5) / len(entries) - 0.5)
        bounds = [one["interval"] or {"low": one["mean"], "high": one["mean"]} for one in cells]
        axes.errorbar(
            [suites.index(one["suite"]) + shift for one in cells],
            [one["mean"] for one in cells],
            yerr=[
                [max(0.0, one["mean"] - each["low"]) for one, each in zip(cells, bounds, strict=True)],
                [max(0.0, each["high"] - one["mean"]) for one, each in zip(cells, bounds, strict=True)],
            ],
            fmt="o",
            capsize=4,
            label=entry["label"],
        )
    axes.set_xticks(range(len(suites)), suites, rotation=20 if len(suites) > 3 else 0)
    axes.set_xlim(-0.5, len(suites) - 0.5)
    axes.set_ylabel("mean score, 95 % interval")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file)
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror}") from error
