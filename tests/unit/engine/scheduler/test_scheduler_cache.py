"""The scheduler and the prefix cache: what hits, what is kept, and what gives way."""

from __future__ import annotations

import pytest

from services.engine.scheduler.step_plan import StateCopy
from tests.unit.engine.machine import reference
from tests.unit.engine.toy_engine import ADAPTER, LONG, Engine, shape


def test_an_equal_prompt_hits_up_to_its_last_token() -> None:
    engine = Engine()
    engine.add("first", LONG, max_tokens=2)
    plan = engine.step()
    assert shape(plan) == [("first", 0, 19, True)], "the snapshot costs no step of its own"
    ((position, slot),) = plan.chunks[0].snapshots
    assert (position, plan.copies_after) == (18, [])
    engine.run()
    engine.add("second", LONG, max_tokens=2)
    plan = engine.step()
    assert shape(plan) == [("second", 18, 1, True)]
    assert plan.copies_before == [StateCopy(source=slot, target=plan.chunks[0].slot)]
    assert [copy.target for copy in plan.block_copies] == [plan.chunks[0].blocks[4]], "the block of the last tokens"
    engine.run()
    assert (engine.cached("first"), engine.cached("second")) == (0, 18)
    assert engine.output("second") == reference(LONG, 2)


def test_a_prompt_of_whole_blocks_hits_up_to_its_last_token() -> None:
    """The last token has to be computed, so that there is something to sample from."""
    engine = Engine()
    for name in ("first", "second"):
        engine.add(name, LONG[:16], max_tokens=2)
        engine.run()
    assert engine.cached("second") == 15
    assert engine.output("second") == reference(LONG[:16], 2)


def test_the_next_turn_goes_on_where_the_answer_ended() -> None:
    engine = Engine()
    engine.add("turn 1", LONG, max_tokens=5, ignore_eos=True)
    plans = engine.run()
    assert all(not plan.copies_after for plan in plans), "the slot of a sequence that ends is the snapshot"
    engine.add("turn 2", (*LONG, *reference(LONG, 5), 30, 31, 32), max_tokens=2)
    engine.run()
    assert engine.cached("turn 2") == 19 + 4, "all but the last token, which was never fed back"
    engine.add("another", (*LONG, *reference(LONG, 5)[:3], 40), max_tokens=2)
    engine.run()
    assert engine.cached("another") == 18


def test_a_token_that_ends_an_answer_is_part_of_its_history() -> None:
    """With two steps in flight the stop token was fed back before the host knows it."""
    stop = reference(LONG, 3)[2]
    engine = Engine(depth=2)
    engine.add("turn 1", LONG, max_tokens=9, stop_token_ids=frozenset({stop}))
    flight = []
    while engine.scheduler.has_work or flight:
        plan = engine.scheduler.schedule(0.0) if len(flight) < 2 else None
        if plan is not None:
            flight.append((plan, engine.runner.execute(plan)))
        if flight and (plan is None or len(flight) == 2):
            engine.take(engine.scheduler.update(*flight.pop(0), 0.0))
            engine.scheduler.check_integrity()
    assert engine.output("turn 1") == reference(LONG, 3)
    engine.add("turn 2", (*LONG, *reference(LONG, 3), 30, 31, 32), max_tokens=2)
    plan, _ = engine.scheduler.schedule(0.0), None
    assert shape(plan) == [("turn 2", 22, 3, True)]


def test_an_answer_cut_at_a_stop_string_is_gone_on_from() -> None:
    engine = Engine()
    engine.add("turn 1", LONG, max_tokens=9, ignore_eos=True)
    for _ in range(4):
        engine.step()
    engine.scheduler.abort("turn 1", keep_tokens=2)
    engine.scheduler.check_integrity()
    engine.add("turn 2", (*LONG, *reference(LONG, 3), 30), max_tokens=1)
    engine.run()
    assert engine.cached("turn 2") == 22


