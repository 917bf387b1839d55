"""Kernel variants of an architecture: which are launched, by a digest that any machine finds, and what each takes."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import make_backend
from triton.runtime import driver

from kernels.gpu.launch.compiler import prepare_compiler
from kernels.gpu.launch.device import DeviceLimits, named
from services.engine.executors.cuda.compile_ahead import Target, Variant
from tests.kernels.compile_table.kernel_source import source_of
from tests.kernels.compile_table.launches import variants_of
from tests.kernels.compile_table.registers import unwritten
from tests.kernels.compile_table.table import Compiled


@dataclass(frozen=True, slots=True)
class Launched:
    """A variant that an architecture launches."""

    variant: Variant
    by: str
    """Starts, and training."""


def launched(architecture: str) -> dict[str, Launched]:
    """All variants by digest. A process can say so of one architecture only."""
    variants: dict[str, Variant] = {}
    by: dict[str, list[str]] = {}
    for name, launches in variants_of(_cards(architecture)):
        for digest, variant in {digest_of(each, named(architecture).architecture): each for each in launches}.items():
            variants[digest] = variant
            by.setdefault(digest, []).append(name)
    return {digest: Launched(variant, "; ".join(by[digest])) for digest, variant in variants.items()}


_MULTIPROCESSORS = {
    "sm80": (56, 108),  # A30, A100
    "sm86": (28, 84),  # RTX 3060, A40
    "sm89": (34, 142),  # RTX 4060 Ti, L40S
    "sm90": (114, 132),  # H100 PCIe, H200
    "sm120": (36, 188),  # RTX 5060 Ti, RTX PRO 6000
}
"""Fewest and most multiprocessors of the cards of an architecture: some cuts depend on their number."""


def _cards(architecture: str) -> list[DeviceLimits]:
    limits = named(architecture)
    numbers = _MULTIPROCESSORS.get(architecture, (limits.multiprocessors,))
    return [replace(limits, multiprocessors=multiprocessors) for multiprocessors in numbers]


def compiler_of(architecture: str) -> str:
    """Triton and the assembler that compile for an architecture here."""
    target = GPUTarget("cuda", named(architecture).architecture, 32)
    driver.set_active(Target(target))
    prepare_compiler()
    return f"Triton {triton.__version__}, ptxas {get_ptxas(target.arch).version}"


def digest_of(variant: Variant, architecture: int) -> str:
    """Digest of all that decides what a variant is compiled to, but Triton's version and the machine.

    Raises:
        ValueError: a kernel is compiled for something that has no name but its address.
    """
    defaults = _default_options(architecture)
    options = sorted((name, value) for name, value in variant.options.items() if value != defaults[name])
    attributes = sorted((place, marks) for place, marks in variant.attributes.items() if marks)
    source = _source(variant.module, variant.name)
    constants = sorted(variant.constants.items())
    text = repr((variant.name, source, variant.signature, constants, attributes, options))
    if " at 0x" in text:
        raise ValueError(f"{variant.name} is compiled for an object of this process: {text[-2000:]}")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _source(module: str, name: str) -> str:
    return source_of(getattr(import_module(module), name))


@cache
def _default_options(architecture: int) -> dict[str, Any]:
    defaults: dict[str, Any] = make_backend(GPUTarget("cuda", architecture, 32)).parse_options({}).__dict__
    return defaults


def compiled(architecture: str, digest: str, launch: Launched) -> Compiled:
    """Compiles a variant, or finds it in Triton's cache on disk.

    Raises:
        RuntimeError: the assembler made code that reads a register which nothing writes.
    """
    target = GPUTarget("cuda", named(architecture).architecture, 32)
    driver.set_active(Target(target))
    prepare_compiler()
    options = make_backend(target).parse_options(launch.variant.options)
    made = triton.compile(launch.variant.ast(), target=target, options=options.__dict__)
    usage = _usage(made.asm["cubin"])
    if readers := unwritten(_tool("nvdisasm", "-c", made.asm["cubin"])):
        raise RuntimeError(f"{launch.variant.name} {digest} reads what nothing writes: {readers}")
    return Compiled(
        digest,
        launch.variant.name,
        registers=usage["REG"],
        spilled=usage["LOCAL"] + usage["STACK"],
        shared=made.metadata.shared,
        warps=made.metadata.num_warps,
        launched_by=launch.by,
    )


def _usage(cubin: bytes) -> dict[str, int]:
    """What cuobjdump of the installed Triton says of a kernel's resources."""
    said = _tool("cuobjdump", "--dump-resource-usage", cubin)
    pairs = (item.split(":") for item in said.split() if item.startswith(("REG:", "LOCAL:", "STACK:")))
    return {name: int(value) for name, value in pairs}


def _tool(name: str, option: str, cubin: bytes) -> str:
    """What a tool of the installed Triton says of a kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), option, file.name], capture_output=True, text=True, check=True).stdout
