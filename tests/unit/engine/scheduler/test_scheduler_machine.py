"""The scheduler under arbitrary traffic: whatever is added, aborted, expired or failed in whatever order, nothing
leaks, nobody starves whatever arrives meanwhile, be it for a seat, for memory or for the slot of an adapter, no step
reads a slot that another version is written to, and every answer is the one the request would have got alone.

`python -m tests.unit.engine.scheduler.test_scheduler_machine 10000` tries as many examples; the suite tries fewer.
"""

from __future__ import annotations

import sys
from collections.abc import Set
from functools import partial

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from services.common.adapters.names import AdapterVersion
from services.common.errors import DeadlineExceeded, TemperError
from services.engine.requests.adapter import BASE_PIN
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.request import FinishReason
from services.engine.scheduler.sequence import Sequence
from services.engine.scheduler.step_plan import StepPlan
from tests.unit.engine.machine import behind
from tests.unit.engine.scheduler.scheduler_rules import (
    VERSIONS,
    RequestRules,
    claim,
)
from tests.unit.engine.toy_reads import Told


class SchedulerMachine(RequestRules):
    """Runs steps, tiers and failures beside the requests, and checks every plan and answer."""

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
            self.steps += 1
            self._check_weights(plan)
            self._take(self.scheduler.update(plan, result, self.now))

    @rule()
    def step(self) -> None:
        """Runs like the loop: keeps as many steps in flight as allowed."""
        before = len(self.flight)
        self.launch()
        if len(self.flight) == self.depth or len(self.flight) == before:
            self.land()

    @rule()
    def fail(self) -> None:
        if not self.flight:
            return
        plan, _ = self.flight.pop(0)
        self.steps += 1
        self._check_weights(plan)
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
        """Serves the tiers like the loop between two steps."""
        if self.tiers is not None:
            self.scheduler.take_events(self.tiers.take_events())
            self.tiers.submit(self.scheduler.take_commands())

    @rule(
        lengths=st.sampled_from([(1,), (2, 1), (1, 2, 3), (1, 30)]),
        versions=st.lists(st.sampled_from(VERSIONS), max_size=4),
        quits=st.sampled_from([0, 0, 2, 5]),
    )
    def flood(self, lengths: tuple[int, ...], versions: list[AdapterVersion | None], quits: int) -> None:
        """Whatever arrives, who is there ends within a bound that nobody meets who starves: more wait at all times
        than there are seats, for all slots, too, and are aborted now and then. (Whoever is of better priority goes
        first; they are not.)

        Args:
            versions: what is asked for; none: all that have a slot then, while another one waits for its first.
        """
        if not versions:
            for version in VERSIONS:
                self._submit(version, (1, 2, 3)[: self.config.max_model_len - 1], max_tokens=1)
            versions = [None, *(version for version, _ in self.table.published)]
        there = self.here
        priorities = [self.requests[name].priority for name in self.live]
        worst = max([0, *priorities, *(waiting.changes.get("priority", 0) for waiting in self.unpinned.values())])
        arrived = 0
        for count in range(self._bound(there)):
            if not there & self.here:
                break
            while len(self.scheduler._queue.waiting) <= self.config.max_num_seqs and arrived < 20 * (count + 1):
                length = min(lengths[arrived % len(lengths)], self.config.max_model_len - 1)
                arrived += 1
                prompt = tuple(1 + (arrived + position) % 40 for position in range(length))
                version = versions[arrived % len(versions)] if len(self.unpinned) <= 2 * len(there) + 8 else None
                self._submit(version, prompt, max_tokens=1 + arrived % 4, priority=worst)
            if quits and count % quits == 1 and (others := sorted(self.here - there)):
                self._abort(others[count % len(others)])
            self._step_with_tiers()
        assert not there & self.here, "starved"

    def _bound(self, names: Set[str]) -> int:
        """Steps that requests may take, those that run meanwhile, and those that the versions that wait wait for."""
        requests = [self.requests[name] for name in names & self.live]
        total = sum(len(each.prompt_token_ids) + each.sampling.max_tokens for each in requests)
        waiting = [self.unpinned[name] for name in names & self.unpinned.keys()]
        total += sum(len(each.prompt) + each.changes["max_tokens"] for each in waiting)
        steps = 20 + 2 * (total + 34 * self.config.max_num_seqs) * (len(names) + 2)
        return steps * (1 + len({each.version for each in waiting}))

    def _step_with_tiers(self) -> None:
        self.step()
        if self.tiers is not None:
            self.tiers.work()
            self._serve_tiers()

    @rule()
    def run_dry(self) -> None:
        """Without new arrivals every request ends, and nothing is held any more."""
        for _ in range(self._bound(self.here)):
            if not self.here:
                break
            self._step_with_tiers()
        assert not self.here
        while self.flight:
            self.land()
        while self.tiers is not None and (self.tiers.commands or self.tiers.events or self.scheduler._memory.copying):
            self._serve_tiers()
            self.tiers.work()
        counts = self.scheduler.counts()
        assert counts.running == counts.waiting == counts.blocks_used == counts.slots_used == 0
        assert not self.scheduler.has_work
        assert all(resident.requests == 0 for _, resident in self.table.published)
        assert not self.table.queue

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert self.scheduler.has_work == bool(self.live)
            self._check_index()

    def _check_index(self) -> None:
        """Somebody who only follows the changes of the prefix cache knows what is in it."""
        assert self.scheduler.journal is not None
        self.index.follow(self.scheduler.journal.take())
        self.index.check(self.scheduler)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.run_dry()
            self.scheduler.clear_cache()
            self.scheduler.check_integrity()
            counts = self.scheduler.counts()
            assert counts.blocks_cached == counts.slots_cached == 0
            self._check_index()

    def _schedule(self) -> StepPlan | None:
        self._pin_waiting()
        before = {s.request.request_id: s for s in self.scheduler._queue.running}
        prompts = {s.request.request_id: len(s.request.prompt_token_ids) for s in before.values()}
        decoding = [s for name, s in before.items() if prompts[name] < s.known < s.known_at_end and s.uncomputed == 1]
        preemptions = self.scheduler.counts().preemptions
        refused = {s.request.request_id for s in self.scheduler._queue.waiting if s.held_up}
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
            self._check_fairness(plan, before.keys(), [s for s in decoding if not s.ended], preemptions, refused)
        return plan

    def _check_weights(self, plan: StepPlan) -> None:
        """A step has run: the weights that it read were those of its requests' versions all the time."""
        for pin in {chunk.request.pin for chunk in plan.chunks} - {BASE_PIN}:
            assert self.weights[pin.slot] == pin.digest

    def _check_fairness(
        self,
        plan: StepPlan,
        before: Set[str],
        decoding: list[Sequence],
        preemptions_before: int,
        refused: Set[str],
    ) -> None:
        planned = {chunk.request.request_id for chunk in plan.chunks}
        running = {s.request.request_id: s for s in self.scheduler._queue.running}
        waiting = self.scheduler._queue.waiting
        assert planned <= running.keys()
        # Decodes: all of them, or the best-ranked ones if blocks or seats had to be taken from the others.
        served = [s.rank for s in decoding if s.request.request_id in planned]
        left_out = [s.rank for s in decoding if s.request.request_id not in planned]
        assert not left_out or self.scheduler.counts().preemptions > preemptions_before
        assert not served or not left_out or max(served) < min(left_out)
        # The best-ranked sequence always advances: so each becomes the best-ranked one some day, and ends.
        best = min([*running.values(), *waiting], key=lambda s: s.rank)
        if best.request.request_id in running:
            assert best.request.request_id in planned or best.known >= best.known_at_end
        # Only those are overtaken who wait for what one of better rank computes or a tier loads, and by short ones of
        # no worse priority those who lack more; these not once they have been refused a seat or memory.
        started = [running[name] for name in planned - before]
        admissions = self.scheduler._admissions
        for sequence in waiting:
            passed_by = [other for other in started if other.rank > sequence.rank]
            limit = self.scheduler._memory.reusable(sequence)
            promised = self.scheduler._prefixes.promised(sequence, limit) >= self.config.block_size
            if not passed_by or sequence.load_id or promised:
                continue
            assert admissions.uncomputed(sequence) > self.config.short_prefill
            assert sequence.request.request_id not in refused
            assert all(other.request.priority <= sequence.request.priority for other in passed_by)

    def _abort(self, request_id: str) -> None:
        waiting = self.unpinned.pop(request_id, None)
        if waiting is not None:
            if all(other.version != waiting.version for other in self.unpinned.values()):
                self.table.leave(claim(waiting.version))
            return
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
            self.scheduler.when_landed(partial(self.table.release, asked.pin))  # as the engine's desk does
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
        depth=1,
        draft_tokens=4,
        further_row=None,
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
    common = {"family": 0, "shared": 0, "min_tokens": 0, "ignore_eos": False, "stop": set(), "patience": None}
    common |= {"version": None, "salt": "", "presence_penalty": 0.0}
    for tail in ([], [], [1, 2, 1], [], [], [], [1, 2, 1]):
        state.add(copies=1, max_tokens=1, priority=0, reads={}, tail=tail, **common)
    state.add(copies=4, max_tokens=7, priority=1, reads={"prompt_logprobs": 0}, tail=[1, 1], **common)
    state.teardown()


if __name__ == "__main__":
    examples = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(SchedulerMachine.TestCase.settings, max_examples=examples)
    )
