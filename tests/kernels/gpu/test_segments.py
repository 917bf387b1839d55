from __future__ import annotations

import pytest
import torch

from kernels.gpu.segments import TILE, Segments


def test_tiles_cover_each_segment_once_and_padding_is_empty() -> None:
    lengths = [1, TILE, TILE + 1, 3 * TILE - 1]
    segments = Segments.build(
        lengths, [0, 5, 0, 64], [3, 1, 2, 9], [0, 0, 2, 0], "cpu", first_row=7, max_segments=6, max_tiles=12
    )
    rows: list[int] = []
    for segment, row in zip(segments.tile_segment.tolist(), segments.tile_row.tolist(), strict=True):
        if segment >= 0:
            end = min(row + TILE, segments.begin[segment + 1].item())
            assert row >= segments.begin[segment]
            rows.extend(range(row, int(end)))
    assert rows == list(range(7, 7 + sum(lengths)))
    assert segments.begin.tolist() == [7, 8, 72, 137, 328, 328, 328]
    assert segments.slot.tolist() == [3, 1, 2, 9, 0, 0]
    assert segments.links.tolist() == [1, 1, 1, 1, 0, 0]
    assert segments.tile_segment.tolist().count(-1) == 12 - 7
    assert (segments.max_segments, segments.max_tiles) == (6, 12)


def test_contradicting_shapes_are_refused() -> None:
    good = Segments.build([2], [0], [1], [0], "cpu")
    rest = (good.start, good.slot, good.adapter, good.tile_segment, good.tile_row, good.out_slot, good.links)
    with pytest.raises(ValueError, match="1 segments"):
        Segments(good.start, *rest)
    with pytest.raises(ValueError, match="links"):
        Segments(good.begin, *rest[:-1], good.begin)
    with pytest.raises(ValueError, match="int32"):
        Segments(good.begin.to(torch.int64), *rest)
