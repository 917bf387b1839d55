"""The scheduler's policy, case by case."""

from __future__ import annotations

import pytest

from services.common.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, TemperError
from services.engine.kv_cache.block_pool import IntegrityError
from services.engine.requests.outputs import SampledToken
from services.engine.requests.request import FinishReason
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.step_plan import MOST_VERIFIED, PENDING, StepPlan, StepResult
from tests.unit.engine.machine import reference
from tests.unit.engine.toy_engine import ADAPTER, LONG, Engine, shape


def test_decodes_come_first_and_prefill_fills_the_budget() -> None:
    engine = Engine(token_budget=10, prefix_cache=False)
    engine.add("short", (1, 2, 3), max_tokens=4)
    assert shape(engine.step()) == [("short", 0, 3, True)]
    engine.add("long", LONG, max_tokens=2)
    assert shape(engine.step()) == [("short", 3, 1, True), ("long", 0, 9, False)]
    assert shape(engine.step()) == [("short", 4, 1, True), ("long", 9, 9, False)]
    # The tail of one token is a decode in all but name, and sorts with them.
    assert shape(engine.step()) == [("short", 5, 1, True), ("long", 18, 1, True)]
    assert shape(engine.step()) == [("long", 19, 1, True)]
    assert engine.output("short") == reference((1, 2, 3), 4)
    assert engine.output("long") == reference(LONG, 2)


def test_several_prompts_share_a_step() -> None:
    engine = Engine(token_budget=10, prefix_cache=False)
    for name, length in (("a", 4), ("b", 4), ("c", 4)):
        engine.add(name, tuple(range(length)), max_tokens=1)
    assert shape(engine.step()) == [("a", 0, 4, True), ("b", 0, 4, True), ("c", 0, 2, False)]
    assert shape(engine.step()) == [("c", 2, 2, True)]


def test_first_update_tells_version_and_cached_tokens() -> None:
    engine = Engine()
    engine.add("r", LONG, max_tokens=3, pin=ADAPTER)
    engine.run()
    first, *rest = engine.updates["r"]
    assert (first.adapter, first.cached_tokens) == ("a@1", 0)
    assert all(update.adapter is update.cached_tokens is None for update in rest)
    assert [update.finish_reason for update in engine.updates["r"]] == [None, None, FinishReason.LENGTH]
    finished = rest[-1].finished
    assert finished is not None
    assert list(finished.output_ids) == reference(LONG, 3)
    assert list(finished.sampling_logprobs) == [-0.5] * 3


def test_ends_at_eos_and_stop_tokens_which_are_part_of_the_output() -> None:
    output = reference(LONG, 10)
    stop = output[4]
    at = output.index(stop)
    for engine, changes in (
        (Engine(eos_token_ids=frozenset({stop})), {}),
        (Engine(), {"stop_token_ids": frozenset({stop})}),
        (Engine(), {"stop_token_ids": frozenset({stop}), "ignore_eos": True}),
    ):
        engine.add("r", LONG, max_tokens=10, **changes)
        engine.run()
        assert engine.output("r") == output[: at + 1]
        assert engine.updates["r"][-1].finish_reason is FinishReason.STOP


def test_ignore_eos_and_min_tokens_hold_off_the_end() -> None:
    output = reference(LONG, 10)
    engine = Engine(eos_token_ids=frozenset({output[2]}))
    engine.add("ignores", LONG, max_tokens=10, ignore_eos=True)
    engine.add("at least", LONG, max_tokens=10, min_tokens=5)
    engine.run()
    assert engine.output("ignores") == output
    # The toy sampler masks nothing, so only later stop tokens can end it.
    assert len(engine.output("at least")) > 5


def test_the_context_ends_an_answer() -> None:
    engine = Engine(max_model_len=22)
    engine.add("r", LONG, max_tokens=10)
    engine.run()
    assert engine.output("r") == reference(LONG, 3)
    assert engine.updates["r"][-1].finish_reason is FinishReason.LENGTH


def test_refuses_what_can_never_fit_with_the_numbers() -> None:
    engine = Engine(max_model_len=64, num_blocks=6)
    with pytest.raises(ContextLengthExceeded, match=r"64 tokens.*context of 64"):
        engine.add("r", tuple(range(64)), max_tokens=1)
    with pytest.raises(InvalidRequest, match=r"19 prompt tokens and up to 3 output tokens need 6 KV blocks.*has 5"):
        engine.add("r", LONG, max_tokens=3)
    engine.add("r", LONG, max_tokens=2)
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add("r", LONG, max_tokens=1)
    engine.run()
    assert engine.output("r") == reference(LONG, 2)


