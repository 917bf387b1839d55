"""A campaign of chaos: `python -m tests.chaos --minutes 10 --seed 3`.

A fleet of two gateways and three engines, on stores of its own, answers streams, sessions, batches and responses, moves
adapters and trains jobs of every kind, while processes and stores are killed, stopped, frozen and restarted in turn,
run out of disk and memory, and have their clocks moved; connections between any two parts are slow, narrow, silent or
cut, the object store answers 500 and 503 and damages objects, and certificates are renewed.

Exit status 1 if an answer was wrong or cut without saying so, a job or batch was lost, doubled or done otherwise, a
history is not linearizable, a gateway answered 500 or not within 30 s of the last fault, or anything is still held. The
same seed makes the same faults. docs/chaos.md says how to read the ledger.
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
from tests.chaos.stores import Stores


def main() -> int:
    """Runs one campaign; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--streams", type=int, default=2, help="clients of each gateway")
    parser.add_argument("--jobs", type=int, default=1, help="compared training jobs that are unfinished at a time")
    parser.add_argument("--part", action="append", default=[], help="only this part of the traffic, and streams")
    parser.add_argument("--keep", type=Path, help="directory to keep data and logs in; default: none are kept")
    parser.add_argument("--out", type=Path, help="file to append the ledger to")
    options = parser.parse_args()
    sizes = Sizes(options.engines, options.gateways)
    parts = frozenset(options.part)
    plan = Plan(options.minutes * 60, options.seed, options.streams, options.jobs, sizes=sizes, parts=parts)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as scratch:
        place = options.keep or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        with Stores(place / "data") as stores:
            ledger = campaign(stores, place, plan)
    put_line({"seed": plan.seed, "seconds": plan.seconds} | ledger.summary() | environment(), options.out)
    for table in ledger.tables():
        console.print(table)
    for breach in ledger.breaches[:40]:
        console.print(f"[red]breach:[/] {breach}", soft_wrap=True, markup=False)
    return int(bool(ledger.breaches))


if __name__ == "__main__":
    sys.exit(main())
