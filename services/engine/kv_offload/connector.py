"""Offload connector: the link between the radix tree and the tiers below the device, on the loop thread.

It decides which snapshots to save, and when loading is worth it: never where computing would be as fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.engine.kv_cache.block_pool import BlockPool, IntegrityError
from services.engine.kv_cache.compute_cost import ComputeCost
from services.engine.kv_cache.keys import Key, Namespace, Tier
from services.engine.kv_cache.prefix_cache import PrefixCache
from services.engine.kv_cache.radix_tree import Node, PrefixMatch
from services.engine.kv_cache.state_pool import StatePool
from services.engine.kv_offload.messages import (
    Entry,
    GiveUp,
    Layout,
    Load,
    Loaded,
    Part,
    Persist,
    Persisted,
    Released,
    Removed,
    Save,
    Stored,
    TierCommand,
    TierEvent,
    Use,
)
from services.engine.kv_offload.offloaded_entries import OffloadedEntries, OffloadedEntry

if TYPE_CHECKING:
    from services.engine.kv_offload.manager import TierManager

_SPEED = tuple(Tier)
_WORTHWHILE = 3.0
"""An entry is saved only if computing it takes so many times as long as loading it. Short ones gain little, and copying
each of them takes host time from the steps. What is not saved becomes part of the next entry."""
_MARGIN = 1.5
"""A load begins only if it may take so many times as long as expected before it is given up."""
_OVERDUE = 2.0
"""A load that has taken so many times as long as expected is given up, but not before _LEAST_PATIENCE."""
_LEAST_PATIENCE = 1 / 3
"""Least time before a load is given up, as a share of the longest time that it may take."""
_SAVING_SHARE = 8
"""Saves in progress may hold one in so many of all blocks, because live sequences cannot get those by eviction."""
_SAVES = 4
"""Most saves in progress. The loop learns of their ends between two steps, so a busy engine begins so many for each
step: their thread takes time from the loop's. An idle engine works through all deferred ones."""
_MOST_DEFERRED = 1024
"""Most deferred saves that are remembered."""


@dataclass(frozen=True, slots=True)
class LoadCandidate:
    """Snapshot that could be loaded, with the entries that this takes."""

    node: Node
    chain: Sequence[OffloadedEntry]
    """Entries to read, in the order of the prefix."""
    tier: Tier
    """Slowest tier that one of them comes from."""
    patience: float
    """Seconds after which computing is better than waiting longer."""


@dataclass(frozen=True, slots=True)
class LoadInProgress:
    """Load in progress. Nothing else uses its target blocks and slot."""

    namespace: Namespace
    tokens: bytes
    blocks: Sequence[int]
    """Blocks of the whole prefix; those that were on the device before are shared."""
    slot: int


