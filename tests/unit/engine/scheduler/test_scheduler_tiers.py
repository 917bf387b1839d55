"""The scheduler and the tiers below the device: when it waits for a load, and for how long."""

from __future__ import annotations

from services.engine.kv_offload.messages import GiveUp
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.step_plan import StepPlan
from tests.unit.engine.machine import reference
from tests.unit.engine.toy_engine import LONG, Engine, shape
from tests.unit.engine.toy_tiers import ToyTiers

_LEAST, _MOST = 0.18 * 0.25, 0.18 * 0.75
"""Seconds of waiting for 18 tokens: a load that is expected to be fast is given up after the first."""


class Tiered(Engine):
    """Scheduler with tiers; a token takes 10 ms to compute."""

    def __init__(self, price: float = 0.0, **changes: int | bool | frozenset[int] | None) -> None:
        super().__init__(token_seconds=0.01, **changes)  # type: ignore[arg-type]
        self.tiers = ToyTiers(self.runner, self.config.block_size)
        self.scheduler = Scheduler(self.config, 1, self.tiers)
        self.add("first", LONG, max_tokens=2)
        self.run()
        self.serve()
        self.tiers.work()
        self.serve()
        assert self.tiers.entries
        self.scheduler.clear_cache()
        self.tiers.price = price

    def serve(self) -> None:
        """Serves the tiers like the loop between two steps."""
        self.scheduler.take_events(self.tiers.take_events())
        self.tiers.submit(self.scheduler.take_commands())

    def ask(self, now: float) -> StepPlan | None:
        """The next step; None: it waits for a load."""
        plan = self.scheduler.schedule(now)
        self.serve()
        if plan is not None:
            self.take(self.scheduler.update(plan, self.runner.execute(plan), now))
        self.scheduler.check_integrity()
        return plan


def test_a_load_that_comes_in_time_is_gone_on_from() -> None:
    engine = Tiered()
    engine.add("second", LONG, max_tokens=2)
    assert engine.ask(0.0) is None
    assert engine.ask(0.9 * _LEAST) is None
    engine.tiers.work()
    engine.serve()
    plan = engine.ask(0.95 * _LEAST)
    assert plan is not None
    assert shape(plan) == [("second", 18, 1, True)]


def test_a_load_that_is_late_is_given_up() -> None:
    engine = Tiered()
    engine.add("second", LONG, max_tokens=2)
    assert engine.ask(0.0) is None
    plan = engine.ask(1.1 * _LEAST)
    assert plan is not None
    assert shape(plan) == [("second", 0, 19, True)]
    assert engine.tiers.given_up == 1
    engine.serve()
    assert not engine.scheduler._memory.copying, "its blocks and its slot are free again"
    engine.run()
    assert engine.output("second") == reference(LONG, 2)


def test_a_load_may_take_twice_as_long_as_expected_but_no_longer_than_what_it_saves() -> None:
    for price, patience in ((0.04, 0.08), (0.089, _MOST)):
        engine = Tiered(price)
        engine.add("second", LONG, max_tokens=2)
        assert engine.ask(0.0) is None
        assert engine.ask(0.99 * patience) is None
        assert engine.ask(1.01 * patience) is not None


def test_a_load_that_leaves_no_time_to_be_late_is_not_begun() -> None:
    engine = Tiered(0.091)
    engine.add("second", LONG, max_tokens=2)
    plan = engine.ask(0.0)
    assert plan is not None
    assert shape(plan) == [("second", 0, 19, True)]
    assert not engine.scheduler._memory.copying


def test_a_load_goes_on_while_another_one_waits_for_it() -> None:
    engine = Tiered()
    engine.add("second", LONG, max_tokens=2)
    assert engine.ask(0.0) is None
    engine.add("third", LONG, max_tokens=2, arrival=1)
    assert engine.ask(0.9 * _LEAST) is None
    plan = engine.ask(1.1 * _LEAST)
    assert plan is not None
    assert shape(plan) == [("second", 0, 19, True)]
    assert not engine.tiers.given_up
    assert engine.tiers.commands, "the third one's"
    engine.scheduler.abort("second")
    engine.scheduler.clear_cache()
    engine.tiers.work()
    engine.serve()
    plan = engine.ask(1.2 * _LEAST)
    assert plan is not None
    assert shape(plan) == [("third", 18, 1, True)]


def test_a_load_that_was_given_up_is_not_waited_for_again() -> None:
    engine = Tiered(max_num_seqs=1)
    engine.add("second", LONG, max_tokens=1)
    assert engine.ask(0.0) is None
    engine.scheduler.schedule(2 * _LEAST)
    assert [type(job) for job in engine.scheduler.take_commands()] == [GiveUp]
    engine.add("third", LONG, max_tokens=1, arrival=1)
    assert not engine.scheduler._memory.offload._targets  # type: ignore[union-attr]


def test_scores_are_not_saved() -> None:
    """Nobody asks for the same again: each call for scores has a salt of its own."""
    engine = Tiered()
    before = dict(engine.tiers.entries)
    engine.add("score", (40, *LONG), max_tokens=3, forced_ids=(1, 2, 3), ignore_eos=True, cache_salt="call 7")
    engine.run()
    engine.serve()
    assert not engine.tiers.commands
    assert engine.tiers.entries == before
    engine.add("another", (40, *LONG), max_tokens=3)
    engine.run()
    engine.serve()
    assert engine.tiers.commands


def burst() -> tuple[Tiered, int]:
    """Eight histories that end before the tiers are told of any, and how many entries there were before."""
    engine = Tiered(max_num_seqs=8, token_budget=256, num_blocks=256, num_slots=64)
    before = len(engine.tiers.entries)
    for number in range(8):
        engine.add(f"r{number}", (40 - number, *LONG), max_tokens=2)
    engine.run()
    return engine, before


def test_a_burst_of_histories_is_saved_by_and_by() -> None:
    engine, before = burst()
    for _ in range(20):
        engine.serve()
        assert len(engine.tiers.commands) <= 4
        engine.tiers.work(1)
    engine.serve()
    assert not engine.tiers.commands
    # Where the prompt ended, and where the answer did.
    assert len(engine.tiers.entries) == before + 16
    assert not engine.scheduler._memory.copying


def test_what_the_device_has_given_up_meanwhile_is_passed_over() -> None:
    engine, before = burst()
    engine.serve()
    saving = len(engine.tiers.commands)
    engine.scheduler.clear_cache()
    for _ in range(8):
        engine.tiers.work()
        engine.serve()
    assert len(engine.tiers.entries) == before + saving
    assert not engine.scheduler._memory.offload._deferred_saves  # type: ignore[union-attr]