def test_priority_then_arrival_decide_who_starts() -> None:
    engine = Engine(max_num_seqs=1, num_slots=4)
    engine.add("later", (1,), max_tokens=1, arrival=5)
    engine.add("earlier", (1,), max_tokens=1, arrival=4)
    engine.add("urgent", (1,), max_tokens=1, arrival=6, priority=-1)
    assert [shape(engine.step())[0][0] for _ in range(3)] == ["urgent", "earlier", "later"]


def test_an_urgent_request_takes_the_seat_of_a_less_urgent_one() -> None:
    engine = Engine(max_num_seqs=1, num_slots=4)
    engine.add("patient", LONG, max_tokens=6, priority=1)
    for _ in range(4):
        engine.step()
    engine.add("urgent", (5, 6), max_tokens=2, priority=0)
    assert shape(engine.step()) == [("urgent", 0, 2, True)]
    # Of equal urgency: waits.
    engine.add("equal", (7,), max_tokens=1, priority=0)
    assert shape(engine.step()) == [("urgent", 2, 1, True)]
    engine.run()
    assert engine.output("patient") == reference(LONG, 6)
    finished = engine.updates["patient"][-1].finished
    assert finished is not None
    assert finished.preemptions == 1


def test_out_of_blocks_the_newest_is_preempted_and_resumes_identically() -> None:
    engine = Engine(num_blocks=9, prefix_cache=False)
    prompts = {"old": (1, 2, 3, 4, 5, 6, 7), "new": (9, 8, 7, 6, 5, 4, 3)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=18)
    plans = engine.run()
    assert engine.scheduler.counts().preemptions > 0
    for name, prompt in prompts.items():
        assert engine.output(name) == reference(prompt, 18)
    old = engine.updates["old"][-1].finished
    assert old is not None
    assert old.preemptions == 0
    # Never kept waiting: one token each step from the first to the last.
    steps_of_old = [n for n, plan in enumerate(plans) if any(c.request.request_id == "old" for c in plan.chunks)]
    assert steps_of_old == list(range(18))


def test_aborts_free_everything_at_once() -> None:
    engine = Engine()
    engine.add("runs", LONG, max_tokens=9)
    engine.step()
    engine.add("waits", LONG, max_tokens=9)
    for name in ("runs", "waits"):
        update = engine.scheduler.abort(name)
        assert update is not None
        assert update.finish_reason is FinishReason.ABORT
        assert engine.scheduler.abort(name) is None
    counts = engine.scheduler.counts()
    assert counts.blocks_used == counts.slots_used == counts.running == counts.waiting == 0
    assert engine.scheduler.schedule(0.0) is None


def test_an_abort_at_a_stop_string_counts_as_stopped_there() -> None:
    engine = Engine()
    engine.add("r", LONG, max_tokens=9)
    for _ in range(5):
        engine.step()
    update = engine.scheduler.abort("r", keep_tokens=2)
    assert update is not None
    assert update.finish_reason is FinishReason.STOP
    assert update.finished is not None
    assert list(update.finished.output_ids) == reference(LONG, 2)
    assert len(update.finished.sampling_logprobs) == 2


def test_deadlines_end_requests_wherever_they_are() -> None:
    engine = Engine(max_num_seqs=1, num_slots=4)
    engine.add("runs", LONG, max_tokens=9, deadline=10.0)
    engine.add("waits", LONG, max_tokens=9, deadline=10.0)
    engine.add("has time", (1,), max_tokens=1, deadline=11.0)
    engine.step(9.0)
    plan = engine.step(10.0)
    assert shape(plan) == [("has time", 0, 1, True)]
    for name in ("runs", "waits"):
        assert engine.updates[name][-1].finish_reason is FinishReason.ERROR
        assert isinstance(engine.updates[name][-1].error, DeadlineExceeded)
    engine.add("late", (1,), deadline=1.0)
    assert engine.scheduler.has_work
    assert engine.scheduler.schedule(12.0) is None
    assert [update.request_id for update in engine.scheduler.take_expired()] == ["late"]
    assert not engine.scheduler.has_work


