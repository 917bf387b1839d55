"""Compiles every kernel variant of an engine's start and of a training job of the 4B shape for each architecture, and
keeps what each takes in tests/kernels/compiled: ``python -m tests.kernels.compile_table [sm89 …]``.

A line a variant: its digest, kernel, registers, spilled bytes a thread, shared memory, warps, and what launches it.
Lines whose digest is already there are kept, others compiled, the rest dropped. The digest is of the kernel's source:
a change of a kernel compiles its variants anew, minutes on two cores. ``--check`` compiles nothing, and fails where a
variant is missing or one that is there does not fit its card. Without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver

from kernels.gpu.configs import KernelConfigs
from kernels.gpu.launch.cache_keys import stable_keys
from kernels.gpu.launch.device import DeviceLimits, architectures, named
from services.engine.executors.cuda.compile_ahead import Target, Variant
from tests.kernels.engine_variants import QWEN_4B, variants_of
from tests.kernels.hopper import cuobjdump

FOLDER = Path(__file__).parent / "compiled"
DECODE = ("_decode_kernel", "vector_kernel", "stream_kernel", "tma_kernel", "dot_kernel", "_step_kernel")
"""Kernels of a decode step, which must not spill: a step of few rows waits for each of their instructions."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One variant as compiled for an architecture."""

    digest: str
    kernel: str
    registers: int
    spilled: int
    """Bytes of local memory a thread."""
    shared: int
    warps: int
    launched_by: str
    """Starts that launch it, and training."""

    def fits(self, limits: DeviceLimits) -> bool:
        """True if a block of it fits the card."""
        return self.shared <= limits.shared_memory and 32 * self.warps * self.registers <= limits.registers


def table(architecture: str) -> dict[str, Compiled]:
    """The committed lines of an architecture, by digest."""
    path = FOLDER / f"{architecture}.tsv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = csv.DictReader(file, delimiter="\t")
        kinds = {field.name: int if field.type == "int" else str for field in fields(Compiled)}
        made = [Compiled(**{name: kind(row[name]) for name, kind in kinds.items()}) for row in rows]
    return {line.digest: line for line in made}


def wanted(architecture: str) -> dict[str, tuple[Variant, str]]:
    """Variants that an architecture launches, and by what, by digest."""
    found: dict[str, tuple[Variant, str]] = {}
    for name, variants in variants_of(KernelConfigs(named(architecture)), QWEN_4B):
        for variant in variants:
            digest = hashlib.sha256(variant.identity().encode()).hexdigest()[:16]
            known = found.get(digest)
            found[digest] = (variant, name if known is None else f"{known[1]}; {name}")
    return found


def faults(architecture: str, lines: Iterable[Compiled]) -> list[str]:
    """What of a table breaks a promise: a variant that does not fit its card, a decode kernel that spills."""
    limits = named(architecture)
    found = [f"{architecture}: {line} does not fit" for line in lines if not line.fits(limits)]
    return found + [f"{architecture}: {line} spills" for line in lines if line.spilled and line.kernel in DECODE]


def _compile(job: tuple[int, str, Variant, str]) -> Compiled:
    architecture, digest, variant, launched_by = job
    stable_keys()
    target = GPUTarget("cuda", architecture, 32)
    driver.set_active(Target(target))
    options = make_backend(target).parse_options(variant.options)
    made = triton.compile(variant.ast(), target=target, options=options.__dict__)
    usage = cuobjdump(made.asm["cubin"], "--dump-resource-usage")
    numbers = dict(item.split(":") for item in usage.split() if item.startswith(("REG:", "LOCAL:", "STACK:")))
    spilled = int(numbers["LOCAL"]) + int(numbers["STACK"])
    warps = made.metadata.num_warps
    return Compiled(digest, variant.name, int(numbers["REG"]), spilled, made.metadata.shared, warps, launched_by)


def _write(architecture: str, lines: Iterable[Compiled]) -> None:
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{architecture}.tsv"
    with tempfile.NamedTemporaryFile("w", dir=FOLDER, delete=False, newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow([field.name for field in fields(Compiled)])
        writer.writerows(astuple(line) for line in sorted(lines, key=lambda line: (line.kernel, line.digest)))
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def _update(architecture: str, check: bool) -> list[str]:
    limits, known = named(architecture), table(architecture)
    launches = wanted(architecture)
    missing = [digest for digest in launches if digest not in known]
    lines = {digest: replace(known[digest], launched_by=by) for digest, (_, by) in launches.items() if digest in known}
    print(f"{architecture}: {len(launches)} variants, {len(missing)} to compile", flush=True)
    if check:
        found = [f"{architecture}: {launches[digest][0].name} is not in the table" for digest in missing]
        return found + faults(architecture, lines.values())
    jobs = [(limits.architecture, digest, *launches[digest]) for digest in missing]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        for count, line in enumerate(pool.map(_compile, jobs), start=1):
            lines[line.digest] = line
            if count % 20 == 0:  # what has been compiled survives an interruption
                _write(architecture, [*lines.values(), *(old for digest, old in known.items() if digest not in lines)])
    _write(architecture, lines.values())
    return faults(architecture, lines.values())


def _each(names: list[str], check: bool) -> Iterator[int]:
    """A process for each architecture: kernels remember the first target that they were asked for."""
    for name in names:
        command = [sys.executable, "-m", "tests.kernels.compile_table", "--one", name, *(["--check"] if check else [])]
        yield subprocess.run(command, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help=f"of {' '.join(architectures())}; all if none is named")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        found = _update(options.one, options.check)
        print(*found, sep="\n")
        return int(bool(found))
    return max(_each(options.architectures or list(architectures()), options.check))


if __name__ == "__main__":
    sys.exit(main())
