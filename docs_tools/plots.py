"""Plots of the pages, from benchmarks/results: SVG whose bytes depend on the results and the planner alone."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.serving.cards.rates import REQUESTS, rates
from benchmarks.serving.cards.table import CARDS
from docs_tools.card_tables import STORED
from docs_tools.paths import DOCS, ROOT

_RESULTS = ROOT / "benchmarks" / "results"
_LEARNING = "2026-11-23-learning-2.jsonl"
_SERVING = "2026-11-26-h100-short-prompts-serving-after.jsonl"
_BESIDE = "2026-11-23-h200-training-beside.jsonl"
_CANARIES = "2026-11-28-canaries.jsonl"
_BESIDE_COMMIT = "d785f72"
_STYLE: Any = {
    "svg.hashsalt": "temper",  # ids of clip paths, random without it
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d0d7de",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
_COLORS = ("#1f6feb", "#d29922", "#2da44e", "#cf222e", "#8250df")


def plots() -> Mapping[Path, str]:
    """Every plot: file → SVG."""
    drawn: Mapping[str, Callable[[], Figure]] = {
        "reward": _reward,
        "methods": _methods,
        "serving": _serving,
        "training-beside": _training_beside,
        "cards": _cards,
        "canaries": _canaries,
    }
    with rc_context(_STYLE):
        return {DOCS / "images" / f"{name}.svg": _svg(draw()) for name, draw in drawn.items()}


def _records(name: str) -> Iterable[dict[str, Any]]:
    return [json.loads(line) for line in (_RESULTS / name).read_text().splitlines()]


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _figure(columns: int = 1, height: float = 3.2, *, one_y_axis: bool = False) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.2 * columns + 1.8, height), layout="constrained")
    return figure, figure.subplots(1, columns, sharey=one_y_axis)


def _reward() -> Figure:
    """Share of held-out questions that GRPO's adapter answers right, each seed and their mean."""
    figure, axes = _figure()
    runs = [record["points"] for record in _records(_LEARNING) if record["method"] == "grpo"]
    for points in runs:
        axes.plot([p[0] for p in points], [p[1] for p in points], color=_COLORS[0], alpha=0.35, linewidth=1)
    steps = [point[0] for point in runs[0]]
    mean = [fmean(points[number][1] for points in runs) for number in range(len(steps))]
    axes.plot(steps, mean, color=_COLORS[0], marker="o", label="mean of three seeds")
    axes.set(xlabel="optimizer steps", ylabel="held-out reward", ylim=(0, 1.02), title="GRPO on date questions")
    axes.legend(loc="lower right")
    return figure


def _methods() -> Figure:
    """The same share for every method, the mean of its seeds."""
    figure, axes = _figure()
    runs: dict[str, list[Any]] = {}
    for record in _records(_LEARNING):
        runs.setdefault(record["method"], []).append(record["points"])
    for color, (method, seeds) in zip(_COLORS, runs.items(), strict=True):
        steps = [point[0] for point in seeds[0]]
        mean = [fmean(points[number][1] for points in seeds) for number in range(len(steps))]
        axes.plot(steps, mean, color=color, marker="o", markersize=3, label=method)
    axes.set(xlabel="optimizer steps", ylabel="held-out questions right", ylim=(0, 1.02), title="Mean of three seeds")
    axes.legend(loc="lower right")
    return figure


def _serving() -> Figure:
    """Throughput and latency by concurrent requests of 512 prompt tokens."""
    figure, (rate, latency) = _figure(2)
    lines: dict[str, dict[int, dict[str, Any]]] = {}
    for record in _records(_SERVING):
        if record["in"] == 512:
            name = f"{record['lora']} adapters" if record["lora"] else {"none": "bf16"}.get(record["quant"])
            lines.setdefault(name or record["quant"], {}).setdefault(record["c"], record)
    for color, (name, cases) in zip(_COLORS, lines.items(), strict=False):
        counts = sorted(cases)
        rate.plot(counts, [cases[c]["decode_tok_s"] for c in counts], color=color, marker="o", label=name)
        latency.plot(counts, [cases[c]["itl_ms"]["p50"] for c in counts], color=color, marker="o", label=name)
    for axes in (rate, latency):
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 8, 64, 256])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("requests at once")
    rate.set_yscale("log")
    rate.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    rate.set(ylabel="decoded tokens/s", title="Throughput, H100, 4B")
    latency.set(ylabel="ms between tokens, median", ylim=(0, None), title="Latency")
    rate.legend(loc="lower right")
    return figure


