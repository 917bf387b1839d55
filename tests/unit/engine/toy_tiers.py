"""Tiers below the toy runner of ``machine``: whatever they are told to copy they check, and then copy for real."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from services.engine.kv_cache.keys import Key, Tier, decode
from services.engine.kv_offload.messages import (
    Dropped,
    Entry,
    Event,
    Forget,
    GiveUp,
    Job,
    Kept,
    Layout,
    Load,
    Loaded,
    Persist,
    Persisted,
    Released,
    Save,
)
from tests.unit.engine.machine import ToyRunner


class ToyTiers:
    """Implements Tiers. Jobs are done when ``work`` is called."""

    def __init__(self, runner: ToyRunner, block_size: int) -> None:
        self.runner = runner
        self.layout = Layout("toy", block_size, 8, 8)
        self.jobs: deque[Job] = deque()
        self.events: list[Event] = []
        self.entries: dict[Key, tuple[Entry, list[dict[int, object]], object]] = {}
        self.price = 0.0
        """Seconds of any load."""
        self.broken = False
        """Whether saves and loads fail."""
        self.loads = self.given_up = 0

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if isinstance(job, GiveUp):
                self._give_up(job.ticket)
            else:
                self.jobs.append(job)

    def _give_up(self, ticket: int) -> None:
        for load in [job for job in self.jobs if isinstance(job, Load) and job.ticket == ticket]:
            self.jobs.remove(load)
            self.given_up += 1
            self.events.append(Loaded(ticket, [part.key for part in load.parts]))

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def seconds(self, tier: Tier, size: int) -> float:
        return self.price

    def work(self, most: int = 1000) -> None:
        for _ in range(min(most, len(self.jobs))):
            job = self.jobs.popleft()
            match job:
                case Save():
                    self._save(job)
                case Load():
                    self._load(job)
                case Forget():
                    for key in job.keys:
                        self.drop(key)
                case Persist():
                    self.events.append(
                        Persisted(job.ticket, tuple((key, Tier.HOST) for key in job.keys if key not in self.entries))
                    )

    def drop(self, key: Key) -> None:
        """An entry goes, and all behind it before it."""
        if key not in self.entries:
            return
        for other in [other.key for other, *_ in self.entries.values() if other.parent == key]:
            self.drop(other)
        del self.entries[key]
        self.events.append(Dropped(key, Tier.HOST))

    def _save(self, job: Save) -> None:
        entry, size = job.entry, self.layout.block_size
        state = self.runner.states[job.slot]
        assert len(state[1]) == entry.end, "the state is of another place"
        tokens = decode(entry.tokens)
        assert list(state[1][entry.start :]) == tokens
        first = entry.first_block(size)
        blocks = [{at: self.runner.kv.get((block, at)) for at in range(size)} for block in job.blocks]
        assert len(blocks) == entry.num_blocks(size)
        for position in range(entry.start, entry.end):
            assert blocks[position // size - first][position % size] == (state[0], tokens[position - entry.start])
        if not self.broken and (entry.parent is None or entry.parent in self.entries):
            self.entries[entry.key] = (entry, blocks, state)
            self.events.append(Kept(entry, Tier.HOST))
        self.events.append(Released(entry.key))

    def _load(self, job: Load) -> None:
        missing = [part.key for part in job.parts if part.key not in self.entries]
        if missing or self.broken:
            self.events.append(Loaded(job.ticket, missing or [part.key for part in job.parts]))
            return
        self.loads += 1
        for part in job.parts:
            _, blocks, state = self.entries[part.key]
            for block, content in zip(part.blocks, blocks[part.skip :], strict=False):
                assert block
                for at, value in content.items():
                    self.runner.kv[block, at] = value
            if part.slot:
                self.runner.states[part.slot] = state
        self.events.append(Loaded(job.ticket))
