"""Upkeep of an architecture's table: brings it up to date, or checks it. Needs a process for each architecture."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

from tests.kernels.compile_table.table import Table
from tests.kernels.compile_table.variants import Launched, compiled, compiler_of, launched

_SAVED_EVERY = 20


def update(architecture: str, jobs: int) -> list[str]:
    """Brings the table of an architecture up to date with so many processes; returns its faults."""
    launches, compiler = launched(architecture), compiler_of(architecture)
    table = Table.read(architecture, compiler)
    if table.compiler != compiler:
        table = Table(architecture, compiler, {})
    missing = [digest for digest in launches if digest not in table.lines]
    print(f"{architecture}: {len(launches)} variants, {len(missing)} to compile", flush=True)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        lines = pool.map(partial(compiled, architecture), missing, [launches[digest] for digest in missing])
        for count, line in enumerate(lines, start=1):
            table.lines[line.digest] = line
            if count % _SAVED_EVERY == 0:
                table.write()
                print(f"{architecture}: {count} of {len(missing)}", flush=True)
    current = {digest: replace(table.lines[digest], launched_by=launch.by) for digest, launch in launches.items()}
    table = replace(table, lines=current)
    table.write()
    return table.faults(_names(launches))


def check(architecture: str, samples: int) -> list[str]:
    """Faults of an architecture's table, and of its first lines by digest, which are compiled again if this compiler is
    the one that compiled them."""
    launches, compiler = launched(architecture), compiler_of(architecture)
    table = Table.read(architecture, compiler)
    found = table.faults(_names(launches))
    same = table.compiler == compiler
    if samples and not same:
        print(f"{architecture}: the table is by {table.compiler}, this is {compiler}: nothing is compiled again")
    for digest in sorted(launches.keys() & table.lines.keys())[: samples if same else 0]:
        known, made = table.lines[digest], compiled(architecture, digest, launches[digest])
        if made != known:
            found.append(f"{architecture}: compiled again, {made} was {known}")
    return found


def _names(launches: dict[str, Launched]) -> dict[str, str]:
    return {digest: launch.variant.name for digest, launch in launches.items()}
