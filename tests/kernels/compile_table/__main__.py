"""Makes or checks the table of compiled kernel variants: ``python -m tests.kernels.compile_table [sm89 …]``.

Compiles what an architecture launches and its table does not have, about a second a variant on a core, and drops what
it launches no more. A line's digest is of the kernel's source and what Triton compiles it for, so a changed kernel has
its variants compiled anew. What is compiled is saved every few variants: an interrupted run goes on where it was.

``--check`` compiles nothing and fails if a table is not of the variants that are launched, or a line of it does not fit
its card; with ``--sample N`` it compiles N variants of each architecture again and compares. ``--summary`` prints
Markdown. Without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from kernels.gpu.launch.device import architectures
from tests.kernels.compile_table.table import HEADER, Table
from tests.kernels.compile_table.upkeep import check, update


def _each(work: Callable[[str, int], list[str]], names: Sequence[str], number: int, at_once: int) -> list[str]:
    """Faults that ``work`` finds, in a process for each architecture, so many at once: this one if it is the only one.
    Others come from one that has imported everything: that takes half as long as finding the variants."""
    if len(names) == 1:
        return work(names[0], number)
    context = get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    found: list[str] = []
    with ProcessPoolExecutor(at_once, mp_context=context, max_tasks_per_child=1) as pool:
        for faults in pool.map(work, names, [number] * len(names)):
            found += faults
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kernels.compile_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("architectures", nargs="*", help=f"of {' '.join(architectures())}; all if none is named")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--sample", type=int, default=0, metavar="N")
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args(arguments)
    names = options.architectures or list(architectures())
    if options.summary:
        print("\n".join([HEADER, *(Table.read(name, "").summary() for name in names)]))
        return 0
    found = _each(check, names, options.sample, 2) if options.check else _each(update, names, options.jobs, 1)
    for fault in found:
        print(fault)
    if found:
        print(f"{len(found)} faults. After a change of kernels or of their cuts: {parser.prog} {' '.join(names)}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
