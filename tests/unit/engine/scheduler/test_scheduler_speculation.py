"""Draft tokens in the scheduler: the toy runner keeps them and decides, plans are made meanwhile."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from services.common.errors import TemperError
from services.engine.requests.request import FinishReason
from services.engine.scheduler.draft_depth import StepCosts
from services.engine.scheduler.step_plan import DRAFT, MOST_VERIFYING, PENDING, StepPlan, StepResult
from tests.unit.engine.machine import reference
from tests.unit.engine.scheduler.scheduler_steps import SPECULATIVE, land, launch
from tests.unit.engine.toy_engine import ADAPTER, LONG, Engine

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def run(engine: Engine) -> list[StepPlan]:
    """Runs all requests, with as many plans in flight as may be."""
    flights: deque[tuple[StepPlan, StepResult]] = deque()
    plans: list[StepPlan] = []
    while engine.scheduler.has_work or flights:
        plan = engine.scheduler.schedule(0.0) if len(flights) < engine.runner.depth else None
        if plan is not None:
            plans.append(plan)
            flights.append((plan, engine.runner.execute(plan)))
        else:
            land(engine, flights.popleft())
    return plans


def snapshot_ends(engine: Engine) -> list[int]:
    """Lengths of the histories whose states the prefix cache has."""
    return sorted(len(engine.runner.states[slot][1]) for slot in engine.scheduler._memory.cache.held_slots())


@DEPTHS
def test_right_draft_tokens_give_more_tokens_a_step(depth: int) -> None:
    engine = Engine(depth, **SPECULATIVE)
    engine.add("r", LONG, max_tokens=60, ignore_eos=True)
    plans = run(engine)
    assert engine.output("r") == reference(LONG, 60)
    counts = engine.scheduler.counts()
    assert 0 < counts.num_drafts < counts.num_accepted_tokens < counts.num_draft_tokens
    # One token from the prompt, one from each other step, one more for each right draft token; plans made while the
    # last token is sampled are in vain.
    vain = len(plans) - 1 - (59 - counts.num_accepted_tokens)
    assert 0 <= vain < depth
    tokens = [tuple(chunk.token_ids) for plan in plans for chunk in plan.chunks if chunk.num_draft_tokens]
    assert max(map(len, tokens)) == 5
    if depth > 1:
        assert (PENDING, DRAFT, DRAFT, DRAFT, DRAFT) in tokens


def test_plans_count_draft_tokens_as_rejected() -> None:
    engine = Engine(2, **SPECULATIVE)
    engine.add("r", LONG, max_tokens=60, ignore_eos=True)
    flights = [launch(engine)]
    sequence = engine.scheduler.find("r")
    assert sequence is not None
    for _ in range(12):
        flights.append(launch(engine))
        (before, result), (after, _) = flights
        first, second = before.chunks[0], after.chunks[0]
        assert sequence.uncertain == first.num_draft_tokens + second.num_draft_tokens
        assert second.start == sequence.computed - 1
        assert second.output_count == len(sequence.output_ids) + 1
        at = sequence.computed, sequence.known
        land(engine, flights.pop(0))
        more = result.accepted[0] - 1
        assert (sequence.computed, sequence.known) == (at[0] + more, at[1] + more)
        assert sequence.uncertain == second.num_draft_tokens


@DEPTHS
def test_a_stop_inside_an_accepted_run(depth: int) -> None:
    """Nothing counts behind the last token, for every kind of end, and its state is kept for the next turn."""
    inside = 0
    for length in range(1, 30):
        ending = reference(LONG, length)[-1]
        for sampling, reason in (
            ({"stop_token_ids": frozenset({ending}), "max_tokens": 60}, FinishReason.STOP),
            ({"max_tokens": length, "ignore_eos": True}, FinishReason.LENGTH),
        ):
            engine = Engine(depth, **SPECULATIVE)
            engine.add("r", LONG, **sampling)
            plans = run(engine)
            output = engine.output("r")
            assert output == reference(LONG, len(output))
            assert engine.updates["r"][-1].finish_reason is reason
            assert output.index(ending) == len(output) - 1 if reason is FinishReason.STOP else len(output) == length
            inside += plans[-1].verifies
            computed = len(LONG) + len(output) - 1
            assert computed in snapshot_ends(engine)
            engine.add("next", (*LONG, *output, 1, 2, 3), max_tokens=3)
            run(engine)
            assert engine.cached("next") == computed
            assert engine.output("next") == reference((*LONG, *output, 1, 2, 3), 3)
    assert inside > 10


def test_an_eos_token_ends_an_accepted_run() -> None:
    """And does not where it is to be ignored."""
    ending = reference(LONG, 9)[-1]
    for depth in (1, 2):
        for ignore_eos in (False, True):
            engine = Engine(depth, eos_token_ids=frozenset({ending}), **SPECULATIVE)
            engine.add("r", LONG, max_tokens=40, ignore_eos=ignore_eos)
            run(engine)
            expected = reference(LONG, 40)
            assert engine.output("r") == (expected if ignore_eos else expected[: expected.index(ending) + 1])


@DEPTHS
def test_nothing_is_drafted_where_tokens_are_given(depth: int) -> None:
    engine = Engine(depth, **SPECULATIVE)
    given = tuple(range(1, 21))
    engine.add("given", LONG, max_tokens=20, ignore_eos=True, forced_ids=given)
    plans = run(engine)
    assert engine.output("given") == list(given)
    assert engine.scheduler.counts().num_draft_tokens == 0
    assert not any(plan.verifies or plan.drafts for plan in plans), "the mtp layer does not run"
    engine.add("plain", LONG[2:], max_tokens=12, ignore_eos=True, presence_penalty=0.5)
    engine.add("beside", LONG[3:], max_tokens=20, ignore_eos=True, forced_ids=given)
    plans = run(engine)
    assert engine.output("plain") == reference(LONG[2:], 12)
    assert engine.output("beside") == list(given)
    mixed = [plan for plan in plans if plan.verifies and len(plan.chunks) == 2]
    assert mixed
    assert all(chunk.request.request_id == "plain" for plan in mixed for chunk in plan.chunks if chunk.num_draft_tokens)


@DEPTHS
def test_prompts_beside_answers_take_the_draft_tokens_away(depth: int) -> None:
    """The answers go on with one token, and with draft tokens again when the prompt is computed."""
    engine = Engine(depth, **SPECULATIVE, mixed_prefill_tokens=4, prefix_cache=False)
    engine.add("r", LONG, max_tokens=60, ignore_eos=True)
    flights = deque([launch(engine) for _ in range(depth)])
    for _ in range(4):
        land(engine, flights.popleft())
        flights.append(launch(engine))
    assert flights[-1][0].verifies
    engine.add("prompt", LONG[4:], max_tokens=1)
    mixed: list[StepPlan] = []
    while "prompt" not in engine.updates:
        land(engine, flights.popleft())
        flights.append(launch(engine))
        if len(flights[-1][0].chunks) > 1:
            mixed.append(flights[-1][0])
    assert len(mixed) > 3
    assert not any(plan.verifies for plan in mixed)
    assert [plan.num_draft_tokens > 0 for plan in mixed] == [False] * (len(mixed) - 1) + [True]
    assert all(plan.drafts for plan in mixed), "the mtp layer follows"
    while flights:
        land(engine, flights.popleft())
    assert any(plan.verifies for plan in run(engine))
    assert engine.output("r") == reference(LONG, 60)


@DEPTHS
def test_preempted_while_draft_tokens_are_in_flight(depth: int) -> None:
    """It goes on from what is known for certain, when nothing samples for it any more."""
    engine = Engine(depth, **SPECULATIVE, num_blocks=17, max_num_seqs=3)
    for name in ("a", "b", "c"):
        engine.add(name, LONG[: ord(name) - 95], max_tokens=40, ignore_eos=True)
    run(engine)
    for name in ("a", "b", "c"):
        assert engine.output(name) == reference(LONG[: ord(name) - 95], 40)
    counts = engine.scheduler.counts()
    assert counts.preemptions > 0
    assert counts.num_accepted_tokens > 0
    assert counts.blocks_used == counts.slots_used == 0


def test_preempted_and_back_in_the_same_step() -> None:
    """Its draft tokens are in another slot, so nothing is checked, although all chunks look like decodes."""
    engine = Engine(1, **SPECULATIVE, num_blocks=13)
    engine.add("r", LONG, max_tokens=24, ignore_eos=True, priority=1)
    sequence = engine.scheduler.find("r")
    assert sequence is not None
    while len(sequence.blocks) < 8:
        engine.step()
    assert sequence.drawn > 0
    engine.add("urgent", LONG, max_tokens=2, priority=0)
    plan = engine.step()
    assert sequence.preemptions == 1
    assert [chunk.is_decode for chunk in plan.chunks] == [True, True]
    assert not plan.verifies
    engine.run()
    assert engine.output("r") == reference(LONG, 24)


@DEPTHS
@pytest.mark.parametrize("spare", [0, 1])
def test_blocks_at_the_limit(depth: int, spare: int) -> None:
    """An answer that fills all blocks to the last token is never preempted for a draft token, or by itself."""
    blocks = 10
    engine = Engine(depth, **SPECULATIVE, num_blocks=1 + blocks)
    length = 4 * blocks - len(LONG) + 1 - spare
    engine.add("r", LONG, max_tokens=length, ignore_eos=True)
    run(engine)
    assert engine.output("r") == reference(LONG, length)
    counts = engine.scheduler.counts()
    assert counts.preemptions == 0
    assert counts.num_accepted_tokens > 0


def test_a_draft_token_is_not_worth_a_preemption() -> None:
    """Two answers that just fit together."""
    engine = Engine(1, **SPECULATIVE, num_blocks=7, block_size=4, prefix_cache=False)
    engine.add("a", (1, 2), max_tokens=11, ignore_eos=True)
    engine.add("b", (1, 3), max_tokens=11, ignore_eos=True)
    run(engine)
    counts = engine.scheduler.counts()
    assert counts.preemptions == 0
    assert counts.num_draft_tokens > 0
    assert engine.output("a") == reference((1, 2), 11)


@pytest.mark.parametrize("keep_tokens", [0, 2])
def test_aborted_while_draft_tokens_are_in_flight(keep_tokens: int) -> None:
    """How far its state is nobody knows then, so no snapshot of it is kept; that of its prompt is."""
    engine = Engine(2, **SPECULATIVE, block_size=2)
    engine.add("other", LONG[:3], max_tokens=60, ignore_eos=True)
    engine.add("r", LONG, max_tokens=60, ignore_eos=True)
    flights = deque([launch(engine), launch(engine)])
    for _ in range(5):
        land(engine, flights.popleft())
        flights.append(launch(engine))
    sequence = engine.scheduler.find("r")
    assert sequence is not None
    assert sequence.uncertain > 0
    before = snapshot_ends(engine)
    assert before == [len(LONG) - 1]
    update = engine.scheduler.abort("r", keep_tokens)
    assert update is not None
    assert update.finish_reason is (FinishReason.STOP if keep_tokens else FinishReason.ABORT)
    assert update.finished is not None
    assert len(update.finished.output_ids) == keep_tokens or not keep_tokens
    engine.scheduler.check_integrity()
    while flights:
        land(engine, flights.popleft())
    assert snapshot_ends(engine) == before
    engine.add("again", LONG, max_tokens=20, ignore_eos=True)
    run(engine)
    assert engine.output("again") == reference(LONG, 20)
    assert engine.cached("again") == len(LONG) - 1


def test_a_failed_step_with_draft_tokens() -> None:
    """Its requests end; what a later plan says of them is not looked at."""
    engine = Engine(2, **SPECULATIVE)
    engine.add("r", LONG, max_tokens=60, ignore_eos=True)
    flights = deque([launch(engine), launch(engine)])
    for _ in range(4):
        land(engine, flights.popleft())
        flights.append(launch(engine))
    engine.take(engine.scheduler.fail(flights.popleft()[0], TemperError("device lost")))
    engine.scheduler.check_integrity()
    land(engine, flights.popleft())
    assert engine.updates["r"][-1].finish_reason is FinishReason.ERROR
    assert not engine.scheduler.has_work
    assert engine.scheduler.counts().blocks_used == 0


def test_a_token_with_an_error_is_the_last() -> None:
    engine = Engine(**SPECULATIVE)
    engine.add("r", LONG, max_tokens=60, ignore_eos=True)
    while (launched := launch(engine))[1].accepted[0] == 1:
        land(engine, launched)
    plan, result = launched
    broken = [result.tokens[0], result.tokens[1]._replace(error="not finite"), *result.tokens[2:]]
    land(engine, (plan, replace(result, tokens=broken, accepted=[2])))
    assert engine.updates["r"][-1].finish_reason is FinishReason.ERROR
    assert engine.output("r")[-1] == result.tokens[0].token_id


@pytest.mark.parametrize("accepted", [[0], [6], [-1], [1, 1], []])
def test_results_that_cannot_be(accepted: list[int]) -> None:
    engine = Engine(**SPECULATIVE)
    engine.add("r", LONG, max_tokens=60, ignore_eos=True)
    engine.step()
    plan, result = launch(engine)
    assert plan.chunks[0].num_draft_tokens == 4
    with pytest.raises(ValueError, match=r"accepted must be between 1 and 5 for r|of [02] chunks"):
        engine.scheduler.update(plan, replace(result, accepted=accepted), 0.0)
    land(engine, (plan, result))


def test_more_answers_than_are_checked_at_once() -> None:
    """Nothing is drafted for them, nor for the few that are left of those that began in a crowd."""
    many = MOST_VERIFYING + 2
    engine = Engine(2, **SPECULATIVE | {"token_budget": 400}, max_num_seqs=64, num_slots=100, num_blocks=900)
    for number in range(many):
        engine.add(f"r{number}", (number + 1, 2, 3), max_tokens=4 if number % 2 else 40, ignore_eos=True)
    plans = run(engine)
    assert not any(plan.verifies for plan in plans if len(plan.chunks) > MOST_VERIFYING)
    assert any(plan.verifies for plan in plans), "without costs they are drafted for once they are few"
    for number in range(many):
        assert engine.output(f"r{number}") == reference((number + 1, 2, 3), 4 if number % 2 else 40)


def test_checked_tokens_stay_below_the_budget() -> None:
    engine = Engine(1, **SPECULATIVE | {"token_budget": 7})
    for number in range(4):
        engine.add(f"r{number}", (number + 1, 2), max_tokens=20, ignore_eos=True)
    plans = run(engine)
    assert max(plan.num_tokens for plan in plans if plan.verifies) == 7


def costs(alone: float, together: float) -> StepCosts:
    """A further row of a chunk costs so much of a plain step, in a step of one chunk and of four or more."""
    rows = {1: alone, 4: together, 32: together}
    return StepCosts({(n, drafts): 1 + (row + 0.02) * drafts for n, row in rows.items() for drafts in range(5)})


def test_draft_tokens_that_cost_more_than_they_bring() -> None:
    """None are drawn, and the mtp layer does not run."""
    engine = Engine(2, costs(1.5, 1.5), **SPECULATIVE)
    engine.add("r", LONG, max_tokens=60, ignore_eos=True)
    assert not any(plan.drafts for plan in run(engine))


def test_draft_tokens_that_pay_no_more() -> None:
    """Others come, beside whom steps with draft tokens are too slow. After a while the mtp layer stops."""
    engine = Engine(2, costs(0.05, 1.5), **SPECULATIVE)
    engine.add("r", LONG, max_tokens=100, ignore_eos=True)
    flights = deque([launch(engine), launch(engine)])
    for _ in range(4):
        land(engine, flights.popleft())
        flights.append(launch(engine))
    assert flights[-1][0].verifies
    for number in range(3):
        engine.add(f"other{number}", (number + 1, 2), max_tokens=60, ignore_eos=True)
    plans: list[StepPlan] = []
    for _ in range(50):
        land(engine, flights.popleft())
        flights.append(launch(engine))
        plans.append(flights[-1][0])
    assert all(len(plan.chunks) == 4 for plan in plans)
    assert not any(plan.num_draft_tokens for plan in plans[1:])
    drafts = [plan.drafts for plan in plans]
    assert 25 < drafts.index(False) < 40
    assert not any(drafts[drafts.index(False) :])
    while flights:
        land(engine, flights.popleft())
    run(engine)
    assert engine.output("r") == reference(LONG, 100)


def test_draft_tokens_that_pay() -> None:
    engine = Engine(2, costs(0.02, 0.02), **SPECULATIVE)
    for number in range(3):
        engine.add(f"r{number}", (number + 1, 2, 3), max_tokens=60, ignore_eos=True, pin=ADAPTER)
    plans = run(engine)
    counts = engine.scheduler.counts()
    assert counts.num_accepted_tokens > 60
    assert len(plans) < 45
    for number in range(3):
        assert engine.output(f"r{number}") == reference((number + 1, 2, 3), 60)
