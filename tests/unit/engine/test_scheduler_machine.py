"""The scheduler under arbitrary traffic: whatever is added, aborted, expired or failed in whatever order, nothing
leaks, nobody starves, and every answer is the one the request would have got alone."""

from __future__ import annotations

from collections.abc import Set

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.common.errors import DeadlineExceeded, InvalidRequest, TemperError
from services.engine.limits import SchedulerConfig
from services.engine.plan import StepPlan, StepResult
from services.engine.request import AdapterPin, FinishReason, Pooling
from services.engine.scheduler import Scheduler
from services.engine.sequence import Sequence
from services.engine.updates import SequenceUpdate
from tests.unit.engine.machine import ToyRunner, behind, request
from tests.unit.engine.toy_reads import Told
from tests.unit.engine.toy_tiers import ToyTiers

READS: list[dict[str, object]] = [
    {},
    {},
    {},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 2, "prompt_logprobs_from": 5},
    {"pooling": Pooling.LAST},
    {"prompt_logprobs": 1, "pooling": Pooling.MEAN},
]
"""What requests want to know of their prompts; nothing, mostly."""
PINS = [AdapterPin(), AdapterPin("a@1", "digest-a", 1)]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        max_num_seqs=st.integers(1, 5),
        depth=st.sampled_from([0, 0, 1, 2, 2, 3]),
        extra_budget=st.integers(0, 20),
        alignment=st.sampled_from([1, 1, 2, 4]),
        mixed=st.none() | st.integers(0, 9),
        block_size=st.integers(1, 5),
        num_blocks=st.integers(2, 40),
        extra_slots=st.integers(1, 5),
        max_model_len=st.integers(2, 80),
        prefix_cache=st.sampled_from([True, True, True, False]),
        interval=st.sampled_from([9, 1000]),
        tiers=st.booleans(),
        short=st.sampled_from([256, 256, 2, 5]),
    )
    def start(
        self,
        max_num_seqs: int,
        depth: int,
        extra_budget: int,
        alignment: int,
        mixed: int | None,
        block_size: int,
        num_blocks: int,
        extra_slots: int,
        max_model_len: int,
        prefix_cache: bool,
        interval: int,
        tiers: bool,
        short: int,
    ) -> None:
        speculative = depth == 0
        if speculative:
            depth, alignment = 1, 1
            extra_budget += 3 * max_num_seqs
            extra_slots += max_num_seqs
        least = 1 if alignment == 1 else alignment + 1
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            token_budget=max_num_seqs + extra_budget + (least - 1),
            mixed_prefill_tokens=None if mixed is None else mixed + least,
            prefill_alignment=alignment,
            block_size=block_size,
            num_blocks=num_blocks,
            num_slots=max_num_seqs + extra_slots,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({7, 13}),
            prefix_cache=prefix_cache,
            speculative=speculative,
            snapshot_interval=interval,
            short_prefill=short,
            long_beside_short=3,
        )
        self.depth = depth
        self.runner = ToyRunner(self.config, depth)
        self.tiers = ToyTiers(self.runner, block_size) if tiers else None
        self.scheduler = Scheduler(self.config, depth, self.tiers)
        self.flight: list[tuple[StepPlan, StepResult]] = []
        """Launched, oldest first; the scheduler does not know the results yet."""
        self.requests = {}
        self.outputs: dict[str, list[int]] = {}
        self.told: dict[str, Told] = {}
        self.live: set[str] = set()
        self.now = 0.0
        self.added = 0

    @rule(
        family=st.integers(0, 1),
        shared=st.sampled_from([0, 3, 12, 12, 24, 30]),
        tail=st.lists(st.integers(1, 3), max_size=6),
        max_tokens=st.integers(1, 12),
        min_tokens=st.sampled_from([0, 0, 0, 1, 3]),
        ignore_eos=st.booleans(),
        stop=st.sets(st.integers(1, 49), max_size=3),
        priority=st.integers(-1, 1),
        patience=st.none() | st.floats(0.0, 20.0),
        pin=st.sampled_from(PINS),
        salt=st.sampled_from(["", "x"]),
        copies=st.integers(1, 4),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
        reads=st.sampled_from(READS),
    )
    def add(
        self,
        family,
        shared,
        tail,
        max_tokens,
        min_tokens,
        ignore_eos,
        stop,
        priority,
        patience,
        pin,
        salt,
        copies,
        presence_penalty,
        reads,
    ):
        prompt = (*(family * 10 + position % 4 for position in range(shared)), *tail) or (1,)
        if "prompt_logprobs_from" in reads:
            reads = {**reads, "prompt_logprobs_from": min(5, len(prompt) - 1)}
        for _ in range(copies):
            self.added += 1
            added = request(
                f"r{self.added}",
                prompt,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                ignore_eos=ignore_eos,
                presence_penalty=presence_penalty,
                stop_token_ids=frozenset(stop),
                priority=priority,
                deadline=None if patience is None else self.now + patience,
                pin=pin,
                cache_salt=salt,
                arrival=self.added,
                **reads,
            )
            size = min(len(prompt) + max_tokens, self.config.max_model_len) - 1
            if len(prompt) >= self.config.max_model_len or size > self.config.capacity_tokens:
                with pytest.raises(InvalidRequest):
                    self.scheduler.add(added)
                return
            self.scheduler.add(added)
            self.requests[added.request_id] = added
            self.outputs[added.request_id] = []
            self.live.add(added.request_id)

    @rule(
        data=st.data(),
        back=st.sampled_from([0, 0, 0, 1, 2, 7]),
        tail=st.lists(st.integers(1, 3), min_size=1, max_size=9),
        max_tokens=st.integers(1, 12),
        copies=st.integers(1, 3),
        marks=st.sets(st.integers(1, 39), max_size=3),
    )
    def follow(
        self, data: st.DataObject, back: int, tail: list[int], max_tokens: int, copies: int, marks: set[int]
    ) -> None:
        """The next turn of a conversation, or another way on from the middle of it."""
        if not self.requests:
            return
        before = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        history = (*before.prompt_token_ids, *self.outputs[before.request_id])
        prompt = (*history[: len(history) - back], *tail)
        for _ in range(copies):
            self.added += 1
            added = request(
                f"r{self.added}",
                prompt,
                max_tokens=max_tokens,
                pin=before.pin,
                cache_salt=before.cache_salt,
                arrival=self.added,
                boundaries=tuple(sorted(mark for mark in marks if mark < len(prompt))),
            )
            size = min(len(prompt) + max_tokens, self.config.max_model_len) - 1
            if len(prompt) >= self.config.max_model_len or size > self.config.capacity_tokens:
                with pytest.raises(InvalidRequest):
                    self.scheduler.add(added)
                return
            self.scheduler.add(added)
            self.requests[added.request_id] = added
            self.outputs[added.request_id] = []
            self.live.add(added.request_id)

    @rule(
        shared=st.sampled_from([1, 3, 12, 24]),
        given=st.lists(st.integers(0, 49), min_size=1, max_size=12),
        priority=st.integers(-1, 1),
        pin=st.sampled_from(PINS),
        copies=st.integers(1, 3),
    )
    def add_forced(self, shared: int, given: list[int], priority: int, pin: AdapterPin, copies: int) -> None:
        """Requests that bring their tokens, stop tokens among them."""
        prompt = tuple(position % 4 for position in range(shared))
        for copy in range(copies):
            self.added += 1
            forced = tuple(given[copy:] or given)
            added = request(
                f"r{self.added}",
                prompt,
                max_tokens=len(forced),
                ignore_eos=True,
                forced_ids=forced,
                priority=priority,
                pin=pin,
                arrival=self.added,
            )
            size = len(prompt) + len(forced)
            if size > self.config.max_model_len or size - 1 > self.config.capacity_tokens:
                with pytest.raises(InvalidRequest):
                    self.scheduler.add(added)
                return
            self.scheduler.add(added)
            self.requests[added.request_id] = added
            self.outputs[added.request_id] = []
            self.live.add(added.request_id)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.live:
            self._abort(data.draw(st.sampled_from(sorted(self.live))))

    @rule(passed=st.floats(0.0, 5.0))
    def wait(self, passed: float) -> None:
        self.now += passed

    @rule()
    def launch(self) -> None:
        """Plans and launches one more step, if one more may be in flight."""
        if len(self.flight) < self.depth:
            plan = self._schedule()
            if plan is not None:
                self.flight.append((plan, self.runner.execute(plan)))

    @rule()
    def land(self) -> None:
        """Takes in the results of the oldest step."""
        if self.flight:
            plan, result = self.flight.pop(0)
            self._take(self.scheduler.update(plan, result, self.now))

    @rule()
    def step(self) -> None:
        """What the loop does: keeps as many steps in flight as allowed."""
        before = len(self.flight)
        self.launch()
        if len(self.flight) == self.depth or len(self.flight) == before:
            self.land()

    @rule()
    def fail(self) -> None:
        if not self.flight:
            return
        plan, _ = self.flight.pop(0)
        updates = self.scheduler.fail(plan, TemperError("the step failed"))
        names = {chunk.request.request_id for chunk in plan.chunks}
        assert {update.request_id for update in updates} == names & self.live
        self._take(updates)

    @rule(jobs=st.integers(1, 5))
    def work(self, jobs: int) -> None:
        """The tiers get on with what they were given."""
        if self.tiers is not None:
            self._serve_tiers()
            self.tiers.work(jobs)
            self._serve_tiers()

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """A tier has no room for one of its entries."""
        if self.tiers is not None and self.tiers.entries:
            self.tiers.drop(data.draw(st.sampled_from(sorted(self.tiers.entries))))

    @rule(broken=st.sampled_from([False, False, True]), price=st.sampled_from([0.0, 0.0, 0.001, 1.0]))
    def weather(self, broken: bool, price: float) -> None:
        """Tiers fail, or get slower."""
        if self.tiers is not None:
            self.tiers.broken, self.tiers.price = broken, price

    def _serve_tiers(self) -> None:
        """As the loop does between two steps."""
        if self.tiers is not None:
            self.scheduler.take_events(self.tiers.take_events())
            self.tiers.submit(self.scheduler.take_jobs())

    @rule()
    def run_dry(self) -> None:
        """With no new arrivals every request ends, within a bound that no starving scheduler meets."""
        total = sum(
            len(self.requests[name].prompt_token_ids) + self.requests[name].sampling.max_tokens for name in self.live
        )
        for _ in range(10 + 2 * total * (len(self.live) + 2)):
            if not self.live:
                break
            self.step()
            if self.tiers is not None:
                self.tiers.work()
                self._serve_tiers()
        assert not self.live
        while self.flight:
            self.land()
        while self.tiers is not None and (self.tiers.jobs or self.tiers.events or self.scheduler._memory.copying):
            self._serve_tiers()
            self.tiers.work()
        counts = self.scheduler.counts()
        assert counts.running == counts.waiting == counts.blocks_used == counts.slots_used == 0
        assert not self.scheduler.has_work

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert self.scheduler.has_work == bool(self.live)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.run_dry()
            self.scheduler.clear_cache()
            self.scheduler.check_integrity()
            counts = self.scheduler.counts()
            assert counts.blocks_cached == counts.slots_cached == 0

    def _schedule(self) -> StepPlan | None:
        before = {s.request.request_id: s for s in self.scheduler._roster.running}
        prompts = {s.request.request_id: len(s.request.prompt_token_ids) for s in before.values()}
        decoding = [
            s
            for name, s in before.items()
            if prompts[name] < s.known < s.known_at_end and (s.lacking == 1 or (s.lacking <= 4 and self._answers(s)))
        ]
        preemptions = self.scheduler.counts().preemptions
        plan = self.scheduler.schedule(self.now)
        expired = self.scheduler.take_expired()
        for update in expired:
            assert isinstance(update.error, DeadlineExceeded)
        self._take(expired)
        for name in self.live:
            deadline = self.requests[name].deadline
            assert deadline is None or deadline > self.now
        assert plan is None or self.live
        assert plan is not None or self.flight or not self.live or self.scheduler._memory.copying
        self._serve_tiers()
        if plan is not None:
            self._check_fairness(plan, before.keys(), [s for s in decoding if not s.ended], preemptions)
        return plan

    def _answers(self, sequence: Sequence) -> bool:
        return self.config.speculative and sequence.computed >= len(sequence.request.prompt_token_ids)

    def _check_fairness(
        self, plan: StepPlan, before: Set[str], decoding: list[Sequence], preemptions_before: int
    ) -> None:
        planned = {chunk.request.request_id for chunk in plan.chunks}
        running = {s.request.request_id: s for s in self.scheduler._roster.running}
        waiting = self.scheduler._roster.waiting
        assert planned <= running.keys()
        # Decodes: all of them, or the best-ranked ones if blocks or seats had to be taken from the others.
        served = [s.rank for s in decoding if s.request.request_id in planned]
        left_out = [s.rank for s in decoding if s.request.request_id not in planned]
        assert not left_out or self.scheduler.counts().preemptions > preemptions_before
        assert not served or not left_out or max(served) < min(left_out)
        # The best-ranked sequence always advances: so each becomes the best-ranked one some day, and ends.
        best = min([*running.values(), *waiting], key=lambda s: s.rank)
        if best.request.request_id in running:
            assert best.request.request_id in planned or best.known == best.known_at_end
        # Only those are overtaken who wait for what one of better rank computes, and by short ones those who lack
        # more.
        started = [running[name].rank for name in planned - before]
        for sequence in waiting:
            if started and sequence.rank < max(started):
                limit = self.scheduler._memory.reusable(sequence)
                promised = self.scheduler._sharing.promised(sequence, limit)
                long = self.scheduler._lacks(sequence) > self.config.short_prefill
                assert sequence.ticket or promised >= self.config.block_size or long

    def _abort(self, request_id: str) -> None:
        update = self.scheduler.abort(request_id)
        assert update is not None
        assert update.finish_reason is FinishReason.ABORT
        assert self.scheduler.abort(request_id) is None
        self._take([update])

    def _take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            name = update.request_id
            assert name in self.live, "an update after the last one"
            asked, output = self.requests[name], self.outputs[name]
            told = self.told.setdefault(name, Told(asked))
            told.add(update)
            if update.token is not None:
                told.check()
                output.append(update.token.token_id)
                assert output[-1] == behind(asked, (*asked.prompt_token_ids, *output[:-1]))
            if update.finish_reason is None:
                says = update.prompt is not None or update.embedding is not None
                assert (update.token is not None) != (asked.reads_prompt and not told.tokens)
                assert says == (update.token is None)
                assert not self._stops(name)
                continue
            self.live.remove(name)
            assert update.finished is not None
            assert list(update.finished.output_ids) == output
            assert len(update.finished.sampling_logprobs) == len(output)
            assert update.finished.cached_tokens < len(asked.prompt_token_ids)
            if asked.sampling.forced_ids and update.finish_reason is FinishReason.LENGTH:
                assert tuple(output) == asked.sampling.forced_ids
            if update.finish_reason is FinishReason.STOP:
                assert self._stops(name)
            if update.finish_reason is FinishReason.LENGTH:
                room = self.config.max_model_len - len(asked.prompt_token_ids)
                assert len(output) == min(asked.sampling.max_tokens, room)
                assert not self._stops(name)

    def _stops(self, name: str) -> bool:
        sampling, output = self.requests[name].sampling, self.outputs[name]
        if len(output) <= sampling.min_tokens:
            return False
        return output[-1] in sampling.stop_token_ids or (
            output[-1] in self.config.eos_token_ids and not sampling.ignore_eos
        )


SchedulerMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_who_gave_way_is_not_overtaken_by_shorter_ones_that_did_too() -> None:
    """Two answers lose their memory to a third one. The later of them has less to compute again, and is not to take the
    room that the other one waits for."""
    state = SchedulerMachine()
    state.start(
        max_num_seqs=3,
        depth=0,
        extra_budget=0,
        alignment=1,
        mixed=None,
        block_size=1,
        num_blocks=16,
        extra_slots=1,
        max_model_len=9,
        prefix_cache=True,
        interval=9,
        tiers=False,
        short=2,
    )
    base = AdapterPin(version="", digest="", slot=0)
    common = {"family": 0, "shared": 0, "min_tokens": 0, "ignore_eos": False, "stop": set(), "patience": None}
    common |= {"pin": base, "salt": "", "presence_penalty": 0.0}
    for tail in ([], [], [1, 2, 1], [], [], [], [1, 2, 1]):
        state.add(copies=1, max_tokens=1, priority=0, reads={}, tail=tail, **common)
    state.add(copies=4, max_tokens=7, priority=1, reads={"prompt_logprobs": 0}, tail=[1, 1], **common)
    state.teardown()
