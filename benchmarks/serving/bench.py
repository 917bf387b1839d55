"""`make bench`: prints a table and writes benchmarks/results/<date>.json with hardware, versions and commit."""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lib.environment import ROOT, environment
from benchmarks.serving import engine_speed, http_latency

BARS = {"engine_1": 0.8, "engine_16": 6.0}
"""Least rate as a multiple of transformers' one stream."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="CPU threads of one operator")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-http", action="store_true", help="only the engine")
    parser.add_argument("--no-save", action="store_true", help="write no result file")
    options = parser.parse_args()
    console = Console(highlight=False)
    workload = engine_speed.Workload(repeats=options.repeats)

    rates: dict[str, dict[str, float]] = {}
    with console.status("measuring") as status:
        for threads in options.threads:
            rates[str(threads)] = engine_speed.measure(options.model, threads, workload, status.update)
    show_rates(console, rates)

    http: dict[str, Any] = {}
    if not options.no_http:
        with console.status("starting temper up"), http_latency.running_stack(options.model) as (url, ready):
            http["seconds_to_ready"] = ready
            for streams in (1, 16):
                http[f"streams_{streams}"] = http_latency.measure(url, streams=streams, requests=max(16, 3 * streams))
        show_http(console, http)

    if not options.no_save:
        now = datetime.datetime.now(datetime.UTC)
        file = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%dT%H%M%SZ}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        report = {
            **environment(),
            "workload": {
                "prompt_tokens": workload.prompt_tokens,
                "new_tokens": workload.new_tokens,
                "dtype": "float32",
            },
            "tokens_per_second": rates,
            "http": http,
        }
        file.write_text(json.dumps(report, indent=2) + "\n")
        console.print(f"written to {file.relative_to(ROOT)}")


def show_rates(console: Console, rates: dict[str, dict[str, float]]) -> None:
    """Tokens a second and the ratio to one stream of transformers."""
    table = Table("threads", "transformers, 1 stream", "engine, 1 stream", "engine, 16 streams", box=None)
    for threads, rate in rates.items():
        one = rate["transformers_1"]
        cells = [f"{one:.0f} tokens/s"]
        for name, bar in BARS.items():
            ratio = rate[name] / one
            colour = "green" if ratio >= bar else "red"
            cells.append(f"{rate[name]:.0f} tokens/s  [{colour}]{ratio:.2f}x[/] (bar {bar:g}x)")
        table.add_row(threads, *cells)
    console.print(table)


def show_http(console: Console, http: dict[str, Any]) -> None:
    """Latencies over HTTP."""
    console.print(f"temper up ready after {http['seconds_to_ready']:.1f} s")
    table = Table("HTTP streams", "TTFT median", "TTFT p95", "TPOT median", "tokens/s", box=None)
    for streams in (1, 16):
        row = http[f"streams_{streams}"]
        table.add_row(
            str(streams),
            f"{row['ttft_ms_median']:.1f} ms",
            f"{row['ttft_ms_p95']:.1f} ms",
            f"{row['tpot_ms_median']:.2f} ms",
            f"{row['tokens_per_second']:.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
