"""Short prompts go first, nobody starves for it, and steps are full while many prompts wait."""

from __future__ import annotations

from typing import Any

import pytest

from services.engine.scheduler.step_plan import StepPlan
from tests.unit.engine.toy_engine import Engine


def engine(**changes: Any) -> Engine:
    """Engine with steps of 100 prompt tokens beside decodes; prompts of up to 16 tokens are short."""
    sizes = {"max_num_seqs": 64, "token_budget": 300, "num_blocks": 8192, "num_slots": 200, "max_model_len": 2048}
    cut = {"mixed_prefill_tokens": 100, "short_prefill": 16, "long_beside_short": 8, "prefix_cache": False}
    return Engine(**{**sizes, **cut, **changes})


def prompt(length: int, number: int = 0) -> tuple[int, ...]:
    return tuple(1 + (number + position) % 40 for position in range(length))


def prefilled(plan: StepPlan) -> int:
    return plan.num_tokens - plan.num_decodes


def names(plan: StepPlan) -> list[str]:
    return [chunk.request.request_id for chunk in plan.chunks]


@pytest.mark.parametrize("length", [24, 40, 90, 130])
def test_steps_are_full_while_prompts_wait(length: int) -> None:
    """The rest of a prompt that a step has split does not count as short, however small it is."""
    toy = engine()
    toy.add("decodes", prompt(3), max_tokens=500)
    toy.step()
    for number in range(40):
        toy.add(f"p{number}", prompt(length, number), max_tokens=2)
    counts, missing = [], []
    while any(f"p{number}" not in toy.updates for number in range(40)):
        missing.append(sum(f"p{number}" not in toy.updates for number in range(40)))
        counts.append(prefilled(toy.step()))
    assert all(count == 100 for count, long in zip(counts, missing, strict=True) if long > 4)
    assert all(count <= max(75, length) for count, long in zip(counts, missing, strict=True) if long <= 4)
    assert counts[0] == 100
    assert sum(counts) == 40 * length


def test_a_closed_loop_of_many_lengths_keeps_steps_full() -> None:
    """Many waiting long prompts are not held back for the short ones that come with every step."""
    toy, sent = engine(max_num_seqs=32), 0
    toy.add("decodes", prompt(3), max_tokens=2000)
    toy.step()
    counts = []
    for _ in range(150):
        while len(toy.scheduler._queue.running) + len(toy.scheduler._queue.waiting) < 32:
            toy.add(f"p{sent}", prompt(8 if sent % 3 == 0 else 120, sent), max_tokens=4)
            sent += 1
        counts.append(prefilled(toy.step()))
    assert sum(count == 100 for count in counts) > 140


def test_the_next_turn_of_a_conversation_is_not_held_up_by_a_long_prompt() -> None:
    toy = engine()
    toy.add("decodes", prompt(3), max_tokens=500)
    toy.add("long", prompt(1500), max_tokens=2)
    toy.step()
    assert prefilled(toy.step()) == 100
    toy.add("turn", prompt(12), max_tokens=2)
    plan = toy.step()
    assert "turn" in toy.updates
    assert (prefilled(plan), names(plan)) == (12 + 8, ["decodes", "turn", "long"]), "the long one goes on beside it"
    assert prefilled(toy.step()) == 100, "and gets the whole step again"


def test_few_long_prompts_are_not_put_together_in_a_whole_step() -> None:
    """A turn that comes while the step runs waits for its end; one prompt alone is not cut more often for that."""
    toy = engine()
    toy.add("decodes", prompt(3), max_tokens=500)
    toy.step()
    for number in range(4):
        toy.add(f"long{number}", prompt(60, number), max_tokens=2)
    assert [prefilled(toy.step()) for _ in range(4)] == [75, 75, 75, 15]


def test_a_turn_goes_first_also_where_long_prompts_pile_up() -> None:
    toy = engine()
    toy.add("decodes", prompt(3), max_tokens=500)
    toy.step()
    for number in range(20):
        toy.add(f"long{number}", prompt(400, number), max_tokens=2)
    toy.step()
    toy.add("turn", prompt(12), max_tokens=2)
    plan = toy.step()
    assert "turn" in toy.updates
    assert prefilled(plan) == 100