def _training_beside() -> Figure:
    """Plot of the training rate that a latency goal leaves."""
    figure, axes = _figure()
    records = [record for record in _records(_BESIDE) if record["commit"] == _BESIDE_COMMIT]
    for color, streams in zip(_COLORS, (8, 64), strict=False):
        those = sorted((r for r in records if r["streams"] == streams), key=lambda record: record["goal_ms"])
        alone = those[0]["itl_alone"]["p99"]
        axes.plot(
            [0, *(100 * record["share"] for record in those)],
            [alone, *(record["itl_training"]["p99"] for record in those)],
            color=color,
            marker="o",
            label=f"{streams} streams",
        )
    axes.set(
        xlabel="% of training's rate alone",
        ylabel="ms between tokens, p99",
        ylim=(0, None),
        title="Training beside decoding, H200, 4B",
    )
    axes.legend(loc="lower right")
    return figure


def _cards() -> Figure:
    """Decode rates by card: measured ones filled, predicted ones hatched."""
    figure, panels = _figure(2, height=7, one_y_axis=True)
    found = rates()
    thickness = 0.8 / len(STORED)
    for axes, requests in zip(panels, REQUESTS, strict=True):
        for number, (stored, name) in enumerate(STORED.items()):
            color = _COLORS[number]
            for place, card in enumerate(CARDS):
                if (rate := found.get((card.name, stored, requests))) is not None:
                    axes.barh(
                        place + (number - 1) * thickness,
                        rate.tokens,
                        thickness,
                        facecolor=color if rate.measured else "none",
                        edgecolor=color,
                        hatch=None if rate.measured else "////",
                    )
            axes.barh(0, 0, color=color, label=name if axes is panels[0] else None)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set(xlabel="decoded tokens/s", title=f"4B, {requests} at once" if requests > 1 else "4B, one request")
        axes.grid(visible=False, axis="y")
    first = panels[0]
    first.set_yticks(range(len(CARDS)), [card.name for card in CARDS])
    first.invert_yaxis()
    first.barh(0, 0, facecolor="none", edgecolor="#57606a", hatch="////", label="predicted")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def _canaries() -> Figure:
    """Share of simulated canaries that promoted, and the candidate's answers until then, by true difference."""
    figure, (promoted, exposure) = _figure(2, height=4.2)
    records = [record for record in _records(_CANARIES) if record["rate"] != "uneven"]
    rates = sorted({record["rate"] for record in records})
    for color, rate in zip(_COLORS, rates, strict=False):
        for share, line in ((0.1, "--"), (0.5, "-")):
            those = [record for record in records if (record["rate"], record["share"]) == (rate, share)]
            differences = [100 * record["difference"] for record in those]
            label = f"{rate:.0%} right, candidate has {share:.0%} of the traffic"
            for axes, figures in ((promoted, "promoted"), (exposure, "exposure_p50")):
                values = [100 * record[figures] for record in those]
                axes.plot(differences, values, line, color=color, marker="o", markersize=3, label=label)
    bounds = {"color": "#57606a", "marker": "_", "markersize": 18, "label": "alpha and power"}
    promoted.plot([0, 5], [5, 80], linestyle="none", **bounds)
    exposure.axhline(100, color="#57606a", linewidth=0.8)
    exposure.text(-10, 102, "a test of fixed size", color="#57606a", va="bottom")
    for axes in (promoted, exposure):
        axes.set(xlabel="true difference, points", ylim=(0, None))
    promoted.set(ylabel="% promoted", title="2,000 canaries a point")
    exposure.set(ylabel="% of its answers, median", title="Answers of the candidate")
    figure.legend(*promoted.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
