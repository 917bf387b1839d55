"""Report of a simulation: a line for people, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.fleet.figures import DOUBLING_BAR, FIRST_TOKEN_BAR, HIT_BAR, SPREAD_BAR

_COLOR, _BAR = "#1f6feb", "#d29922"
Row = dict[str, Any]


def line(found: Row) -> str:
    """A result in a line."""
    match found["scenario"]:
        case "trace":
            first, best = found["first_token_s"], found["ideal"]["first_token_s"]
            return (
                f"{found['trace']:15} hit {found['hit_rate']:.3f} of {found['ideal']['hit_rate']:.3f} "
                f"({found['hit_of_ideal']:.1%}), first token p50 {first['p50']:.3f} p99 {first['p99']:.3f} s of "
                f"{best['p99']:.3f} ({found['first_token_p99_of_ideal']:.2f}x), between tokens p99 "
                f"{found['between_tokens_s']['p99']:.3f} s, {found['output_tokens_per_s']:.0f} tok/s, "
                f"${found['dollars_per_million_output_tokens']:.2f} per million, {found['whole']}/{found['requests']} "
                f"whole, {found['cpu_s']:.0f} s of CPU"
            )
        case "scale":
            rates = ", ".join(f"{count}: {rate:.0f}" for count, rate in found["output_tokens_per_s"].items())
            return f"scale           tok/s by engines {rates}; least per doubling {min(found['per_doubling']):.2f}x"
        case "load":
            rows = ", ".join(
                f"{row['load']}: {row['first_token_s']['p99']:.3f}/{row['between_tokens_s']['p99']:.3f}"
                for row in found["rows"]
            )
            return f"load            p99 of the first token and between tokens, s: {rows}"
        case "failure":
            return (
                f"failure         {found['killed']} killed, {found['in_flight']} in flight, of "
                f"{found['without_a_token']} without a token {found['lost_without_a_token']} lost, "
                f"{found['sent_again']} sent again; {found['cut_after_a_token']} cut"
            )
        case "growth":
            return (
                f"growth          {found['added']} started, {found['that_worked']} worked, first step after "
                f"{found['until_first_step_s']['p50']:.1f} s (last {found['until_first_step_s']['last']:.1f}), "
                f"{found['lost']} requests lost"
            )
        case "spread":
            rows = ", ".join(f"{row['store_bytes_per_s'] / 1e9:g} GB/s: {row['everywhere_s']}" for row in found["rows"])
            popular = found["popular"]
            return (
                f"spread          seconds until everywhere, {found['adapter_bytes'] / 1e6:.0f} MB by {rows}; of a "
                f"popular one {popular['everywhere_s']}, {popular['engines_with_it']} engines have it"
            )
        case "validation":
            rows = ", ".join(
                f"{name} {row['simulated']} of {row['real']} ({row['error']:+.1%})"
                for name, row in found["quantities"].items()
            )
            return f"validation      {found['requests']} requests, simulated of real: {rows}"
        case _:
            pairs = ", ".join(f"{name} {value}" for name, value in found.items() if isinstance(value, int | float))
            return f"{found['scenario']:15} {pairs}"


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draws results: hit rates and first tokens beside their ideals, throughput, latency by load, spreading."""
    drawn = Figure(figsize=(13, 6.4), layout="constrained")
    hits, first, scale, load, spread, gaps = drawn.subplots(2, 3).flat
    traces = [row for row in rows if row["scenario"] == "trace"]
    _bars(hits, traces, "hit_of_ideal", HIT_BAR, "hit rate, of the ideal's")
    _bars(first, traces, "first_token_p99_of_ideal", FIRST_TOKEN_BAR, "p99 of first tokens, of the ideal's")
    for row in (row for row in rows if row["scenario"] == "scale"):
        rates = {int(count): rate for count, rate in row["output_tokens_per_s"].items()}
        scale.loglog(list(rates), list(rates.values()), "o-", color=_COLOR, base=2)
        least = [next(iter(rates.values())) * DOUBLING_BAR**power for power in range(len(rates))]
        scale.loglog(list(rates), least, "--", color=_BAR, base=2)
    scale.set(xlabel="engines", ylabel="tokens/s (dashed: 1.9 per doubling)")
    for row in (row for row in rows if row["scenario"] == "load"):
        loads = [one["load"] for one in row["rows"]]
        for axes, key, name in ((load, "first_token_s", "to the first token"), (gaps, "between_tokens_s", "between")):
            for at, style in (("p50", "--"), ("p99", "-")):
                axes.plot(loads, [one[key][at] for one in row["rows"]], style, color=_COLOR, label=f"{name}, {at}")
    for axes in (load, gaps):
        axes.set(xlabel="load", ylabel="seconds", ylim=(0, None))
        axes.legend(frameon=False)
    for row in (row for row in rows if row["scenario"] == "spread"):
        links = [one["store_bytes_per_s"] / 1e9 for one in row["rows"]]
        spread.plot(links, [one["everywhere_s"] for one in row["rows"]], "o-", color=_COLOR)
        spread.axhline(SPREAD_BAR, color=_BAR)
    spread.set(xlabel="object store, GB/s", ylabel="new version everywhere, s", ylim=(0, None))
    drawn.savefig(out)


def _bars(axes: Axes, traces: Sequence[Row], key: str, bar: float, label: str) -> None:
    axes.bar(range(len(traces)), [row[key] for row in traces], color=_COLOR)
    axes.set_xticks(range(len(traces)), [row["trace"] for row in traces], rotation=30, ha="right")
    axes.axhline(bar, color=_BAR)
    axes.set_ylabel(label)
