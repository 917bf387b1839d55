"""Offloaded entries: the tree's node of each entry, and the tiers that have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.engine.kv_cache.block_pool import IntegrityError
from services.engine.kv_cache.keys import Key, Tier
from services.engine.kv_cache.prefix_cache import PrefixCache
from services.engine.kv_cache.radix_tree import Node
from services.engine.kv_offload.messages import Entry


@dataclass(slots=True)
class OffloadedEntry:
    """Entry that a tier has or that is being saved, with its node."""

    entry: Entry
    node: Node
    tiers: set[Tier] = field(default_factory=set)
    """Tiers that have the entry; empty: it is being saved."""

    @property
    def fastest(self) -> Tier | None:
        return next((tier for tier in Tier if tier in self.tiers), None)


class OffloadedEntries:
    """Offloaded entries by key. A node's ``key`` is that of its entry here, if it has one.

    Args:
        cache: prefix cache whose tree has the nodes.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._stored: dict[Key, OffloadedEntry] = {}
        self._alternates: dict[Node, list[Key]] = {}
        """Further entries that end at a node: another engine has divided the prefix into other entries."""

    def __contains__(self, key: Key) -> bool:
        return key in self._stored

    def get(self, key: Key | None) -> OffloadedEntry | None:
        return None if key is None else self._stored.get(key)

    def above(self, node: Node) -> OffloadedEntry | None:
        """Entry of the nearest node above that has one, even if it is still being saved."""
        at = node.parent
        while at is not None and self.get(at.key) is None:
            at = at.parent
        return None if at is None else self.get(at.key)

    def add(self, entry: Entry, node: Node) -> None:
        """Adds the entry of a node that is being saved."""
        node.key = entry.key
        self._stored[entry.key] = OffloadedEntry(entry, node)

    def kept(self, entry: Entry, tier: Tier) -> Node | None:
        """Records that a tier has an entry, which may be new here. Returns its node; None: its parent is not known."""
        stored = self._stored.get(entry.key)
        if stored is None:
            above = self.get(entry.parent)
            if entry.parent is not None and above is None:
                return None
            prefix = entry.tokens if above is None else above.node.tokens() + entry.tokens
            node = self._cache.ensure_node(entry.namespace, prefix)
            stored = self._stored[entry.key] = OffloadedEntry(entry, node)
            if node.key is None:
                node.key = entry.key
            else:
                self._alternates.setdefault(node, []).append(entry.key)
        stored.tiers.add(tier)
        return stored.node

    def remove(self, stored: OffloadedEntry) -> None:
        """Removes an entry that no tier has any more."""
        key, node = stored.entry.key, stored.node
        del self._stored[key]
        others = self._alternates.pop(node, [])
        if node.key == key:
            node.key = others.pop(0) if others else None
        else:
            others.remove(key)
        if others:
            self._alternates[node] = others
        self._cache.prune(node)

    def chain(self, node: Node) -> list[OffloadedEntry]:
        """Entries of the prefix up to this node, or up to the nearest node above that has one; [] if one cannot be
        read."""
        at: Node | None = node
        while at is not None and (at.key is None or not self._stored[at.key].tiers):
            at = at.parent
        chain: list[OffloadedEntry] = []
        key = None if at is None else at.key
        while key is not None:
            stored = self._stored.get(key)
            if stored is None or not stored.tiers:
                return []
            chain.append(stored)
            key = stored.entry.parent
        chain.reverse()
        return chain

    def lineage(self, node: Node) -> list[Key]:
        """Keys of a prefix's entries in order, also of those that are being saved."""
        keys: list[Key] = []
        at: Node | None = node
        while at is not None and at.key is None:
            at = at.parent
        stored = None if at is None else self.get(at.key)
        while stored is not None:
            keys.append(stored.entry.key)
            stored = self.get(stored.entry.parent)
        return keys[::-1]

    def unsaved(self) -> Iterator[Key]:
        """Keys of entries that no tier has yet."""
        return (key for key, stored in self._stored.items() if not stored.tiers)

    def check(self) -> None:
        """Raises IntegrityError if entries and nodes contradict each other."""
        for stored in self._stored.values():
            if stored.node.end != stored.entry.end or stored.node.namespace != stored.entry.namespace:
                raise IntegrityError(
                    f"an entry that ends at {stored.entry.end} is at a node that ends at {stored.node.end}"
                )
        for node in self._cache.tree:
            if node.key is not None and node.key not in self._stored:
                raise IntegrityError(f"a node that ends at {node.end} has an entry that is not listed")
