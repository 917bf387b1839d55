"""Scheduler limits."""

from __future__ import annotations

import pytest

from services.common.errors import TemperError
from services.engine.kv_cache.block_pool import IntegrityError
from services.engine.scheduler.scheduler import Scheduler
from tests.unit.engine.machine import reference
from tests.unit.engine.toy_engine import LONG, Engine, shape


def test_prefill_beside_decodes_is_bounded() -> None:
    engine = Engine(token_budget=32, mixed_prefill_tokens=5, prefix_cache=False)
    engine.add("first", (1, 2, 3), max_tokens=4)
    engine.add("second", (4, 5), max_tokens=3)
    assert shape(engine.step()) == [("first", 0, 3, True), ("second", 0, 2, True)], "nobody waits: the whole budget"
    engine.add("long", LONG, max_tokens=2)
    assert shape(engine.step())[2:] == [("long", 0, 5, False)]
    assert shape(engine.step())[2:] == [("long", 5, 5, False)]
    assert shape(engine.step()) == [("first", 5, 1, True), ("long", 10, 5, False)]
    assert shape(engine.step()) == [("long", 15, 4, True)]
    assert engine.output("long") == reference(LONG, 1)


def test_several_waiting_prompts_share_the_bound_and_the_tail_of_a_prompt_is_no_answer() -> None:
    engine = Engine(token_budget=32, mixed_prefill_tokens=8, prefix_cache=False)
    engine.add("tail", tuple(range(33)), max_tokens=1)
    engine.step()
    for n in range(3):
        engine.add(f"r{n}", (1 + n, 2, 3), max_tokens=2)
    # The last token of a prompt looks like a decode, but nobody reads an answer yet.
    assert shape(engine.step()) == [("tail", 32, 1, True), *((f"r{n}", 0, 3, True) for n in range(3))]
    for n in range(3, 6):
        engine.add(f"r{n}", (1 + n, 2, 3), max_tokens=2)
    plan = shape(engine.step())
    assert plan == [*((f"r{n}", 3, 1, True) for n in range(3)), ("r3", 0, 3, True)], "four seats"


def test_aligned_chunks_end_where_the_kernels_tiles_do() -> None:
    engine = Engine(token_budget=16, prefill_alignment=4, prefix_cache=False)
    engine.add("short", (1, 2), max_tokens=9)
    engine.step()
    engine.add("long", tuple(range(1, 34)), max_tokens=1)
    engine.add("next", tuple(range(1, 34)), max_tokens=1)
    # 15 tokens are left beside the decode, of which 12 are three whole tiles; 3 are too few for another prompt.
    assert shape(engine.step())[1:] == [("long", 0, 12, False)]
    assert shape(engine.step())[1:] == [("long", 12, 12, False)]
    assert shape(engine.step())[1:] == [("long", 24, 9, True), ("next", 0, 4, False)]


def test_aligned_chunks_never_leave_a_single_token() -> None:
    """A single token would be computed as a decode, with other bits than at the end of a chunk."""
    engine = Engine(token_budget=32, prefill_alignment=4, block_size=2)
    engine.add("r", tuple(range(1, 34)), max_tokens=1)
    assert shape(engine.step()) == [("r", 0, 28, False)], "up to 32 would leave one"
    assert shape(engine.step()) == [("r", 28, 5, True)]
    engine.add("again", tuple(range(1, 34)), max_tokens=1)
    assert shape(engine.step()) == [("again", 28, 5, True)], "hits where an aligned chunk ended"


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_alignment": 0},
        {"prefill_alignment": 32},
        {"mixed_prefill_tokens": 0},
        {"mixed_prefill_tokens": 8, "prefill_alignment": 8},
    ],
)
def test_prefill_limits_that_would_starve_prompts_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="prefill"):
        Engine(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_budget": 3}, "starve"),
        ({"num_slots": 4}, "num_slots"),
        ({"num_blocks": 1}, "num_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"draft_tokens": 17}, "draft_tokens must be between 0 and 16"),
        ({"draft_tokens": -1}, "draft_tokens must be between 0 and 16"),
        ({"draft_tokens": 1, "prefill_alignment": 4}, "draft_tokens must be 0 with a prefill_alignment"),
    ],
)
def test_contradicting_limits_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(**changes)


def test_abandon_ends_everything() -> None:
    engine = Engine()
    engine.add("runs", LONG, max_tokens=5)
    engine.step()
    engine.add("waits", LONG, max_tokens=5)
    updates = engine.scheduler.abandon(TemperError("broken"))
    assert {update.request_id for update in updates} == {"runs", "waits"}
    assert not engine.scheduler.has_work


def test_integrity_check_finds_leaks() -> None:
    def broken(engine: Engine) -> Scheduler:
        engine.add("r", LONG, max_tokens=5)
        engine.add("s", LONG[:5], max_tokens=5)
        for _ in range(3):
            engine.step()
        return engine.scheduler

    scheduler = broken(Engine())
    scheduler._queue.running[0].blocks.pop()
    with pytest.raises(IntegrityError, match="blocks"):
        scheduler.check_integrity()
    scheduler = broken(Engine())
    scheduler._queue.running[0].slot = scheduler._queue.running[1].slot
    with pytest.raises(IntegrityError, match="two owners"):
        scheduler.check_integrity()
    scheduler = broken(Engine())
    del scheduler._queue.running[0]
    with pytest.raises(IntegrityError, match="registered"):
        scheduler.check_integrity()
    scheduler = broken(Engine())
    scheduler._queue.running.reverse()
    with pytest.raises(IntegrityError, match="order"):
        scheduler.check_integrity()


def test_requests_that_ended_are_not_kept_until_their_deadlines() -> None:
    engine = Engine()
    engine.add("early", (1, 2), deadline=1e6, max_tokens=120, ignore_eos=True)
    for number in range(100):
        engine.add(f"r{number}", (1, 2), deadline=2e6, max_tokens=1)
        engine.step()
    assert engine.scheduler.counts().running == 1
    assert len(engine.scheduler._queue._deadlines) < 80
