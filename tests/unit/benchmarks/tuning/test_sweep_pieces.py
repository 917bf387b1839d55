"""The sweep over pieces of long prompts runs at a tiny shape, and its figures become the rule's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks.tuning.sweep_pieces import ENDS, PIECES, PROMPTS, SHAPES, Case, cases, measure, table, times_of
from kernels.gpu.delta.chunk_configs import PieceTimes
from kernels.gpu.delta.shape import DeltaShape
from tests.kernels.gpu import interpreter  # noqa: F401

TINY = DeltaShape(key_heads=1, value_heads=1, key_dim=16, value_dim=16)


def launched(launches: Sequence[Callable[[], object]]) -> float:
    launches[0]()
    return float(len(launches))


def test_every_pass_is_measured_and_right() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = list(cases([TINY], [(1, 288), (2, 128)], (1, 2, 4)))
    assert [(case.length, case.pieces) for case in found] == [
        *((288, number) for number in (1, 2, 2, 4, 4)),
        *((128, number) for number in (1, 2, 2)),
    ]
    rows = [measure(case, device, launched) for case in found if case.ends == ENDS[0]]
    assert [row["cut"] for row in rows] == [1, 2, 5, 1, 2]
    assert [sorted(name for name in row if name.endswith("_us")) for row in rows[:3]] == [
        ["scan_us"],
        ["ends_us", "scan_us"],
        ["ends_us", "join_us", "scan_us"],
    ]
    whole = {row["prompts"]: row for row in rows if row["pieces"] == 1}
    for row in rows:
        # Roundings of bfloat16, and no more of them in pieces.
        for error in ("error_out", "error_state"):
            assert row[error] < min(0.01, 1.2 * whole[row["prompts"]][error])
    assert len(table(rows).splitlines()) == 1 + len(rows)


@pytest.mark.parametrize(("asked", "tiles", "cut"), [(1, 60, 1), (2, 30, 2), (4, 15, 4), (8, 7, 8), (16, 4, 15)])
def test_pieces_are_as_many_as_asked_for_or_nearly(asked: int, tiles: int, cut: int) -> None:
    case = Case(SHAPES[0], 1, 3840, asked, ENDS[0])
    assert (case.tiles, case.key()["cut"]) == (tiles, cut)


def test_times_come_back_from_what_they_predict() -> None:
    times = PieceTimes(few=1.5, many=2.25, ends=1.25, join=2.0, launches=4.0)

    def row(case: Case) -> dict[str, Any]:
        tiles, key = case.length // 64, case.key()
        length = tiles / key["cut"]
        scan = tiles * times.few if case.pieces == 1 else length * times.many * (1 if case.pieces == 2 else 4)
        slower = 1 if case.ends == ENDS[0] else 3
        ends = times.launches + slower * length * times.ends
        return key | {"scan_us": scan, "ends_us": ends, "join_us": times.join * (key["cut"] - 2)}

    rows = [row(case) for case in cases(SHAPES[:1], PROMPTS, PIECES)]
    assert times_of(rows) == times
