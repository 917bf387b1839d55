"""Prompts that are not computed yet and begin alike: what one of them computes, the others wait for. That counts until
the steps that compute it have run.

They are a radix tree of their own. Where it branches, or ends, with more than one prompt below, a state is worth
keeping: the first to be computed promises it, and those behind it in rank wait for that instead of computing the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.kv_cache.keys import TOKEN_BYTES, Namespace
from services.engine.kv_cache.radix_tree import Node, RadixTree
from services.engine.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Promise:
    """A state that a sequence is going to leave behind the first ``position`` tokens of its prompt."""

    sequence: Sequence
    position: int
    node: Node
    """Of the tree of waiting prompts, in which the position lies."""


class PendingPrefixes:
    """All prompts that are not computed yet."""

    def __init__(self) -> None:
        self._tree = RadixTree()
        self._counts: dict[Node, int] = {}
        self._ends: dict[Sequence, Node] = {}
        self._promises: dict[Node, list[Promise]] = {}
        self._made: dict[Sequence, list[Promise]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, sequence: Sequence) -> None:
        """Its prompt is to be computed; nothing happens if that is known."""
        if sequence in self._ends:
            return
        tokens = sequence.prompt
        node, end = self._tree.root(Namespace(sequence.namespace)), len(tokens) // TOKEN_BYTES
        while node.end < end:
            node, rest = self._tree.descend(node, tokens)
            if rest is not None:
                self._counts[node] = self._counts[rest]
                self._divide(node, rest)
            self._counts[node] = self._counts.get(node, 0) + 1
        self._ends[sequence] = node

    def remove(self, sequence: Sequence) -> None:
        """It is computed, or will not be."""
        node = self._ends.pop(sequence, None)
        while node is not None and node.parent is not None:
            above = node.parent
            self._counts[node] -= 1
            if not self._counts[node]:
                del self._counts[node]
                for promise in list(self._promises.get(node, ())):
                    self._drop(promise)
                self._tree.remove(node)
            node = above

    def withdraw(self, sequence: Sequence) -> None:
        """It does not get to what it has promised."""
        for promise in list(self._made.get(sequence, ())):
            self._drop(promise)

    def branches(self, sequence: Sequence) -> list[int]:
        """Positions of its prompt up to which others have the same tokens, the farthest first."""
        found: list[int] = []
        node = self._ends.get(sequence)
        below = 1
        while node is not None and node.parent is not None:
            if self._counts[node] > below:
                found.append(node.end)
                below = self._counts[node]
            node = node.parent
        return found

    def promise(self, sequence: Sequence, positions: tuple[int, ...]) -> None:
        """It is going to leave states there."""
        self.withdraw(sequence)
        node = self._ends.get(sequence)
        while node is not None and node.parent is not None:
            for position in positions:
                if node.start < position <= node.end:
                    self._list(Promise(sequence, position, node))
            node = node.parent

    def promised(self, sequence: Sequence, limit: int) -> int:
        """How much of its prompt, up to ``limit`` tokens, a sequence of better rank is going to leave a state of."""
        node = self._ends.get(sequence)
        while node is not None and node.parent is not None:
            positions = [
                promise.position
                for promise in self._promises.get(node, ())
                if promise.position <= limit and promise.sequence.rank < sequence.rank
            ]
            if positions:
                return max(positions)
            node = node.parent
        return 0

    def kept(self, sequence: Sequence, position: int) -> None:
        """The state is there, or will not be."""
        for promise in [made for made in self._made.get(sequence, ()) if made.position == position]:
            self._drop(promise)

    def _list(self, promise: Promise) -> None:
        self._promises.setdefault(promise.node, []).append(promise)
        self._made.setdefault(promise.sequence, []).append(promise)

    def _drop(self, promise: Promise) -> None:
        listed, made = self._promises[promise.node], self._made[promise.sequence]
        listed.remove(promise)
        made.remove(promise)
        if not listed:
            del self._promises[promise.node]
        if not made:
            del self._made[promise.sequence]

    def _divide(self, upper: Node, lower: Node) -> None:
        """A node has been cut: promises go where their position is now."""
        for promise in list(self._promises.get(lower, ())):
            if promise.position <= upper.end:
                self._drop(promise)
                self._list(Promise(promise.sequence, promise.position, upper))
