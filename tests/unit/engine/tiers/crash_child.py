"""Writes entries to the directory of a disk tier until it is killed; says so when it has begun."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from tests.unit.engine.tiers.toy_device import LARGE, Bench, chain, limits


def main() -> None:
    bench = Bench(limits(4000, disk_dir=Path(sys.argv[1]), disk_bytes=8_000_000), layout=LARGE)
    print("begun", flush=True)
    for seed in count(int(sys.argv[2])):
        for place, entry in enumerate(chain(4, 9, 4, seed=seed)):
            bench.submit(bench.put(entry, 1 + 10 * place, 1 + place))
        bench.settle()


if __name__ == "__main__":
    main()
