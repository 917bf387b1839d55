"""Tiers below the toy runner of ``machine``: whatever they are told to copy they check, and then copy for real."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from services.engine.kv_cache.keys import Key, Tier, bytes_to_tokens
from services.engine.kv_offload.manager import TierManager
from services.engine.kv_offload.messages import (
    Entry,
    Forget,
    GiveUp,
    Layout,
    Load,
    Loaded,
    Persist,
    Persisted,
    Released,
    Removed,
    Save,
    Stored,
    TierCommand,
    TierEvent,
)
from tests.unit.engine.machine import ToyRunner


class ToyTiers(TierManager):
    """Stands in for TierManager: all that the loop thread calls is overridden. Commands are done when ``work`` is
    called."""

    def __init__(self, runner: ToyRunner, block_size: int) -> None:
        self.runner = runner
        self._toy_layout = Layout("toy", block_size, 8, 8)
        self.commands: deque[TierCommand] = deque()
        self.events: list[TierEvent] = []
        self.entries: dict[Key, tuple[Entry, list[dict[int, object]], object]] = {}
        self.price = 0.0
        """Seconds of any load."""
        self.broken = False
        """True if saves and loads fail."""
        self.loads = self.given_up = 0

    @property
    def layout(self) -> Layout:
        return self._toy_layout

    def submit(self, commands: Sequence[TierCommand]) -> None:
        for command in commands:
            if isinstance(command, GiveUp):
                self._give_up(command.load_id)
            else:
                self.commands.append(command)

    def _give_up(self, load_id: int) -> None:
        for load in [command for command in self.commands if isinstance(command, Load) and command.load_id == load_id]:
            self.commands.remove(load)
            self.given_up += 1
            self.events.append(Loaded(load_id, [part.key for part in load.parts]))

    def take_events(self) -> list[TierEvent]:
        events, self.events = self.events, []
        return events

    def seconds(self, tier: Tier, size: int) -> float:
        return self.price

    def work(self, most: int = 1000) -> None:
        for _ in range(min(most, len(self.commands))):
            command = self.commands.popleft()
            match command:
                case Save():
                    self._save(command)
                case Load():
                    self._load(command)
                case Forget():
                    for key in command.keys:
                        self.drop(key)
                case Persist():
                    self.events.append(
                        Persisted(
                            command.persist_id,
                            tuple((key, Tier.HOST) for key in command.keys if key not in self.entries),
                        )
                    )

    def drop(self, key: Key) -> None:
        """An entry goes, and all behind it before it."""
        if key not in self.entries:
            return
        for other in [other.key for other, *_ in self.entries.values() if other.parent == key]:
            self.drop(other)
        del self.entries[key]
        self.events.append(Removed(key, Tier.HOST))

    def _save(self, command: Save) -> None:
        entry, size = command.entry, self.layout.block_size
        state = self.runner.states[command.slot]
        assert len(state[1]) == entry.end, "the state is of another place"
        tokens = bytes_to_tokens(entry.tokens)
        assert list(state[1][entry.start :]) == tokens
        first = entry.first_block(size)
        blocks = [{at: self.runner.kv.get((block, at)) for at in range(size)} for block in command.blocks]
        assert len(blocks) == entry.num_blocks(size)
        for position in range(entry.start, entry.end):
            assert blocks[position // size - first][position % size] == (state[0], tokens[position - entry.start])
        if not self.broken and (entry.parent is None or entry.parent in self.entries):
            self.entries[entry.key] = (entry, blocks, state)
            self.events.append(Stored(entry, Tier.HOST))
        self.events.append(Released(entry.key))

    def _load(self, command: Load) -> None:
        missing = [part.key for part in command.parts if part.key not in self.entries]
        if missing or self.broken:
            self.events.append(Loaded(command.load_id, missing or [part.key for part in command.parts]))
            return
        self.loads += 1
        for part in command.parts:
            _, blocks, state = self.entries[part.key]
            for block, content in zip(part.blocks, blocks[part.skip :], strict=False):
                assert block
                for at, value in content.items():
                    self.runner.kv[block, at] = value
            if part.slot:
                self.runner.states[part.slot] = state
        self.events.append(Loaded(command.load_id))
