"""A campaign of chaos: `python -m tests.chaos --minutes 10 --seed 3`.

A fleet of two gateways and three engines, on stores of its own, answers streams and trains jobs while processes are
killed, stopped and frozen, and connections between any two parts are slow, narrow, silent or cut, and the object store
answers 500 and 503. Exit status 1 if an answer was wrong or cut without saying so, a job was lost, doubled or
trained otherwise, a gateway answered 500 or not within 30 s of the last fault, or an engine still holds anything. The
same seed makes the same faults.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.lib.environment import environment
from benchmarks.lib.recorder import put_line
from tests.chaos.campaign import Plan, campaign
from tests.chaos.fleet import Sizes
from tests.stack import Stack


def main() -> int:
    """Runs one campaign; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--streams", type=int, default=3, help="clients of each gateway")
    parser.add_argument("--jobs", type=int, default=2, help="training jobs that are unfinished at a time")
    parser.add_argument("--keep", type=Path, help="directory to keep data and logs in; default: none are kept")
    parser.add_argument("--out", type=Path, help="file to append the ledger to")
    options = parser.parse_args()
    sizes = Sizes(options.engines, options.gateways)
    plan = Plan(options.minutes * 60, options.seed, options.streams, options.jobs, sizes=sizes)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as scratch:
        place = options.keep or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        with Stack(place / "data", env={"TEMPER_TRAINER": "false"}) as stack:
            ledger = campaign(stack, place, plan)
    put_line({"seed": plan.seed, "seconds": plan.seconds} | ledger.summary() | environment(), options.out)
    for breach in ledger.breaches[:40]:
        console.print(f"[red]breach:[/] {breach}", soft_wrap=True)
    return int(bool(ledger.breaches))


if __name__ == "__main__":
    sys.exit(main())
