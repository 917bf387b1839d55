"""Table of an architecture's compiled kernel variants, a line each, in the folder ``compiled``."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from kernels.gpu.launch.device import DeviceLimits, named

FOLDER = Path(__file__).parent / "compiled"
DECODE = frozenset(
    {
        "_decode_kernel",
        "_gated_delta_step_kernel",
        "_late_step_kernel",
        "dot_kernel",
        "int4_vector_kernel",
        "stream_kernel",
        "tma_kernel",
        "vector_kernel",
    }
)
"""Kernels of a decode step that move its bytes: a step of few rows waits for each of their instructions."""
MOST_SPILLED = 32
"""Bytes a thread of those kernels may spill. The goal is none; but int4 products of 3 and 4 rows, which spill 24, are
faster than what does not (kernels.gpu.linear.skinny_configs)."""
_ALLOCATED = 256
"""Registers are given to a warp in units of so many (CUDA C++ Programming Guide, occupancy)."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One variant as compiled for an architecture."""

    digest: str
    """Of all that decides what it is compiled to (`variants.digest_of`)."""
    kernel: str
    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of local memory a thread."""
    shared: int
    """Bytes of a block."""
    warps: int
    launched_by: str
    """Starts that launch it, and training."""

    def fits(self, limits: DeviceLimits) -> bool:
        """True if a block of it fits the card."""
        of_warp = -(-32 * self.registers // _ALLOCATED) * _ALLOCATED
        return self.shared <= limits.shared_memory and of_warp * self.warps <= limits.registers


@dataclass(frozen=True, slots=True)
class Table:
    """Committed lines of an architecture."""

    architecture: str
    compiler: str
    """Versions of Triton and of its assembler that compiled them."""
    lines: dict[str, Compiled]
    """By digest."""

    @classmethod
    def read(cls, architecture: str, compiler: str) -> Table:
        """The table of an architecture; where there is none, an empty one of that compiler."""
        path = FOLDER / f"{architecture}.tsv"
        if not path.exists():
            return cls(architecture, compiler, {})
        kinds: dict[str, Callable[[str], Any]] = {
            field.name: int if field.type == "int" else str for field in fields(Compiled)
        }
        with path.open(newline="") as file:
            version = file.readline().removeprefix("# ").strip()
            rows = csv.DictReader(file, delimiter="\t")
            made = [Compiled(**{name: kind(row[name]) for name, kind in kinds.items()}) for row in rows]
        return cls(architecture, version, {line.digest: line for line in made})

    def write(self) -> None:
        """Writes all of it; interrupted, nothing."""
        with tempfile.NamedTemporaryFile("w", dir=FOLDER, delete=False, newline="") as file:
            file.write(f"# {self.compiler}\n")
            writer = csv.writer(file, delimiter="\t", lineterminator="\n")
            writer.writerow([field.name for field in fields(Compiled)])
            lines = sorted(self.lines.values(), key=lambda line: (line.kernel, line.digest))
            writer.writerows(astuple(line) for line in lines)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(FOLDER / f"{self.architecture}.tsv")

    def faults(self, launched: Mapping[str, str]) -> list[str]:
        """What of it breaks a promise: a variant without a line, a line that nobody launches, that does not fit its
        card, or that spills too much in a decode kernel.

        Args:
            launched: digests and kernels of all variants.
        """
        limits = named(self.architecture)
        found = [f"{kernel} {digest} has no line" for digest, kernel in launched.items() if digest not in self.lines]
        for digest, line in self.lines.items():
            if digest not in launched:
                found.append(f"nobody launches {line}")
            if not line.fits(limits):
                found.append(f"does not fit the card: {line}")
            if line.spilled > MOST_SPILLED and line.kernel in DECODE:
                found.append(f"spills in a decode: {line}")
        return [f"{self.architecture}: {fault}" for fault in found]

    def summary(self) -> str:
        """Line of a Markdown table, under HEADER."""
        limits, lines = named(self.architecture), self.lines.values()
        spilling = [line for line in lines if line.spilled]
        cells = (
            self.architecture,
            len(lines),
            f"{max((line.shared for line in lines), default=0) / 1024:.1f} of {limits.shared_memory / 1024:.0f} KiB",
            max((line.registers for line in lines), default=0),
            len(spilling),
            sum(line.kernel in DECODE for line in spilling),
            f"{max((line.spilled for line in spilling), default=0)} B",
        )
        return f"| {' | '.join(map(str, cells))} |"


HEADER = """\
| | variants | most shared memory of a block | most registers of a thread | spill | of them in a decode | most spilled |
|---|---|---|---|---|---|---|"""
