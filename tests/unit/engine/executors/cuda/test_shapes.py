"""Which shapes are captured, and which of them a step runs in."""

from __future__ import annotations

import pytest

from kernels.gpu.delta.waiting_writes import MOST
from services.engine.executors.cuda.buffers import StepShape
from services.engine.executors.cuda.shapes import (
    captured_shapes,
    decode_bucket,
    decode_buckets,
    draft_counts,
    draft_group,
    most_decode_rows,
    smallest,
    verified_rows,
)
from services.engine.executors.cuda.warm_up import sampling_plans, warm_up_shapes
from services.engine.settings import MOST_DRAFTED_ON_GPU


def test_buckets_hold_every_batch() -> None:
    assert [decode_bucket(n) for n in (1, 2, 3, 9, 17, 64, 65, 256, 257, 300)] == [
        1,
        2,
        4,
        16,
        24,
        64,
        96,
        256,
        320,
        320,
    ]
    assert decode_buckets(9) == [1, 2, 4, 8, 16]
    assert decode_buckets(300)[-2:] == [256, 320]


def test_the_largest_are_captured_first() -> None:
    shapes = captured_shapes(256, 256, 8192, 2048)
    sizes = [shape.rows for shape in shapes]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(shapes)) == len(shapes)
    assert {shape.decodes for shape in shapes if not shape.segments} == set(decode_buckets(256))
    assert {shape.rows for shape in shapes if not shape.decodes} == {64, 128, 256, 512, 1024, 1536, 2048}
    mixed = {(shape.decodes, shape.rows - shape.decodes) for shape in shapes if shape.decodes and shape.segments}
    assert mixed == {(decodes, tokens) for decodes in (8, 32, 64, 128, 256) for tokens in (128, 512, 1024, 2048)}


def test_numbers_of_draft_tokens() -> None:
    assert MOST_DRAFTED_ON_GPU == MOST - 1, "and the newest token"
    assert [draft_counts(most) for most in (0, 1, 4, 7, 16)] == [
        [],
        [1],
        [1, 2, 3, 4],
        [1, 2, 3, 4, 6, 7],
        [1, 2, 3, 4, 6, 8, 12, 16],
    ]
    assert [draft_group(rows, 7) for rows in (1, 2, 5, 6, 8)] == [1, 2, 5, 7, 8]
    assert draft_group(1, 0) == 1


@pytest.mark.parametrize(
    ("largest", "sequences", "decodes"),
    [(0, 64, set()), (8, 64, {1, 2, 4, 8}), (256, 3, {1, 2, 4}), (256, 20, {1, 2, 4, 8, 16, 24})],
)
def test_no_more_than_can_run(largest: int, sequences: int, decodes: set[int]) -> None:
    shapes = captured_shapes(largest, sequences, 100, 512)
    assert {shape.decodes for shape in shapes if not shape.segments} == decodes
    assert {shape.rows for shape in shapes if shape.segments} == ({64} if largest else set())


@pytest.mark.parametrize("draft_tokens", [4, 7, 16])
@pytest.mark.parametrize("sequences", [1, 3, 5, 20, 64, 100, 256])
def test_shapes_of_decodes_with_draft_tokens(sequences: int, draft_tokens: int) -> None:
    shapes = captured_shapes(256, sequences, 8192, 512, draft_tokens=draft_tokens)
    assert len(set(shapes)) == len(shapes)
    buckets = decode_buckets(most_decode_rows(sequences, draft_tokens))
    assert all(decode_bucket(shape.decodes) in buckets for shape in shapes if shape.decodes)
    assert max(shape.rows for shape in shapes if shape.group > 1) <= verified_rows(sequences, draft_tokens)
    for chunks in {1, min(sequences, 3), min(sequences, 32)}:
        for count in draft_counts(draft_tokens):
            wanted = StepShape.of_groups(chunks, 1 + count)
            found = smallest(shapes, wanted)
            assert found is not None
            assert found.group == 1 + count
            assert found.rows < 2 * wanted.rows or chunks == 1
    assert smallest(shapes, StepShape.of_groups(33, 2)) is None
    plain = smallest(shapes, StepShape(1, 1))
    assert plain is not None
    assert plain.group == 1


