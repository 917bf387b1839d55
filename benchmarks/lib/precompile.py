"""Fills Triton's compile cache on all cores before something is timed, or before an engine starts.

A sweep over hundreds of kernel variants would spend minutes compiling on one core. ``precompile(thunks)`` deals the
launches out to processes that compile for this machine's GPU without running anything; afterwards the same launches
find their kernels in the cache. Launches must depend on shapes only: they get CPU tensors here.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from cli.local.process import die_with_parent

Launch = Callable[[Any], object]
"""Called with the device to make its tensors on; launches kernels."""


def precompile(launches: Sequence[Launch], *, processes: int = 0) -> float:
    """Compiles what the launches use; must be called before this process touches CUDA.

    A launch that does not compile says so on standard output and keeps no other from compiling.

    Args:
        processes: 0: one a core.

    Returns:
        Seconds it took.
    """
    # Here too: this process asks the cache for what the others leave there.
    from kernels.gpu.launch.compiler import prepare_compiler, stable_keys

    stable_keys()
    began = time.perf_counter()
    count = min(len(launches), processes or len(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("fork")
    parent = os.getpid()
    workers = [context.Process(target=_compile, args=(launches[index::count], parent)) for index in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    prepare_compiler()  # asks the device, which no process that is forked from may have done
    died = [worker.exitcode for worker in workers if worker.exitcode]
    if died:
        print(f"{len(died)} of {count} compiling processes died: {died}", flush=True)
    return time.perf_counter() - began


def _compile(launches: Sequence[Launch], parent: int) -> None:
    if (ask := die_with_parent(parent)) is not None:
        ask()
    # Imported here: the test utility patches Triton's driver, which no other process of a benchmark wants.
    import torch

    from tests.kernels.hopper import compiled

    torch.set_num_threads(1)
    with compiled():
        for launch in launches:
            try:
                launch(torch.device("cpu"))
            except Exception as error:  # whatever a compiler can raise: the launch will meet it again
                print(f"does not compile: {type(error).__name__}: {error}"[:400], flush=True)
