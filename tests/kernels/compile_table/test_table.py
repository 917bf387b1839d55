"""The committed tables are of the kernels as they are, and all of them fit their cards."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest

from kernels.gpu.launch.device import architectures, named
from tests.kernels.compile_table import table
from tests.kernels.compile_table.table import Compiled, Table

LINE = Compiled("0123", "vector_kernel", registers=40, spilled=0, shared=1024, warps=4, launched_by="bf16; training")


OTHERS = [name for name in architectures() if name != "sm90"]


@pytest.mark.parametrize("architecture", architectures())
def test_every_line_of_a_table_fits_its_card(architecture: str) -> None:
    written = Table.read(architecture, "")
    assert len(written.lines) > 500
    assert written.faults({digest: line.kernel for digest, line in written.lines.items()}) == []


@pytest.mark.parametrize(
    "some",
    [("sm90",), *(pytest.param(pair, marks=pytest.mark.thorough) for pair in zip_longest(OTHERS[::2], OTHERS[1::2]))],
    ids=str,
)
def test_tables_are_of_what_is_launched_and_fit_their_cards(some: tuple[str | None, ...]) -> None:
    """A process of its own, as this one interprets; one for two architectures, as importing takes as long as half of
    one's variants, and all of them longer than a test may. One of each is compiled again."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_table", "--check", "--sample", "1", *filter(None, some)],
        cwd=Path(__file__).parents[3],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]


def test_a_table_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    written = Table("sm89", "Triton 3.7.1, ptxas 12.8", {LINE.digest: LINE})
    written.write()
    assert [path.name for path in tmp_path.iterdir()] == ["sm89.tsv"]
    assert Table.read("sm89", "another") == written
    assert Table.read("sm90", "another") == Table("sm90", "another", {})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"shared": 100 * 1024}, "does not fit the card"),
        ({"registers": 255, "warps": 16}, "does not fit the card"),
        # 97 registers of 32 threads are given as 13 units of 256.
        ({"registers": 97, "warps": 20}, "does not fit the card"),
        ({"spilled": 32}, None),
        ({"spilled": 40}, "spills in a decode"),
        ({"spilled": 96, "kernel": "_gradients_kernel"}, None),
        ({"digest": "4567"}, "has no line"),
    ],
)
def test_faults_of_a_table(change: dict[str, int], fault: str | None) -> None:
    line = replace(LINE, **change)  # type: ignore[arg-type]
    found = Table("sm89", "Triton 3.7.1, ptxas 12.8", {line.digest: line}).faults({LINE.digest: LINE.kernel})
    assert len(found) == (fault is not None) or fault == "has no line", found
    assert fault is None or fault in found[0]


def test_a_line_that_nobody_launches_is_a_fault() -> None:
    (fault,) = Table("sm89", "Triton 3.7.1, ptxas 12.8", {LINE.digest: LINE}).faults({})
    assert fault.startswith("sm89: nobody launches Compiled(digest='0123'")


def test_a_line_fits_exactly_as_much_as_a_block_may_have() -> None:
    limits = named("sm89")
    assert replace(LINE, shared=99 * 1024, registers=128, warps=16).fits(limits)
    assert not replace(LINE, shared=99 * 1024 + 1).fits(limits)
    assert not replace(LINE, registers=129, warps=16).fits(limits)