def test_a_shared_system_prompt_hits_from_the_third_request() -> None:
    engine = Engine()
    system = LONG[:12]
    for n in range(4):
        engine.add(f"r{n}", (*system, *range(40 + 10 * n, 49 + 10 * n)), max_tokens=2)
        engine.run()
    assert [engine.cached(f"r{n}") for n in range(4)] == [0, 0, 12, 12]


def test_a_marked_system_prompt_hits_from_the_second_request() -> None:
    engine = Engine()
    system = LONG[:10]
    for n in range(3):
        engine.add(f"r{n}", (*system, *range(40 + 10 * n, 50 + 10 * n)), max_tokens=2, boundaries=(10,))
        engine.run()
    assert [engine.cached(f"r{n}") for n in range(3)] == [0, 10, 10]


def test_what_waiting_requests_share_is_computed_once() -> None:
    """Nobody has marked it, and nobody has computed it before."""
    engine = Engine(num_slots=16, max_num_seqs=6, token_budget=64)
    for n in range(5):
        engine.add(f"r{n}", (*LONG[:14], *range(30 + 9 * n, 39 + 9 * n)), max_tokens=1)
    engine.add("other", tuple(range(90, 110)), max_tokens=1)
    assert shape(engine.step()) == [("r0", 0, 23, True), ("other", 0, 20, True)]
    assert sorted(shape(engine.step())) == [(f"r{n}", 14, 9, True) for n in range(1, 5)]
    assert [engine.cached(f"r{n}") for n in range(5)] == [0, 14, 14, 14, 14]


def test_who_waits_goes_on_when_the_one_ahead_is_gone() -> None:
    engine = Engine(token_budget=12)
    for n in range(3):
        engine.add(f"r{n}", LONG, max_tokens=1)
    assert shape(engine.step()) == [("r0", 0, 12, False)]
    assert shape(engine.step()) == [("r0", 12, 6, False)], "too near for a snapshot on the way"
    assert shape(engine.step()) == [("r0", 18, 1, True), ("r1", 18, 1, True), ("r2", 18, 1, True)]
    engine = Engine(token_budget=12)
    for n in range(3):
        engine.add(f"r{n}", LONG, max_tokens=1)
    engine.step()
    engine.scheduler.abort("r0")
    assert shape(engine.step())[0] == ("r1", 12, 7, True), "from what the first one has computed"
    engine.run()
    assert all(engine.output(f"r{n}") == reference(LONG, 1) for n in (1, 2))


def test_completions_of_one_prompt_compute_it_once() -> None:
    engine = Engine()
    for n in range(4):
        engine.add(f"r{n}", LONG, max_tokens=2)
    engine.add("other", (50, 51), max_tokens=1)
    # The seats of those that wait a step for the snapshot are kept for them.
    assert shape(engine.step()) == [("r0", 0, 19, True)]
    assert sorted(shape(engine.step())) == [("r0", 19, 1, True), *((f"r{n}", 18, 1, True) for n in range(1, 4))]
    engine.run()
    assert [engine.cached(f"r{n}") for n in range(4)] == [0, 18, 18, 18]
    assert all(engine.output(f"r{n}") == reference(LONG, 2) for n in range(4))


def test_snapshots_on_long_ways_are_an_interval_apart() -> None:
    engine = Engine(num_blocks=1000, max_model_len=4000, token_budget=4000, snapshot_interval=1000)
    engine.add("long", tuple(range(3000)), max_tokens=1, boundaries=(100, 900, 1950, 2500, 2998))
    plan = engine.step()
    assert [position for position, _ in plan.chunks[0].snapshots] == [100, 1950, 2998]
    engine.add("longer", tuple(range(5000, 8500)), max_tokens=1)
    plan = engine.step()
    assert [position for position, _ in plan.chunks[0].snapshots] == [1000, 2000, 3499]


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
    assert engine.scheduler.counts().slots_cached == 3
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
    assert (counts.blocks_cached, counts.blocks_used) == (5, 0)
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
