"""For each line on its input, a number, starts a process that writes entries to the directory of a disk tier until it
is killed. Prints its pid when it has begun, and "ended" after."""

from __future__ import annotations

import logging
import os
import sys
from itertools import count
from pathlib import Path

import structlog

from tests.unit.engine.kv_offload.toy_device import LARGE, Bench, chain, limits


def write(directory: Path, first: int) -> None:
    bench = Bench(limits(4000, disk_dir=directory, disk_bytes=8_000_000), layout=LARGE)
    print(os.getpid(), flush=True)
    for seed in count(first):
        for place, entry in enumerate(chain(4, 9, 4, seed=seed)):
            bench.submit(bench.put(entry, 1 + 10 * place, 1 + place))
        bench.settle()


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    for line in sys.stdin:
        # One import for all of them; there are no threads here.
        child = os.fork()
        if not child:
            write(Path(sys.argv[1]), int(line))
        os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