def test_groups_are_of_decodes_alone() -> None:
    with pytest.raises(ValueError, match="groups of rows, and no prefill"):
        StepShape(4, 70, 2, 2, group=2)
    with pytest.raises(ValueError, match="groups of rows"):
        StepShape(5, 5, group=2)


def test_a_step_runs_in_the_shape_with_the_least_padding() -> None:
    shapes = captured_shapes(64, 64, 1024, 512)
    assert smallest(shapes, StepShape(5, 5)) == StepShape(8, 8)
    found = smallest(shapes, StepShape.of(0, [100]))
    assert found is not None
    assert (found.decodes, found.rows, found.segments) == (0, 128, 4)
    found = smallest(shapes, StepShape.of(0, [20] * 5))
    assert found is not None
    assert (found.rows, found.segments) == (128, 24)
    found = smallest(shapes, StepShape.of(9, [100, 7]))
    assert found is not None
    assert (found.decodes, found.rows) == (32, 160)
    assert smallest(shapes, StepShape.of(0, [1025])) is None
    assert smallest(shapes, StepShape.of(9, [600])) is None
    assert smallest(shapes, StepShape.of(0, [2] * 25)) is None
    assert smallest(shapes, StepShape.of(0, [2] * 24)) is not None


@pytest.mark.parametrize("length", [64, 65, 500, 512, 2048])
@pytest.mark.parametrize("snapshots", [1, 2])
def test_a_prompt_with_snapshots_runs_in_the_graph_of_one_without(length: int, snapshots: int) -> None:
    shapes = captured_shapes(64, 64, 4096, 512)
    plain = smallest(shapes, StepShape.of(0, [length], chains=1))
    first = [9] * snapshots
    found = smallest(shapes, StepShape.of(0, [*first, length - sum(first)], chains=1))
    assert found == plain is not None
    assert found.rows < 2 * length


def test_prompts_with_a_snapshot_each_beside_decodes() -> None:
    shapes = captured_shapes(64, 64, 4096, 512)
    found = smallest(shapes, StepShape.of(20, [50, 14] * 8, chains=8))
    assert found is not None
    assert (found.decodes, found.rows) == (32, 32 + 512)


def test_prompts_that_are_computed_apart_from_decodes() -> None:
    """Fewer rows as without; from there on all that a step with decodes holds, of many prompts too."""
    shapes = captured_shapes(256, 256, 8192, 3840, apart=1024)
    assert len(set(shapes)) == len(shapes)
    mixed = {(shape.rows - shape.decodes, shape.segments) for shape in shapes if shape.decodes and shape.segments}
    few, many = {(tokens, 24) for tokens in (128, 512)}, (1024, 1536, 2048, 2560, 3072, 3840)
    assert mixed == few | {(tokens, 64) for tokens in many}
    for lengths in ([3840], [60] * 64, [700, 400] * 3):
        found = smallest(shapes, StepShape.of(200, lengths))
        assert found is not None
        assert found.rows - found.decodes <= 1.4 * sum(lengths)
    assert smallest(captured_shapes(256, 256, 8192, 3840), StepShape.of(200, [3840])) is None
    none = [shape for shape in captured_shapes(256, 256, 8192, 1000, apart=1024) if shape.segments == 64]
    assert not none, "no step with decodes has so many prompt tokens"


def test_warm_up_stays_within_the_budget() -> None:
    for budget, sequences in ((8192, 256), (30, 4), (1, 1)):
        shapes = warm_up_shapes([], sequences, budget)
        assert all(shape.rows <= budget and shape.decodes <= sequences for shape in shapes)
        assert any(shape.rows == budget for shape in shapes)


def test_warm_up_samples_no_more_rows_than_there_are() -> None:
    assert {len(plan.chunks) for plan in sampling_plans(256)} == {1, 3, 16}
    assert {len(plan.chunks) for plan in sampling_plans(15)} == {1, 3}
