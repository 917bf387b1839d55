"""A picture of each dashboard's layout: `python -m observability.layout DIRECTORY`. For reviews, without a Grafana."""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path

import matplotlib

from observability.board import COLUMNS, Board, Panel, Place, Row, arrange
from observability.boards import BOARDS

matplotlib.use("Agg")

from matplotlib import patches
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_FILL = {"graph": "#eef3fb", "stack": "#e3f1ea", "number": "#fdf3dd", "table": "#f1edf7"}
_INCHES = 16.0
_VARIABLES = re.compile(r'\w+=~"\$\w+",?')
"""Matchers that every query has."""


def draw(board: Board, directory: Path) -> Path:
    """Writes a PNG of titles, kinds, units and queries where Grafana puts the panels."""
    places = list(arrange(board))
    height = max(place.y + place.height for _, place in places)
    figure, axes = plt.subplots(figsize=(_INCHES, _INCHES * height / COLUMNS * 0.5))
    axes.set_xlim(0, COLUMNS)
    axes.set_ylim(height, -1.2)
    axes.axis("off")
    axes.text(0.1, -0.5, f"{board.title}: {board.description}", fontsize=13, weight="bold", va="center")
    for item, place in places:
        if isinstance(item, Row):
            axes.text(place.x + 0.1, place.y + 0.55, f"▾ {item.title}", fontsize=10, weight="bold", va="center")
        else:
            _panel(axes, item, place)
    target = directory / f"{board.name}.png"
    figure.savefig(target, dpi=90, bbox_inches="tight")
    plt.close(figure)
    return target


def _panel(axes: Axes, panel: Panel, place: Place) -> None:
    axes.add_patch(
        patches.Rectangle(
            (place.x + 0.06, place.y + 0.06),
            place.width - 0.12,
            place.height - 0.12,
            facecolor=_FILL[panel.kind],
            edgecolor="#99a",
            linewidth=0.6,
        )
    )
    marks = [panel.kind, panel.unit, *(["exemplars"] if any(query.exemplars for query in panel.queries) else [])]
    letters = int(place.width * 8.6)
    lines = [f"[{', '.join(marks)}]"]
    for query in panel.queries:
        text = f"{query.legend or 'value'}: {_VARIABLES.sub('', query.expr).replace('{}', '')}"
        lines += textwrap.wrap(text, letters, max_lines=4, placeholder=" …")
    lines += [f"→ {name}" for name in panel.alerts]
    most = int(place.height * 2.4) - 3
    axes.text(place.x + 0.2, place.y + 0.6, panel.title, fontsize=7.5, weight="bold", va="center", clip_on=True)
    axes.text(
        place.x + 0.2,
        place.y + 1.1,
        "\n".join(lines[:most]),
        fontsize=6,
        va="top",
        family="monospace",
        parse_math=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        print(draw(board, directory))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