def test_what_a_snapshot_cuts_off_a_short_prompt_stays_short() -> None:
    """A turn that a step could not compute to its end is not behind the long prompt in the next."""
    toy = engine(prefix_cache=True, block_size=4)
    toy.add("decodes", prompt(3), max_tokens=500)
    toy.add("long", tuple(100 + position for position in range(1500)), max_tokens=2)
    toy.step()
    toy.add("first", prompt(14, 5), max_tokens=1)
    toy.add("second", (*prompt(5, 5), *prompt(9, 30)), max_tokens=1)
    steps = 0
    while "first" not in toy.updates or "second" not in toy.updates:
        toy.step()
        steps += 1
    assert steps <= 3


def test_of_worse_priority_nobody_holds_a_long_prompt_back() -> None:
    toy = engine()
    toy.add("decodes", prompt(3), max_tokens=500)
    toy.step()
    toy.add("long", prompt(350), max_tokens=2, priority=-1)
    toy.add("short", prompt(12), max_tokens=2)
    assert [prefilled(toy.step()) for _ in range(3)] == [100] * 3
    assert "short" not in toy.updates
    toy.step()
    assert {"long", "short"} <= toy.updates.keys()


@pytest.mark.parametrize("seats", [1, 4])
def test_a_long_prompt_gets_a_seat_however_many_short_ones_arrive(seats: int) -> None:
    toy, sent = engine(max_num_seqs=seats), 0

    def arrive() -> None:
        nonlocal sent
        while len(toy.scheduler._queue.waiting) < 2 * seats:
            toy.add(f"s{sent}", prompt(4, sent), max_tokens=4)
            sent += 1

    arrive()
    toy.step()
    toy.add("long", prompt(40), max_tokens=4)
    for step in range(50):
        arrive()
        toy.step(float(step))
        if "long" in toy.updates:
            break
    assert "long" in toy.updates


def test_a_long_prompt_gets_its_memory_however_many_short_ones_arrive() -> None:
    toy, sent = engine(num_blocks=16, max_model_len=60), 0
    for step in range(60):
        while len(toy.scheduler._queue.waiting) < 4:
            toy.add(f"s{sent}", prompt(4, sent), max_tokens=9)
            sent += 1
        if step == 5:
            toy.add("long", prompt(50), max_tokens=4)
        toy.step(float(step))
    assert "long" in toy.updates


def test_better_priority_preempts_until_it_can_start_and_not_only_nearly() -> None:
    """The blocks that are kept free when a request starts, so that others can go on, count as well."""
    toy = engine(num_blocks=129, max_num_seqs=8, max_model_len=512)
    for number in range(4):
        toy.add(f"low{number}", prompt(100, number), max_tokens=20)
    toy.step()
    toy.step()
    free = toy.scheduler._memory.blocks.free
    toy.add("high", prompt(4 * free), max_tokens=2, priority=-1)
    toy.step()
    assert "high" in toy.updates
    assert toy.scheduler.counts().preemptions == 1


def test_host_time_does_not_grow_with_the_prompts_that_wait_for_a_seat() -> None:
    """Nobody is looked for in the cache while there is no seat to be had."""
    toy = engine(max_num_seqs=2, prefix_cache=True)
    toy.add("one", prompt(3), max_tokens=500)
    toy.add("two", prompt(3, 7), max_tokens=500)
    toy.step()
    for number in range(60):
        toy.add(f"w{number}", prompt(300, number), max_tokens=2)
    toy.step()
    looked = 0
    find = toy.scheduler._memory.cache.tree.find

    def counted(*arguments: Any) -> Any:
        nonlocal looked
        looked += 1
        return find(*arguments)

    toy.scheduler._memory.cache.tree.find = counted  # type: ignore[method-assign]
    for _ in range(5):
        toy.step()
    assert looked == 0
