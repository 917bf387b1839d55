"""Compiles kernels for Hopper (sm_90) on a machine without a GPU: the real launchers, called with CPU tensors.

``python -m tests.kernels.hopper tests.kernels.gpu.linear.compile_cases`` runs ``launches()`` of that module and prints
a line a kernel (or JSON with --json): registers, spilled bytes, shared memory. Must be a process of its own: Triton
decides at import whether it interprets.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as compiled for sm_90."""

    name: str
    registers: int
    spilled: int
    """Bytes of local memory a thread."""
    shared: int
    warps: int
    constants: str
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)

    def sass(self) -> str:
        """The disassembly."""
        return cuobjdump(self.cubin, "--dump-sass")


class _Hopper:
    """Answers that Triton asks of a driver before it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiled(*, describe: bool = True) -> Iterator[list[Compiled]]:
    """Inside, launching a kernel compiles it for sm_90 and runs nothing; the list fills with what was compiled, unless
    nobody wants it described."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from kernels.gpu.launch.cache_keys import stable_keys

    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("Triton interprets in this process: compile in another one")
    found: list[Compiled] = []
    seen: set[str] = set()
    stable_keys()
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        if describe and kernel.hash not in seen:
            seen.add(kernel.hash)
            constants = {name: value for name, value in kwargs.items() if isinstance(value, int | float | bool | str)}
            found.append(_describe(self.__name__, kernel, constants))
        return kernel

    driver.set_active(_Hopper())  # for good: this process is for compiling, and may have no driver to go back to
    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = original


def _describe(name: str, kernel: Any, constants: dict[str, Any]) -> Compiled:
    cubin = kernel.asm["cubin"]
    usage = cuobjdump(cubin, "--dump-resource-usage")
    numbers = dict(item.split(":") for item in usage.split() if item.startswith(("REG:", "LOCAL:", "STACK:")))
    return Compiled(
        name=name,
        registers=int(numbers["REG"]),
        spilled=int(numbers["LOCAL"]) + int(numbers["STACK"]),
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        constants=" ".join(f"{key}={value}" for key, value in constants.items()),
        ptx=kernel.asm["ptx"],
        cubin=cubin,
    )


def cuobjdump(cubin: bytes, what: str) -> str:
    """What cuobjdump of the installed Triton says of a kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for module in options.modules:
        with compiled() as kernels:
            importlib.import_module(module).launches()
        rows += [
            {"module": module} | {key: value for key, value in asdict(kernel).items() if key not in ("ptx", "cubin")}
            for kernel in kernels
        ]
    if options.json:
        json.dump(rows, sys.stdout)
        return
    for row in rows:
        print(
            f"{row['name']:<32} regs {row['registers']:>3}  spilled {row['spilled']:>5} B  "
            f"shared {row['shared']:>6} B  warps {row['warps']}  {row['constants']}"
        )


if __name__ == "__main__":
    main()
