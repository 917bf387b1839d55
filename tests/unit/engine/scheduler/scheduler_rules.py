"""Rules of the scheduler's model-based test that send, follow and abort requests and swap adapters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from services.common.adapters.names import AdapterVersion
from services.common.errors import InvalidRequest
from services.engine.adapters.slot_table import SlotTable
from services.engine.requests.adapter import BASE_PIN, AdapterChoice, AdapterPin
from services.engine.requests.request import Pooling, Request
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.draft_depth import StepCosts
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.step_plan import StepPlan, StepResult
from tests.unit.engine.cache_index import CacheIndex
from tests.unit.engine.machine import ToyRunner, request
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
"""Prompt outputs that requests ask for; mostly none."""
VERSIONS = [None, AdapterVersion("a", 1), AdapterVersion("a", 2), AdapterVersion("b", 1)]
"""More than there are slots for; None: the base."""
SLOTS = 2
TURN_STEPS, DRAIN_STEPS = 3, 4


@dataclass(frozen=True)
class Unpinned:
    """A request whose version has no slot, or gives way to those that have none."""

    version: AdapterVersion
    prompt: tuple[int, ...]
    changes: dict[str, Any]


def claim(version: AdapterVersion) -> AdapterChoice:
    return AdapterChoice(name=version.name, version=version.version)


class RequestRules(RuleBasedStateMachine):
    @initialize(
        max_num_seqs=st.integers(1, 5),
        depth=st.sampled_from([1, 2, 2, 3]),
        draft_tokens=st.sampled_from([0, 0, 1, 3, 4]),
        further_row=st.sampled_from([None, 0.02, 0.4]),
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
        short=st.sampled_from([256, 2, 2, 5]),
    )
    def start(
        self,
        max_num_seqs: int,
        depth: int,
        draft_tokens: int,
        further_row: float | None,
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
        if draft_tokens:
            alignment = 1
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
            cache_journal=True,
            draft_tokens=draft_tokens,
            snapshot_interval=interval,
            short_prefill=short,
            long_beside_short=3,
        )
        self.depth = depth
        costs = None
        if further_row is not None:  # as a share of a plain step of one chunk
            costs = StepCosts(
                {(n, drafts): 1 + (further_row * n + 0.02) * drafts for n in (1, 5) for drafts in range(5)}
            )
        self.runner = ToyRunner(self.config, depth, costs)
        self.tiers = ToyTiers(self.runner, block_size) if tiers else None
        self.scheduler = Scheduler(self.config, depth, self.tiers, costs)
        self.index = CacheIndex(block_size)
        self.flight: list[tuple[StepPlan, StepResult]] = []
        """Launched, oldest first; the scheduler does not know the results yet."""
        self.steps = 0
        """Over; what the slots' clock shows."""
        self.table = SlotTable(
            SLOTS, drain_seconds=DRAIN_STEPS, turn_seconds=TURN_STEPS, clock=lambda: float(self.steps)
        )
        self.unpinned: dict[str, Unpinned] = {}
        """Oldest first."""
        self.weights: dict[int, str] = {}
        """Digest of what is in each adapter slot."""
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.told: dict[str, Told] = {}
        self.live: set[str] = set()
        self.now = 0.0
        self.added = 0
        self.pinned = 0

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
        version=st.sampled_from(VERSIONS),
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
        version,
        salt,
        copies,
        presence_penalty,
        reads,
    ):
        prompt = (*(family * 10 + position % 4 for position in range(shared)), *tail) or (1,)
        if "prompt_logprobs_from" in reads:
            reads = {**reads, "prompt_logprobs_from": min(5, len(prompt) - 1)}
        for _ in range(copies):
            self._submit(
                version,
                prompt,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                ignore_eos=ignore_eos,
                presence_penalty=presence_penalty,
                stop_token_ids=frozenset(stop),
                priority=priority,
                deadline=None if patience is None else self.now + patience,
                cache_salt=salt,
                **reads,
            )

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
        version = next((one for one in VERSIONS if one is not None and str(one) == before.pin.version), None)
        for _ in range(copies):
            self._submit(
                version,
                prompt,
                max_tokens=max_tokens,
                cache_salt=before.cache_salt,
                boundaries=tuple(sorted(mark for mark in marks if mark < len(prompt))),
            )

    @rule(
        shared=st.sampled_from([1, 3, 12, 24]),
        given=st.lists(st.integers(0, 49), min_size=1, max_size=12),
        priority=st.integers(-1, 1),
        version=st.sampled_from(VERSIONS),
        copies=st.integers(1, 3),
    )
    def add_forced(
        self, shared: int, given: list[int], priority: int, version: AdapterVersion | None, copies: int
    ) -> None:
        """Requests that bring their tokens, stop tokens among them."""
        prompt = tuple(position % 4 for position in range(shared))
        for copy in range(copies):
            forced = tuple(given[copy:] or given)
            changes = {"max_tokens": len(forced), "forced_ids": forced, "ignore_eos": True, "priority": priority}
            self._submit(version, prompt, **changes)

    def _submit(self, version: AdapterVersion | None, prompt: tuple[int, ...], **changes: Any) -> None:
        """Adds a request once its version has a slot, as the engine does."""
        self.added += 1
        name = f"r{self.added}"
        if version is None:
            self._begin(name, BASE_PIN, prompt, changes)
        else:
            self.unpinned[name] = Unpinned(version, prompt, changes)
            self._pin_waiting()

    def _begin(self, name: str, pin: AdapterPin, prompt: tuple[int, ...], changes: dict[str, Any]) -> None:
        self.pinned += 1
        added = request(name, prompt, pin=pin, arrival=self.pinned, **changes)
        length, tokens = len(prompt), added.sampling.max_tokens
        most = tokens if added.sampling.forced_ids else min(tokens, self.config.max_model_len - length)
        if most < 1 or length + most > self.config.max_model_len or length + most - 1 > self.config.capacity_tokens:
            with pytest.raises(InvalidRequest):
                self.scheduler.add(added)
            self.scheduler.when_landed(partial(self.table.release, pin))
            return
        self.scheduler.add(added)
        self.requests[name] = added
        self.outputs[name] = []
        self.live.add(name)

    def _pin_waiting(self) -> None:
        """Writes versions into slots in the order in which they began to wait, and adds the requests that waited."""
        loaded: set[AdapterVersion] = set()
        for version in dict.fromkeys(waiting.version for waiting in self.unpinned.values()):
            slot = self.table.take(claim(version), version, loaded) if self.table.get(version) is None else None
            if slot is not None:
                read = {chunk.request.pin.slot for plan, _ in self.flight for chunk in plan.chunks}
                assert slot not in read, "a slot is written to that a step in flight reads"
                self.weights[slot] = f"digest {version}"
                self.table.put(version, self.weights[slot], slot)
                loaded.add(version)
        for name, waiting in list(self.unpinned.items()):
            resident = self.table.get(waiting.version)
            if resident is not None and self.table.takes_requests(resident, loaded):
                del self.unpinned[name]
                self._begin(name, self.table.acquire(resident), waiting.prompt, waiting.changes)

    @property
    def here(self) -> set[str]:
        """Requests that have not ended."""
        return self.live | self.unpinned.keys()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.here:
            self._abort(data.draw(st.sampled_from(sorted(self.here))))

    @rule(launches=st.integers(0, 2), kept=st.integers(0, 3))
    def swap(self, launches: int, kept: int) -> None:
        """Whoever has an adapter is aborted, perhaps while steps compute for it, and versions that are in no slot are
        asked for at once."""
        for _ in range(launches):
            self.launch()
        for name in sorted(name for name in self.live if self.requests[name].pin != BASE_PIN)[kept:]:
            self._abort(name)
        for version in VERSIONS:
            if version is not None and self.table.get(version) is None:
                self._submit(version, (1, 2, 3), max_tokens=2)

    @rule(passed=st.floats(0.0, 5.0))
    def wait(self, passed: float) -> None:
        self.now += passed