class OffloadConnector:
    """Offload connector. Used by the loop thread.

    Args:
        tiers: gets the commands of ``take_commands`` and sends the events for ``take_events``.
        share: longest time of a load, as a share of the computation that it saves.
    """

    def __init__(
        self,
        cache: PrefixCache,
        blocks: BlockPool,
        slots: StatePool,
        tiers: TierManager,
        cost: ComputeCost,
        *,
        share: float,
    ) -> None:
        self._cache = cache
        self._blocks = blocks
        self._slots = slots
        self._tiers = tiers
        self._cost = cost
        self._share = share
        self._layout: Layout = tiers.layout
        self._entries = OffloadedEntries(cache)
        self._saving: dict[Key, tuple[Node, Sequence[int]]] = {}
        self._loading: dict[int, LoadInProgress] = {}
        self._targets: dict[Node, int] = {}
        """Number of the load in progress that brings each snapshot."""
        self._last_id = 0
        self._persisting: dict[int, Callable[[Sequence[tuple[Key, Tier]]], None]] = {}
        self._commands: list[TierCommand] = []
        self._deferred_saves: deque[Node] = deque(maxlen=_MOST_DEFERRED)

    @property
    def copying(self) -> bool:
        """True while a load or a save is in progress."""
        return bool(self._loading or self._saving)

    def is_loading(self, load_id: int) -> bool:
        return load_id in self._loading

    def take_commands(self) -> list[TierCommand]:
        """Commands to submit to the tiers when all steps planned so far have been launched."""
        commands, self._commands = self._commands, []
        return commands

    # Saving.

    def offer(self, node: Node, *, wanted: bool = False) -> None:
        """Offers a snapshot, which is saved soon if loading it is much faster than computing it again.

        Args:
            wanted: save it now, whatever it costs.
        """
        if wanted:
            self._save(node, wanted=True)
        elif self._may_be_saved(node):
            self._deferred_saves.append(node)
            self._save_deferred()

    def _save_deferred(self) -> None:
        """Begins deferred saves, in their order, up to the limits of saves in progress."""
        while self._deferred_saves and len(self._saving) < _SAVES:
            node = self._deferred_saves.popleft()
            if not self._save(node):
                self._deferred_saves.appendleft(node)
                return

    def _may_be_saved(self, node: Node) -> bool:
        if not node.slot or node.blocks is None or node.pending is not None or node.parent is None:
            return False
        return not (node.saving or node.key is not None or node.transient)

    def _save(self, node: Node, *, wanted: bool = False) -> bool:
        """Saves a snapshot if that is possible and worth it; False: too many saves are in progress."""
        if not self._may_be_saved(node) or node.parent is None:
            return True
        above = self._entries.above(node)
        begin = 0 if above is None else above.node.end
        seconds = self._cost.seconds(begin, node.end)
        entry = Entry.behind(None if above is None else above.entry, node.namespace, node.tokens(begin), seconds)
        if entry.key in self._entries:
            return True
        if not wanted and seconds < _WORTHWHILE * self._tiers.seconds(Tier.HOST, self._layout.payload_bytes(entry)):
            return True
        first = entry.first_block(self._layout.block_size)
        blocks = self._cache.block_table(node.path())[first:]
        held = sum(len(others) for _, others in self._saving.values())
        if not wanted and self._saving and held + len(blocks) > self._blocks.total // _SAVING_SHARE:
            return False
        self._blocks.hold_for_copy(blocks)
        self._cache.pin(node)
        node.saving = True
        self._entries.add(entry, node)
        self._saving[entry.key] = (node, blocks)
        self._commands.append(Save(entry, blocks, node.slot))
        return True

    def reload_seconds(self, node: Node) -> float | None:
        """Seconds to load a node's blocks and snapshot again; None: no tier has them."""
        stored = self._entries.get(node.key)
        if stored is None or stored.fastest is None:
            return None
        return self._tiers.seconds(stored.fastest, self._layout.payload_bytes(stored.entry))

    def used(self, node: Node) -> None:
        """Counts a hit on the entries of the prefix that ends at a node."""
        keys = [stored.entry.key for stored in self._entries.chain(node)]
        if keys:
            self._commands.append(Use(keys))

    # Loading.

    def find_load(self, path: PrefixMatch, hit: Node | None, limit: int, unit: int) -> LoadCandidate | None:
        """Snapshot to load for a sequence of which at most ``limit`` tokens may be cached; None: no load is much faster
        than resuming from ``hit``.

        A load that turns out to be slow is given up, and the wait is lost: at most ``share`` of the time that computing
        takes without it.
        """
        begin = 0 if hit is None else hit.end
        best: LoadCandidate | None = None
        fastest = self._cost.seconds(begin, limit)
        resident = self._cache.resident(path)
        there = path.nodes[resident - 1].end if resident else 0
        for node in path.nodes:
            if node.end <= begin or node.end > limit or node.end % unit or node.pending is not None:
                continue
            chain = self._entries.chain(node)
            if not chain or chain[-1].entry.end != node.end:
                continue
            needed = [stored for stored in chain if stored.entry.end > there] or chain[-1:]
            loading = self._load_seconds(needed, there, node.end)
            most = self._share * self._cost.seconds(begin, node.end)
            seconds = self._cost.seconds(node.end, limit) + loading
            if _MARGIN * loading <= most and seconds < fastest:
                tier = max((stored.fastest or Tier.STORE for stored in needed), key=_SPEED.index)
                patience = min(max(_OVERDUE * loading, _LEAST_PATIENCE * most), most)
                best, fastest = LoadCandidate(node, needed, tier, patience), seconds
        return best

    def load_of(self, node: Node) -> int:
        """Number of the load in progress that brings this snapshot; 0: there is none."""
        return self._targets.get(node, 0)

    def load(
        self, path: PrefixMatch, wanted: LoadCandidate, take_blocks: Callable[[int], Sequence[int] | None], slot: int
    ) -> int:
        """Begins a load.

        Args:
            take_blocks: allocates blocks; returns None if there are too few.
            slot: state slot to load into.

        Returns:
            Number of the load; 0: there were too few blocks, and nothing has begun.
        """
        node, size = wanted.node, self._layout.block_size
        nodes = node.path()
        resident = min(self._cache.resident(path), len(nodes))
        there = nodes[resident - 1].end if resident else 0
        old = self._cache.block_table(nodes[:resident])
        if there < node.end:
            # The block in which the present KV ends is loaded whole, from the next entry.
            old = old[: there // size]
        self._blocks.hold_for_copy(old)
        fresh = take_blocks(-(-node.end // size) - len(old))
        if fresh is None:
            self._blocks.release_copy(old)
            return 0
        self._blocks.hold_for_copy(fresh)
        self._blocks.release(fresh)
        self._last_id += 1
        parts = list(self._parts(wanted.chain, len(old), fresh, slot))
        self._loading[self._last_id] = LoadInProgress(node.namespace, node.tokens(), [*old, *fresh], slot)
        self._targets[node] = self._last_id
        self._commands.append(Load(self._last_id, parts))
        return self._last_id

    def give_up(self, load_id: int) -> None:
        """Gives up a load that nobody waits for any more; a later request for the same begins another one."""
        self._forget_targets(load_id)
        self._commands.append(GiveUp(load_id))

    def _forget_targets(self, load_id: int) -> None:
        for node in [node for node, other in self._targets.items() if other == load_id]:
            del self._targets[node]

    def _parts(self, chain: Sequence[OffloadedEntry], have: int, fresh: Sequence[int], slot: int) -> Iterator[Part]:
        """Parts of the entries that go to the fresh blocks, the first of which is block ``have`` of the prefix. A block
        in which an entry ends comes from the next entry, which has it whole."""
        size = self._layout.block_size
        for at, stored in enumerate(chain):
            entry, last = stored.entry, at == len(chain) - 1
            first = entry.first_block(size)
            begin = max(first, have)
            end = -(-entry.end // size) if last else entry.end // size
            blocks = fresh[begin - have : max(begin, end) - have]
            if blocks or last:
                yield Part(entry.key, begin - first, blocks, slot if last else 0)

    def _load_seconds(self, chain: Sequence[OffloadedEntry], there: int, end: int) -> float:
        """Seconds to load the blocks behind the first ``there`` tokens and the last state; below the host whole entries
        are read."""
        sizes: dict[Tier, int] = {}
        size = self._layout.block_size
        for stored in chain:
            entry, tier = stored.entry, stored.fastest or Tier.STORE
            if tier is Tier.HOST:
                first = max(entry.first_block(size), there // size)
                blocks = 0 if there >= entry.end else max(0, -(-entry.end // size) - first)
                amount = blocks * self._layout.block_bytes + (self._layout.slot_bytes if entry.end == end else 0)
            else:
                amount = self._layout.payload_bytes(entry)
            sizes[tier] = sizes.get(tier, 0) + amount
        return sum(self._tiers.seconds(tier, amount) for tier, amount in sizes.items())

    # Events of the tiers.

    def take_events(self, events: Sequence[TierEvent]) -> list[Node]:
        """Takes events of the tiers; returns the nodes whose state was saved."""
        kept: list[Node] = []
        for event in events:
            match event:
                case Stored():
                    node = self._entries.kept(event.entry, event.tier)
                    if node is not None:
                        kept.append(node)
                case Released():
                    self._released(event.key)
                case Removed():
                    self._dropped(event.key, event.tier)
                case Loaded():
                    self._loaded(event)
                case Persisted():
                    done = self._persisting.pop(event.persist_id, None)
                    if done is not None:
                        done(event.missing)
        return kept

    def _released(self, key: Key) -> None:
        if key not in self._saving:
            return
        node, blocks = self._saving.pop(key)
        self._blocks.release_copy(blocks)
        node.saving = False
        stored = self._entries.get(key)
        if stored is not None and not stored.tiers:
            self._entries.remove(stored)
        self._cache.unpin(node)
        self._save_deferred()

    def _dropped(self, key: Key, tier: Tier) -> None:
        stored = self._entries.get(key)
        if stored is None:
            return
        stored.tiers.discard(tier)
        if not stored.tiers and key not in self._saving:
            self._entries.remove(stored)

    def _loaded(self, event: Loaded) -> None:
        loading = self._loading.pop(event.load_id, None)
        if loading is None:
            return
        self._forget_targets(event.load_id)
        if event.failed:
            self._slots.release(loading.slot)
        else:
            self._cache.insert(loading.namespace, loading.tokens, loading.blocks, loading.slot)
        self._blocks.release_copy(loading.blocks)

    # For conversation sessions.

    def chain_keys(self, node: Node) -> list[Key]:
        """Keys of the entries of the prefix that ends at a node, as far as tiers have them."""
        return [stored.entry.key for stored in self._entries.chain(node)]

    def tiers_of(self, node: Node) -> list[tuple[Entry, frozenset[Tier]]]:
        """Entries of that prefix, each with the tiers that have it."""
        return [(stored.entry, frozenset(stored.tiers)) for stored in self._entries.chain(node)]

    def node_of(self, key: Key) -> Node | None:
        """Node at which an entry ends; None: the entry is not known."""
        stored = self._entries.get(key)
        return None if stored is None else stored.node

    def submit(self, command: TierCommand) -> None:
        """Adds a command to those for the tiers."""
        self._commands.append(command)

    def persist(self, node: Node, done: Callable[[Sequence[tuple[Key, Tier]]], None]) -> None:
        """Copies the entries of a prefix to every tier; ``done`` gets the (key, tier) pairs that failed."""
        self._last_id += 1
        self._persisting[self._last_id] = done
        self._commands.append(Persist(self._last_id, self._entries.lineage(node)))

    # For the integrity check.

    def held_blocks(self) -> Iterator[int]:
        """Blocks that saves and loads in progress hold."""
        for _, blocks in self._saving.values():
            yield from blocks
        for loading in self._loading.values():
            yield from loading.blocks

    def held_slots(self) -> Iterator[int]:
        """Slots that loads in progress fill."""
        for loading in self._loading.values():
            yield loading.slot

    def check(self) -> None:
        """Raises IntegrityError if entries and nodes do not belong together."""
        self._entries.check()
        if any(key not in self._saving for key in self._entries.unsaved()):
            raise IntegrityError("an entry is listed, but no tier has it")
