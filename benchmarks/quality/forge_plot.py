"""Plot of forged models' accuracy against their size: `python -m benchmarks.quality.forge_plot RESULTS OUT.svg`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_COLORS = {"importance": "#1f6feb", "random": "#d29922"}
_NAMES = {"importance": "by importance", "random": "drawn"}
_LINES = {"before": "--", "after": "-"}


def figure(results: dict[str, Any]) -> Figure:
    """Left: share of the base's accuracy over the share of MLP channels that went; right: the other cuts."""
    drawn = Figure(figsize=(10.2, 3.4), layout="constrained")
    left, right = drawn.subplots(1, 2, sharey=True)
    cuts = results["cuts"]
    widths = [name for name in cuts if name.startswith("mlp-") and name.count("-") == 1]
    others = [name for name in cuts if name not in widths]
    for method, color in _COLORS.items():
        for stage, line in _LINES.items():
            label = f"{_NAMES[method]}, {'recovered' if stage == 'after' else 'cut'}"
            found = [name for name in widths if method in cuts[name]]
            shares = [cuts[name][method][stage]["share_of_base"] for name in found]
            removed = [int(name.removeprefix("mlp-")) for name in found]
            left.plot([0, *removed], [1, *shares], line, color=color, marker="o", label=label)
    places = range(len(others))
    for number, (method, color) in enumerate(_COLORS.items()):
        for stage in _LINES:
            shares = [cuts[name].get(method, {stage: {"share_of_base": 0}})[stage]["share_of_base"] for name in others]
            at = [place + 0.2 * (2 * number + (stage == "after")) - 0.3 for place in places]
            right.bar(at, shares, 0.18, color=color, alpha=1.0 if stage == "after" else 0.4)
    right.set_xticks(list(places), others)
    left.set(xlabel="MLP channels that went (%)", ylabel="accuracy, share of the base's", ylim=(0, 1.05))
    for axes in (left, right):
        axes.axhline(0.95, color="#8c959f", linewidth=0.8)
    left.legend(loc="lower left", frameon=False)
    return drawn


def main() -> None:
    """Draws a file of results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    figure(json.loads(args.results.read_text())).savefig(args.out)


if __name__ == "__main__":
    main()