def test_a_bad_row_of_logits_ends_one_request() -> None:
    engine = Engine()
    engine.add("bad", (1, 2), max_tokens=3)
    engine.add("good", (1, 2), max_tokens=3)
    plan = engine.scheduler.schedule(0.0)
    assert plan is not None
    result = engine.runner.execute(plan)
    bad = SampledToken(0, 0.0, error="the logits are not finite")
    engine.take(engine.scheduler.update(plan, StepResult([bad, result.tokens[1]]), 0.0))
    last = engine.updates["bad"][-1]
    assert last.token is None
    assert last.error is not None
    assert last.error.message == "the logits are not finite"
    engine.run()
    assert engine.output("good") == reference((1, 2), 3)


def test_plans_are_taken_in_turn() -> None:
    engine = Engine()
    engine.add("r", LONG, max_tokens=3)
    plan = engine.scheduler.schedule(0.0)
    assert plan is not None
    with pytest.raises(IntegrityError, match="in flight"):
        engine.scheduler.schedule(0.0)
    other = StepPlan(plan.chunks)
    with pytest.raises(ValueError, match="not in flight"):
        engine.scheduler.update(other, StepResult(()), 0.0)
    with pytest.raises(ValueError, match="2 tokens for 1 sampling"):
        engine.scheduler.update(plan, StepResult([SampledToken(1, 0.0)] * 2), 0.0)
    (update,) = engine.scheduler.fail(plan, TemperError("broken"))
    assert update.finish_reason is FinishReason.ERROR
    engine.scheduler.check_integrity()
    assert engine.scheduler.counts().slots_cached == 0


def launch(engine: Engine) -> tuple[StepPlan, StepResult]:
    plan = engine.scheduler.schedule(0.0)
    assert plan is not None
    return plan, engine.runner.execute(plan)


def land(engine: Engine, launched: tuple[StepPlan, StepResult]) -> None:
    engine.take(engine.scheduler.update(*launched, 0.0))
    engine.scheduler.check_integrity()


def test_a_preempted_sequence_waits_for_the_token_that_is_under_way() -> None:
    engine = Engine(depth=2, max_num_seqs=1, num_slots=4)
    engine.add("patient", (1, 2, 3), max_tokens=6, priority=1)
    first = launch(engine)
    engine.add("urgent", (5, 6), max_tokens=1)
    second = launch(engine)
    assert shape(second[0]) == [("urgent", 0, 2, True)]
    land(engine, first)
    assert engine.output("patient") == reference((1, 2, 3), 1)
    land(engine, second)
    assert shape(launch(engine)[0]) == [("patient", 0, 4, True)]


def test_what_a_preempted_sequence_has_computed_is_kept() -> None:
    """The step that computes its prompt is in flight when it is preempted: nobody goes on from it before it has run."""
    engine = Engine(depth=2, max_num_seqs=1, num_slots=4)
    engine.add("patient", LONG, max_tokens=3, priority=1)
    first = launch(engine)
    assert first[0].chunks[0].snapshots[0][0] == 18
    engine.add("urgent", LONG, max_tokens=1)
    second = launch(engine)
    assert shape(second[0]) == [("urgent", 0, 19, True)]
    land(engine, first)
    land(engine, second)
    assert shape(launch(engine)[0]) == [("patient", 19, 1, True)]


def test_nothing_of_a_step_that_failed_is_kept() -> None:
    engine = Engine(depth=2, max_num_seqs=1, num_slots=4)
    engine.add("patient", LONG, max_tokens=3, priority=1)
    first, _ = launch(engine)
    engine.add("urgent", LONG, max_tokens=1)
    second = launch(engine)
    engine.take(engine.scheduler.fail(first, TemperError("broken")))
    engine.scheduler.check_integrity()
    land(engine, second)
    engine.run()
    engine.add("again", (*LONG, 77), max_tokens=1)
    engine.run()
    assert (engine.cached("urgent"), engine.cached("again")) == (0, 19), "what the second step has computed is sound"


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    engine = Engine(max_num_seqs=1, num_slots=4)
    engine.add("patient", LONG, max_tokens=9, ignore_eos=True, priority=1)
    for _ in range(4):
        engine.step()
    engine.add("urgent", (40, 41, 42), max_tokens=2)
    assert shape(engine.step()) == [("urgent", 0, 3, True)]
    engine.step()
    assert shape(engine.step()) == [("patient", 22, 1, True)]
    engine.run()
    assert engine.scheduler.counts().preemptions == 1
    assert engine.output("patient") == reference(LONG, 9)


