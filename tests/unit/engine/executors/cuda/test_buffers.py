"""What a step's integers look like on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.engine.executors.cuda.block_tables import TableShadow
from services.engine.executors.cuda.buffers import LoadedStep, StepBuffers, StepShape
from services.engine.executors.cuda.stream import EngineStream
from services.engine.requests.adapter import AdapterPin
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import PENDING, BlockCopy, Chunk, StateCopy

CPU = torch.device("cpu")


def chunk(name: str, tokens: list[int], start: int, slot: int, adapter: int = 0, **fields: Any) -> Chunk:
    pin = AdapterPin(f"x@{adapter}", "digest", adapter) if adapter else AdapterPin()
    request = Request(name, (1,), SamplingParams(), pin=pin)
    return Chunk(request, tokens, start, fields.pop("blocks", [1]), slot, fields.pop("samples", True), [], 0)


CHUNKS = [
    chunk("a", [50], 5, 2),
    chunk("b", [PENDING], 9, 1, adapter=4),
    chunk("c", list(range(100, 170)), 0, 3, samples=False),
    chunk("d", [20, 21, 22], 6, 5, adapter=2),
]


def buffers(capacity: int = 4096) -> StepBuffers:
    return StepBuffers(EngineStream(CPU), capacity=capacity, depth=2, adapter_slots=5)


def check(step: LoadedStep, shape: StepShape) -> None:
    """The rows of CHUNKS in a step of this shape, and padding everywhere else."""
    rows, pad = step.rows, shape.decodes - 2
    spare = shape.rows - shape.decodes - 73
    assert rows.decodes == shape.decodes
    assert rows.tokens.tolist() == [50, -1, *[0] * pad, *range(100, 170), 20, 21, 22, *[0] * spare]
    assert rows.positions.tolist() == [5, 9, *[0] * pad, *range(70), 6, 7, 8, *[0] * spare]
    assert rows.slots.tolist() == [2, 1, *[0] * pad, *[3] * 70, 5, 5, 5, *[0] * spare]
    assert rows.adapters.tolist() == [0, 4, *[0] * pad, *[0] * 70, 2, 2, 2, *[0] * spare]
    assert rows.active_adapters[:3].tolist() == [2, 2, 4]
    first, end = shape.decodes, shape.decodes + 73
    segments = rows.segments
    assert segments is not None
    assert segments.begin.tolist() == [first, first + 70, *[end] * (shape.segments - 1)]
    assert segments.start.tolist() == [0, 6, *[0] * (shape.segments - 2)]
    assert segments.slot.tolist() == [3, 5, *[0] * (shape.segments - 2)]
    assert segments.adapter.tolist() == [0, 2, *[0] * (shape.segments - 2)]
    assert segments.out_slot.tolist() == segments.slot.tolist()
    assert segments.links.tolist() == [1, 1, *[0] * (shape.segments - 2)]
    assert segments.tile_segment.tolist() == [0, 0, 1, *[-1] * (shape.tiles - 3)]
    assert segments.tile_row[:3].tolist() == [first, first + 64, first + 70]
    assert step.logit_rows is not None
    assert step.logit_rows.tolist() == [0, 1, end - 1]
    assert step.num_logits == 3
    assert step.has_adapters


def test_a_mixed_step_that_fits_exactly() -> None:
    shape = StepShape.of(2, [70, 3])
    assert shape == StepShape(2, 75, 2, 3)
    check(buffers().load(shape, CHUNKS, 2), shape)


def test_padding_overwrites_what_a_step_before_left() -> None:
    made = buffers()
    shape = StepShape(4, 132, 3, 5)
    for _ in range(2):  # both host buffers
        made.load(StepShape.of(0, [140]), [chunk("z", [77] * 140, 77, 7, adapter=3)], 0)
    check(made.load(shape, CHUNKS, 2), shape)


def test_a_chunk_with_snapshots_is_a_chain_of_segments() -> None:
    chunks = [
        CHUNKS[0],
        CHUNKS[2]._replace(start=3, snapshots=((11, 7), (67, 8))),
        CHUNKS[3],
        chunk("e", list(range(30, 50)), 0, 6, adapter=2)._replace(snapshots=((8, 9),), out_slot=10),
    ]
    shape = StepShape(4, 104, 8, 10)
    made = buffers()
    made.load(StepShape.of(0, [130]), [chunk("z", [77] * 130, 77, 7, adapter=3)], 0)
    step = made.load(shape, chunks, 1)
    rows, segments = step.rows, step.rows.segments
    assert segments is not None
    assert rows.positions.tolist() == [5, 0, 0, 0, *range(3, 73), 6, 7, 8, *range(20), *[0] * 7]
    assert rows.slots.tolist() == [2, 0, 0, 0, *[3] * 70, *[5] * 3, *[6] * 20, *[0] * 7]
    assert segments.begin.tolist() == [4, 12, 68, 74, 77, 85, 97, 97, 97]
    assert segments.start.tolist() == [3, 11, 67, 6, 0, 8, 0, 0]
    assert segments.slot.tolist() == [3, 3, 3, 5, 6, 6, 0, 0]
    assert segments.out_slot.tolist() == [7, 8, 3, 5, 9, 10, 0, 0]
    assert segments.links.tolist() == [3, 0, 0, 1, 2, 0, 0, 0]
    assert segments.adapter.tolist() == [0, 0, 0, 2, 2, 2, 0, 0]
    assert segments.tile_segment.tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1, -1]
    assert segments.tile_row.tolist() == [4, 12, 68, 74, 77, 85, 97, 97, 97, 97]
    assert step.logit_rows is not None
    assert step.logit_rows.tolist() == [0, 76, 96]
    exact = StepShape.of(1, [8, 56, 6, 3, 8, 12], chains=3)
    assert shape.holds(exact)
    assert exact.segments == 6
    kept = made.load(exact, chunks, 1).rows.segments
    assert kept is not None
    assert kept.max_chains == 3
    assert kept.links.tolist() == [3, 0, 0, 1, 2, 0]


def test_steps_of_a_shape_lie_at_the_same_addresses() -> None:
    made = buffers()
    shape = StepShape(4, 132, 3, 5)
    kept = made.keep(shape)
    step = made.load(shape, CHUNKS, 2)
    assert step.rows is kept
    check(step, shape)
    again = made.load(StepShape(4, 4), CHUNKS[:2], 2)
    assert again.rows.tokens.data_ptr() == kept.tokens.data_ptr()
    assert again.rows.segments is None
    assert again.logit_rows is None
    assert again.num_logits == 2


def test_every_section_starts_at_16_bytes() -> None:
    step = buffers().load(StepShape.of(2, [70, 3]), CHUNKS, 2)
    rows, segments = step.rows, step.rows.segments
    assert segments is not None
    base = rows.tokens.data_ptr()
    parts = [rows.positions, rows.slots, rows.adapters, rows.active_adapters, segments.begin, segments.start]
    parts += [segments.slot, segments.adapter, segments.tile_segment, segments.tile_row, segments.links, step.extra]
    assert all((part.data_ptr() - base) % 16 == 0 for part in parts)


def test_what_travels_beside_the_rows() -> None:
    step = buffers().load(
        StepShape(2, 2),
        CHUNKS[:2],
        2,
        entries=np.array([[7, 70], [8, 80]], dtype=np.int32),
        copies_before=[StateCopy(6, 2)],
        copies_after=[StateCopy(2, 8), StateCopy(1, 9)],
        block_copies=[BlockCopy(11, 12), BlockCopy(13, 14), BlockCopy(11, 15)],
        extra=np.array([5, -6, 7], dtype=np.int32),
    )
    assert step.table_entries.tolist() == [[7, 70], [8, 80]]
    assert step.copies_before.tolist() == [[6, 2]]
    assert step.copies_after.tolist() == [[2, 8], [1, 9]]
    assert step.block_copies.tolist() == [[11, 12], [13, 14], [11, 15]]
    assert step.extra.tolist() == [5, -6, 7]
    step = buffers().load(StepShape(2, 2), CHUNKS[:1], 1)
    assert step.table_entries.shape == step.copies_before.shape == step.copies_after.shape == (0, 2)
    assert step.block_copies.shape == (0, 2)
    assert not step.has_adapters


def test_entries_that_go_ahead() -> None:
    entries = np.arange(20, dtype=np.int32).reshape(-1, 2)
    assert buffers().send_entries(entries).tolist() == entries.tolist()


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        (StepShape(4, 8, 2, 2), True),
        (StepShape(2, 5, 2, 2), True),
        (StepShape(2, 4, 2, 2), False),
        (StepShape(1, 9, 2, 2), False),
        (StepShape(4, 9, 1, 2), False),
        (StepShape(4, 9, 2, 1), False),
        (StepShape(4, 4), False),
        (StepShape(0, 9, 2, 2), False),
    ],
)
def test_which_shapes_hold_a_step(shape: StepShape, fits: bool) -> None:
    assert shape.holds(StepShape.of(2, [2, 1])) == fits


def test_malformed_shapes() -> None:
    for numbers in ((0, 0), (2, 1), (0, 1), (1, 1, 1, 1), (0, 5, 1, 0)):
        with pytest.raises(ValueError, match="StepShape"):
            StepShape(*numbers)


def test_tables_send_what_is_new() -> None:
    shadow = TableShadow(num_slots=9, max_blocks=10)
    growing, other = [3, 4], [5]
    first = [chunk("a", [1], 1, 2, blocks=growing), chunk("b", [1], 1, 7, blocks=other)]
    assert shadow.entries(first).tolist() == [[20, 3], [21, 4], [70, 5]]
    assert shadow.entries(first).tolist() == []
    growing += [6]
    assert shadow.entries(first).tolist() == [[22, 6]]
    # Preempted: the same slot, a new list, even if it is equal.
    again = [chunk("a", [1], 1, 2, blocks=[3, 4, 6])]
    assert shadow.entries(again).tolist() == [[20, 3], [21, 4], [22, 6]]
    shadow.forget()
    assert shadow.entries(again).tolist() == [[20, 3], [21, 4], [22, 6]]
    with pytest.raises(ValueError, match="11 blocks"):
        shadow.entries([chunk("a", [1], 1, 2, blocks=list(range(1, 12)))])
