"""The scheduler and the prefix cache: what hits, what is kept, and what gives way."""

from __future__ import annotations

import pytest

from services.engine.plan import StateCopy
from tests.unit.engine.machine import reference
from tests.unit.engine.toy_engine import ADAPTER, LONG, Engine, shape


def test_an_equal_prompt_hits_up_to_its_last_full_block() -> None:
    engine = Engine()
    engine.add("first", LONG, max_tokens=2)
    plan = engine.step()
    assert shape(plan) == [("first", 0, 16, False)]
    assert [copy.source for copy in plan.copies_after] == [plan.chunks[0].slot]
    engine.run()
    engine.add("second", LONG, max_tokens=2)
    plan = engine.step()
    assert shape(plan) == [("second", 16, 3, True)]
    assert plan.copies_before == [StateCopy(source=plan.copies_before[0].source, target=plan.chunks[0].slot)]
    engine.run()
    assert (engine.cached("first"), engine.cached("second")) == (0, 16)
    assert engine.output("second") == reference(LONG, 2)


def test_a_prompt_of_whole_blocks_hits_one_block_less() -> None:
    """The last token has to be computed, so that there is something to sample from."""
    engine = Engine()
    for name in ("first", "second"):
        engine.add(name, LONG[:16], max_tokens=2)
        engine.run()
    assert engine.cached("second") == 12
    assert engine.output("second") == reference(LONG[:16], 2)


def test_a_longer_conversation_hits_where_the_shorter_one_ended() -> None:
    engine = Engine()
    engine.add("turn 1", LONG, max_tokens=2)
    engine.run()
    engine.add("turn 2", (*LONG, *reference(LONG, 2), 30, 31, 32), max_tokens=2)
    engine.run()
    assert engine.cached("turn 2") == 16


def test_a_shared_system_prompt_hits_from_the_third_request() -> None:
    engine = Engine()
    system = LONG[:12]
    for n in range(4):
        engine.add(f"r{n}", (*system, *range(40 + 10 * n, 49 + 10 * n)), max_tokens=2)
        engine.run()
    assert [engine.cached(f"r{n}") for n in range(4)] == [0, 0, 12, 12]


def test_completions_of_one_prompt_compute_it_once() -> None:
    engine = Engine()
    for n in range(4):
        engine.add(f"r{n}", LONG, max_tokens=2)
    engine.add("other", (50, 51), max_tokens=1)
    # The seats of those that wait a step for the snapshot are kept for them.
    assert shape(engine.step()) == [("r0", 0, 16, False)]
    assert sorted(shape(engine.step())) == [(f"r{n}", 16, 3, True) for n in range(4)]
    engine.run()
    assert [engine.cached(f"r{n}") for n in range(4)] == [0, 16, 16, 16]
    assert all(engine.output(f"r{n}") == reference(LONG, 2) for n in range(4))


@pytest.mark.parametrize("changes", [{"pin": ADAPTER}, {"cache_salt": "other"}])
def test_other_policies_and_salts_never_share(changes: dict[str, object]) -> None:
    engine = Engine()
    engine.add("first", LONG, max_tokens=1)
    engine.run()
    engine.add("second", LONG, max_tokens=1, **changes)
    engine.run()
    assert engine.cached("second") == 0


def test_without_a_cache_nothing_is_split_or_kept() -> None:
    engine = Engine(prefix_cache=False)
    for name in ("first", "second"):
        engine.add(name, LONG, max_tokens=1)
        plan = engine.step()
        assert shape(plan) == [(name, 0, 19, True)]
        assert plan.copies_before == plan.copies_after == []
    counts = engine.scheduler.counts()
    assert counts.blocks_cached == counts.slots_cached == 0


def test_short_prompts_are_not_split() -> None:
    engine = Engine()
    engine.add("r", LONG[:7], max_tokens=1)
    assert shape(engine.step()) == [("r", 0, 7, True)]


def test_snapshots_give_way_to_live_sequences() -> None:
    engine = Engine(max_num_seqs=3, num_slots=4)
    for n in range(3):
        engine.add(f"old{n}", (n, *LONG), max_tokens=1)
        engine.run()
    assert engine.scheduler.counts().slots_cached == 2
    for n in range(3):
        engine.add(f"new{n}", (30 + n,), max_tokens=3)
    assert len(engine.step().chunks) == 3
    assert engine.scheduler.counts().slots_cached == 0
    engine.run()


def test_the_only_slot_can_be_the_snapshot_that_would_be_hit() -> None:
    engine = Engine(max_num_seqs=1, num_slots=2)
    for name in ("first", "second"):
        engine.add(name, LONG, max_tokens=2)
        engine.run()
        assert engine.output(name) == reference(LONG, 2)


def test_cached_blocks_give_way_to_live_sequences() -> None:
    engine = Engine(num_blocks=11)
    engine.add("first", LONG, max_tokens=1)
    engine.run()
    counts = engine.scheduler.counts()
    assert (counts.blocks_cached, counts.blocks_used) == (4, 0)
    engine.add("second", tuple(range(40, 80)), max_tokens=1)
    engine.run()
    assert engine.output("second") == reference(tuple(range(40, 80)), 1)


def test_clear_cache_forgets_all() -> None:
    engine = Engine()
    engine.add("first", LONG, max_tokens=1)
    engine.run()
    engine.scheduler.clear_cache()
    counts = engine.scheduler.counts()
    assert counts.blocks_cached == counts.slots_cached == 0
    engine.add("second", LONG, max_tokens=1)
    engine.run()
    assert engine.cached("second") == 0
