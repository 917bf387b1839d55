"""The sweep over cuts of experts offers such as run, and tells the best."""

from __future__ import annotations

import pytest

from benchmarks.tuning.experts import candidates, shape_of, table
from kernels.gpu.experts.configs import Grouped, Streamed
from kernels.gpu.launch.device import named
from kernels.gpu.linear.skinny_configs import Kind

SMALL = named("sm89")


@pytest.mark.parametrize("kind", ["none", "fp8", "int4"])
def test_cuts_fit_and_there_is_one_of_each_kind(kind: Kind) -> None:
    for rows, types in ((1, {Streamed}), (4, {Streamed, Grouped}), (64, {Grouped}), (8192, {Grouped})):
        found = list(candidates(rows, kind, SMALL))
        assert [side for side, _ in found].count("chosen") == 1
        assert {type(cut) for side, cut in found if side != "chosen"} == types
        for _, cut in found:
            if isinstance(cut, Grouped):
                for tile in (cut.gate_up, cut.down):
                    assert tile.shared_memory(kind, shape_of(kind).itemsize, float8=cut.float8) <= SMALL.shared_memory


def test_the_table_has_the_best_of_each_product() -> None:
    def row(what: str, us: float, block_n: int) -> dict[str, object]:
        tile = {"block_n": block_n, "warps": 4}
        return {"kind": "fp8", "rows": 1, "what": what, "cut": "Streamed", "tile": tile, "us": us, "floor_us": 8.0}

    failed = {"kind": "fp8", "rows": 1, "what": "down", "failed": "why"}
    rows = [row("chosen", 20.0, 8), row("gate_up", 19.0, 16), row("gate_up", 18.0, 32), row("down", 21.0, 4), failed]
    line = table(rows).splitlines()[1]
    assert line.split() == [
        *("fp8", "1", "8.0", "20.0"),
        *("18.0", "(32,", "4)", "Streamed"),
        *("21.0", "(4,", "4)", "Streamed"),
    ]
