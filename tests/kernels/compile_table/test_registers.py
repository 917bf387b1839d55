"""Registers that nothing writes are found in a disassembly, and Hopper's kernels are assembled by what makes none."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.gpu.launch.compiler import prepare_compiler
from services.engine.executors.cuda.compile_ahead import Target
from tests.kernels.compile_table.registers import unwritten

# From dot_kernel with two adapters a product, as ptxas 12.8.93 made it and as 12.9.86 does.
_WRONG = """
        /*0100*/                   UMOV UR36, 0x400 ;
        /*06d0*/                   ULEA UR36, UR4, UR36, 0x18 ;
        /*1000*/                   USHF.R.U32.HI UR8, URZ, 0x4, UR36 ;
        /*1530*/                   UIADD3 UR4, UP0, UR37, 0x2, URZ ;
        /*1540*/                   UIADD3.X UR5, UR37, -0x80000000, URZ, UP0, !UPT ;
        /*1570*/                   UMOV UR10, UR4 ;
        /*1590*/                   UMOV UR11, UR5 ;
        /*1820*/                   HGMMA.64x8x16.F32.BF16 R36, R24, gdesc[UR8], R36 ;
"""
_RIGHT = _WRONG.replace("UR37", "UR8")


def test_a_register_that_nothing_writes_is_named_with_who_reads_it() -> None:
    assert unwritten(_WRONG) == {37: "/*1530*/ UIADD3 UR4, UP0, UR37, 0x2, URZ ;"}
    assert unwritten(_RIGHT) == {}


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("@!P0 STS.U16 [R10+UR36], R15", {36}),
        ("ULDC.64 UR36, c[0x0][0x210]", set()),
        ("@UP1 UIADD3 UR36, UR36, 0x1, URZ", set()),  # writes it, too: on the next turn it is there
        ("R2UR UR36, R11", set()),
        ("ULOP3.LUT UP0, UR36, UR40, 0x10, URZ, 0xc0, !UPT", {40}),
        ("UISETP.NE.AND UP0, UPT, UR36, URZ, UPT", {36}),
        ("VOTEU.ANY UR36, UPT, P0", set()),
        ("HGMMA.64x16x16.F32.BF16 R24, gdesc[UR36], R24", {36, 37, 38, 39}),
        ("HGMMA.64x16x16.F32.BF16 R24, R44, gdesc[UR36], R24, gsb0", {38, 39}),
        ("UTCHMMA gdesc[UR36], gdesc[UR40], tmem[UR7], tmem[UR26], idesc[UR27], UPT", {7, 26, 27, 36, 37, 40, 41}),
        ("UTCHMMA tmem[UR24], gdesc[UR28], tmem[UR7], tmem[UR26], idesc[UR27], UPT", {7, 24, 26, 27, 28, 29}),
        ("UTMALDG.2D [UR36], [UR40]", {36, 40}),
        ("LDG.E R98, desc[UR40][R8.64]", {40}),
        ("UMOV UR4, URZ", set()),
    ],
)
def test_what_instructions_read_and_write(line: str, read: set[int]) -> None:
    assert set(unwritten(f"        /*0010*/        {line} ;")) == read


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Stands in for what Triton knows of its tools."""
    made = SimpleNamespace()
    monkeypatch.setattr(triton.knobs, "nvidia", made)
    before = driver._active
    yield made
    driver._active = before


def _tool(path: str, version: str) -> SimpleNamespace:
    return SimpleNamespace(path=path, version=version)


@pytest.mark.parametrize(
    ("architecture", "usual", "newer", "cuda", "taken"),
    [
        (90, ("/triton/ptxas", "12.8"), "13.1", "13.0", True),
        (90, ("/triton/ptxas", "12.8"), "12.9", "12.8", True),
        (90, ("/triton/ptxas", "12.8"), "13.1", None, True),  # torch for CPUs compiles for other machines
        (90, ("/triton/ptxas", "12.8"), "13.1", "12.8", False),  # a driver of CUDA 12 may not load it
        (90, ("/chosen/ptxas", "12.8"), "13.1", "13.0", False),
        (90, ("/triton/ptxas", "13.10"), "13.9", "13.0", False),
        (80, ("/triton/ptxas", "12.8"), "13.1", "13.0", False),
    ],
)
def test_hopper_gets_the_newer_assembler_that_its_driver_loads(
    tools: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    architecture: int,
    usual: tuple[str, str],
    newer: str,
    cuda: str | None,
    taken: bool,
) -> None:
    tools.ptxas, tools.ptxas_blackwell = _tool(*usual), _tool("/triton/ptxas-blackwell", newer)
    before = tools.ptxas
    monkeypatch.setattr(torch.version, "cuda", cuda)
    driver.set_active(Target(GPUTarget("cuda", architecture, 32)))
    prepare_compiler()
    assert tools.ptxas == (tools.ptxas_blackwell.path if taken else before)
