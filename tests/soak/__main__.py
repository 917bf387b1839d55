"""A soak: `python -m tests.soak --minutes 60 --out soak.jsonl`.

A whole `temper up` with the tiny model, small caches and short retention answers chats, sessions, responses, batches
and feedback, trains, swaps and deletes adapters, and opens training sessions. All the while memory, handles and threads
of every process, disk, objects and keys are sampled. Behind the warm-up each series has to be flat: its slope (the
median of those between any two samples) times that time may be no more than its bound (tests/soak/samples.py), and logs
may not grow by more than so many bytes a request. Keys, which stay for a time, count beside the requests of that time.
Prints a table and a line of JSON, which --out has with every sample; exit status 1 if anything grew, or any client saw
something wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.lib.environment import environment
from benchmarks.lib.recorder import put_line
from tests.soak.run import Plan, soak, stack_of


def main() -> int:
    """Runs one soak; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two samples")
    parser.add_argument("--pause", type=float, default=0.2, help="mean seconds between two rounds of a client")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="directory to keep data and logs in; default: none are kept")
    parser.add_argument("--out", type=Path, help="file to append the result to")
    options = parser.parse_args()
    plan = Plan(options.minutes * 60, options.every, options.seed, options.pause)
    console = Console(stderr=True, width=150)
    with tempfile.TemporaryDirectory() as scratch, stack_of((options.keep or Path(scratch)) / "data", plan) as stack:
        outcome = soak(stack, plan)
    outcome.show(console)
    for breach in outcome.breaches[:40]:
        console.print(f"[red]breach:[/] {breach}", soft_wrap=True)
    said = {"benchmark": "soak", "seed": plan.seed} | outcome.summary() | environment()
    put_line(said, None)
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(json.dumps(said | {"series": outcome.rounded()}) + "\n")
    return int(bool(outcome.breaches))


if __name__ == "__main__":
    sys.exit(main())