def test_completions_of_one_prompt_wait_for_the_snapshot_in_flight() -> None:
    engine = Engine(depth=2)
    for n in range(3):
        engine.add(f"r{n}", LONG, max_tokens=2)
    first, second = launch(engine), launch(engine)
    assert shape(first[0]) == [("r0", 0, 19, True)]
    assert [position for position, _ in first[0].chunks[0].snapshots] == [18]
    assert shape(second[0]) == [("r0", 19, 1, True)]
    assert list(second[0].chunks[0].token_ids) == [PENDING]
    land(engine, first)
    third = launch(engine)
    assert shape(third[0]) == [("r1", 18, 1, True), ("r2", 18, 1, True)]
    assert len(third[0].block_copies) == 2


def test_no_more_plans_than_the_depth() -> None:
    engine = Engine(depth=2)
    engine.add("r", LONG, max_tokens=9)
    first, second = launch(engine), launch(engine)
    with pytest.raises(IntegrityError, match="2 plans are in flight"):
        engine.scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="not the oldest"):
        engine.scheduler.update(*second, 0.0)
    land(engine, first)
    with pytest.raises(ValueError, match="depth"):
        Scheduler(engine.config, 0)


# Prefill beside decodes.


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
    """It would be computed as a decode, with other bits than as the end of a chunk."""
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


SPECULATIVE: dict[str, int | bool | frozenset[int] | None] = {"speculative": True, "token_budget": 40, "num_slots": 16}


def test_right_guesses_give_two_tokens_a_step() -> None:
    engine = Engine(**SPECULATIVE)
    engine.add("r", LONG, max_tokens=30, ignore_eos=True)
    plans = engine.run()
    assert engine.output("r") == reference(LONG, 30)
    counts = engine.scheduler.counts()
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    # One token from the prompt, one from each other step, one more for each right guess.
    assert len(plans) - 1 == 29 - counts.num_accepted_tokens
    lengths = [len(chunk.token_ids) for plan in plans for chunk in plan.chunks if chunk.start >= len(LONG)]
    assert max(lengths) <= MOST_VERIFIED


def test_a_stop_inside_an_accepted_run() -> None:
    """The token behind a right guess is dropped if the guess itself ends the request, for every possible end."""
    for length in range(1, 12):
        ending = reference(LONG, length)[-1]
        engine = Engine(**SPECULATIVE)
        engine.add("r", LONG, max_tokens=30, stop_token_ids=frozenset({ending}))
        engine.run()
        output = engine.output("r")
        assert output == reference(LONG, len(output))
        assert output.index(ending) == len(output) - 1
        assert engine.updates["r"][-1].finish_reason is FinishReason.STOP
        engine = Engine(**SPECULATIVE)
        engine.add("r", LONG, max_tokens=length, ignore_eos=True)
        engine.run()
        assert engine.output("r") == reference(LONG, length)
        assert engine.updates["r"][-1].finish_reason is FinishReason.LENGTH


def test_nothing_is_guessed_where_logits_are_edited() -> None:
    engine = Engine(**SPECULATIVE)
    engine.add("r", LONG, max_tokens=10, ignore_eos=True, presence_penalty=0.5)
    plans = engine.run()
    assert engine.output("r") == reference(LONG, 10)
    assert engine.scheduler.counts().num_draft_tokens == 0
    assert all(chunk.is_decode for plan in plans[2:] for chunk in plan.chunks)


def test_two_slots_a_sequence() -> None:
    engine = Engine(**SPECULATIVE)
    engine.add("r", LONG, max_tokens=30, ignore_eos=True)
    slots = {chunk.slot for _ in range(12) for chunk in engine.step().chunks}
    assert len(slots) == 2
    assert engine.scheduler.counts().slots_used == 2
    assert engine.scheduler.abort("r") is not None
    assert engine.scheduler.counts().slots_used == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_budget": 15}, "4 times max_num_seqs"),
        ({"num_slots": 8}, r"above 2 \* max_num_seqs"),
        ({"prefill_alignment": 4}, "prefill_alignment 1"),
    ],
)
def test_what_speculation_needs(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(**(SPECULATIVE | changes))
    with pytest.raises(ValueError, match="1 with speculation"):
        Scheduler(Engine(**SPECULATIVE).config, depth=2)
