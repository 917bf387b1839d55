"""The division of the device: all bytes accounted for, refusals with numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import DoesNotFit
from services.engine.kv_cache.memory_plan import Footprint, MemoryPlan, format_bytes, plan_memory

GIB = 1024**3
MIB = 1024**2
QWEN_4B = Footprint(
    weights=8_411_502_592, block=16 * 32 * 1024, slot=49 * MIB, adapter_slot=130 * MIB, workspace=2 * GIB
)


def plan(budget: int = 100 * GIB, **changes: int | None) -> MemoryPlan:
    options: dict[str, int | None] = {"block_size": 16, "num_slots": 193, "adapter_slots": 9, **changes}
    return plan_memory(budget, QWEN_4B, **options)


@given(
    budget=st.integers(0, 200 * GIB),
    num_slots=st.integers(2, 500),
    adapter_slots=st.integers(1, 64),
    num_blocks=st.sampled_from([0, 0, 100, 100_000]),
    kv_bytes=st.sampled_from([0, GIB]),
    training=st.sampled_from([None, 0, GIB]),
)
def test_never_hands_out_more_than_there_is(
    budget: int, num_slots: int, adapter_slots: int, num_blocks: int, kv_bytes: int, training: int | None
) -> None:
    options = {"num_slots": num_slots, "adapter_slots": adapter_slots, "num_blocks": num_blocks, "kv_bytes": kv_bytes}
    try:
        made = plan(budget, training_bytes=training, **options)
    except DoesNotFit as refused:
        assert "weights" in refused.message and "budget" in refused.message  # noqa: PT017, PT018
        return
    assert made.total <= budget
    assert made.kv == made.num_blocks * QWEN_4B.block
    assert made.num_blocks >= 2
    assert num_blocks in (0, made.num_blocks)


def test_the_rest_is_kv_and_training() -> None:
    made = plan()
    assert 100 * GIB - made.total < 2 * QWEN_4B.block
    assert made.training / (made.training + made.kv) == pytest.approx(0.25, abs=0.001)


def test_explicit_numbers_win() -> None:
    made = plan(num_blocks=100, training_bytes=GIB)
    assert (made.num_blocks, made.training) == (100, GIB)
    assert plan(kv_bytes=GIB).num_blocks == GIB // QWEN_4B.block
    assert plan(useful_blocks=77).num_blocks == 77


def test_refuses_with_the_numbers() -> None:
    with pytest.raises(DoesNotFit, match=r"lacks 1\.\d\d GiB.*max_num_seqs(.|\n)*weights +7\.83 GiB"):
        plan(19 * GIB, training_bytes=0, num_blocks=2)
    with pytest.raises(DoesNotFit, match="no KV block"):
        plan(22 * GIB, training_bytes=0, kv_bytes=1)


def test_model_length() -> None:
    made = plan(num_blocks=101)
    assert made.model_len(262144) == 1601
    assert made.model_len(1000) == 1000
    assert made.model_len(262144, 1500) == 1500
    with pytest.raises(DoesNotFit, match="100 KV blocks"):
        made.model_len(262144, 1602)
    with pytest.raises(DoesNotFit, match="context"):
        made.model_len(1000, 1001)


def test_footprint_is_checked() -> None:
    with pytest.raises(ValueError, match="block"):
        Footprint(1, 0, 1, 1, 1)
    with pytest.raises(ValueError, match="slot"):
        Footprint(1, 1, -1, 1, 1)


def test_bytes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 * MIB, 3 * GIB)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "5.00 MiB",
        "3.00 GiB",
    ]
